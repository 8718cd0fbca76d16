"""Proposes a rescale for a subject that breaks in float16."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from overflow_lab.capture.outputs import compare_outputs, outputs_of
from overflow_lab.capture.precisions import REFERENCE, parse_precision
from overflow_lab.capture.randomness import kept_random_state, reseed
from overflow_lab.capture.record import Recorder
from overflow_lab.capture.runs import Reference, Watched
from overflow_lab.capture.shadow.sites import SiteKey
from overflow_lab.errors import UsageError
from overflow_lab.progress import Progress, Silent
from overflow_lab.recording import OperationRow
from overflow_lab.recording.writer import Writer
from overflow_lab.remedies.checkpoint import save_checkpoint
from overflow_lab.remedies.remedy import Found, Remedy
from overflow_lab.remedies.scaling import describe
from overflow_lab.remedies.scaling.constants import Mode, merged, modes, shifted_clashes, write_config
from overflow_lab.remedies.scaling.edits import Edits, named
from overflow_lab.remedies.scaling.equations import Equations
from overflow_lab.remedies.scaling.solve import Solution, solve
from overflow_lab.remedies.scaling.trace import ScaleTrace

if TYPE_CHECKING:
    from overflow_lab.scan import Scan
    from overflow_lab.subjects import Subject

# Bits of room above the largest value seen, for inputs that were not: asked for, and wished for.
LEAST_HEADROOM, AMPLE_HEADROOM = 2.0, 3.0
# Further batches say little about the largest value.
MOST_BATCHES = 8
# The largest relative error of the float32 outputs at which the function is taken as kept.
SAME_FUNCTION = 1e-5


def propose(
    subject: Subject, found: Scan, precision: str, *, progress: Progress | None = None, runs: int = 60
) -> Found:
    """Return the rescale that gives every value headroom in `precision`; `runs` bounds the batches looked at."""
    asked = parse_precision(precision)
    if asked.dtype != "float16":
        return Found(reason=f"{asked.dtype} has the range of float32, so a scale moves nothing")
    tell = progress or Silent()
    tell.stage("reading how values scale")
    with kept_random_state(), torch.no_grad():
        traced = _traced(subject, found, precision, min(runs, MOST_BATCHES))
        if traced is None:
            return Found(reason="the program cannot be followed operation by operation")
        tell.stage("solving for the exponents")
        best = _best(subject, traced)
    if best is None:
        return Found(reason="what does not fit has no scale of its own: its operations ask for these very values")
    return Found((_remedy(subject, precision, traced, best),))


@dataclass
class _Traced:
    """What the float32 runs gave: the model, the batches with their outputs, and the equations."""

    base: Watched
    references: list[Reference]
    equations: Equations


@dataclass(frozen=True)
class _Choice:
    mode: Mode
    edits: Edits
    missing: float
    error: float


def _traced(subject: Subject, found: Scan, precision: str, most: int) -> _Traced | None:
    recorder = Recorder(subject, (), Writer(None, found.recording.header))
    base = recorder.watched(parse_precision(REFERENCE))
    equations = Equations()
    references = [recorder.reference(base, i, batch) for i, batch in enumerate(islice(subject.batches, most))]
    dtypes = _dtypes(found, precision)
    model = base.prepared.model
    for reference in references:
        trace = ScaleTrace(model, equations, dtypes)
        reseed()
        try:
            with base.prepared.context():
                inputs = base.prepared.inputs(dict(reference.inputs))
                trace.run(inputs, base.prepared.inputs(reference.batch.positional))
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # a program that refuses dispatch modes: TorchScript, custom operators
            return None
    return _Traced(base, references, equations) if references else None


def _dtypes(found: Scan, precision: str) -> dict[SiteKey, str]:
    """Return the dtype of each operation's result in the low-precision program, as the scan saw it."""
    rows = found.recording.of(OperationRow)
    return {(row.module, row.op, row.ordinal): row.dtype for row in rows if row.precision == precision and row.dtype}


def _best(subject: Subject, traced: _Traced) -> _Choice | None:
    """Return the choice that leaves the least headroom missing; of the nearly same, the one that is easier to keep."""
    model = traced.base.prepared.model
    clashes = shifted_clashes(traced.equations)
    best: _Choice | None = None
    for mode in modes(model, traced.equations, checkpoint=subject.save is not None):
        mode = merged(mode, clashes)
        solution = solve(traced.equations, least=LEAST_HEADROOM, ample=AMPLE_HEADROOM, fixed=mode.fixed, tied=mode.tied)
        if solution is None or not solution.exponents:
            continue
        if best is not None and solution.missing > best.missing - 0.5:
            continue
        edits = _edits(traced.equations, mode, solution)
        error = _function_error(traced, edits)
        if edits.exponents and error <= SAME_FUNCTION:
            best = _Choice(mode, edits, solution.missing, error)
            if best.missing < 0.01:
                break
    return best


def _edits(equations: Equations, mode: Mode, solution: Solution) -> Edits:
    """Return what a solution changes; constants that are left are not among it."""
    constants = {
        knob.name: equations.constants[knob.name] * 2.0**exponent
        for knob, exponent in solution.exponents.items()
        if knob.kind == "constant" and knob not in mode.left
    }
    return Edits({k: e for k, e in solution.exponents.items() if k.kind != "constant"}, constants)


def _function_error(traced: _Traced, edits: Edits) -> float:
    """Return the largest relative error of the rescaled model's float32 outputs; 0 where all are the same bits."""
    model = edits.apply(copy.deepcopy(traced.base.prepared.model))
    prepared = dataclasses.replace(traced.base.prepared, model=model)
    worst = 0.0
    for reference in traced.references:
        reseed()
        with prepared.context():
            inputs = prepared.inputs(dict(reference.inputs))
            output = model(*prepared.inputs(reference.batch.positional), **inputs)
        outputs = outputs_of(output, reference.outputs.mask, set(), positions=reference.samples.positions)
        rows, apart = compare_outputs(REFERENCE, reference.outputs, outputs)
        worst = max([worst, *(row.relative_error or 0.0 for row in rows), *(float("inf") for _ in apart)])
        if any(row.nonfinite for row in rows):
            return float("inf")
    return worst


def _remedy(subject: Subject, precision: str, traced: _Traced, best: _Choice) -> Remedy:
    edits = best.edits
    old = traced.equations.constants
    changed = {old[name]: value for name, value in edits.constants.items()}

    def mend(given: Subject) -> Subject:
        return dataclasses.replace(given, load=edits.loading(given.load), save=None)

    def save(folder: Path) -> None:
        model = edits.apply(subject.load(None))
        write_config(model, changed)
        save_checkpoint(model, folder, subject)
        _check_saved(model, edits, folder)

    return Remedy(
        kind="rescale",
        title=describe.title(edits),
        precision=precision,
        mend=mend,
        members=describe.members(edits),
        snippets={"Python, on the model in float32": describe.snippet(edits)},
        notes=_notes(best, changed, savable=subject.save is not None),
        save=save if best.mode.savable and subject.save is not None else None,
    )


def _notes(best: _Choice, changed: Mapping[float, float], *, savable: bool) -> tuple[str, ...]:
    same = "the same bits" if best.error == 0.0 else f"the same to a relative error of {best.error:.1g}"
    notes = [f"In float32 the outputs are {same}; nothing is added at run time."]
    if best.missing >= 0.01:
        notes.append(f"Not every value gets {LEAST_HEADROOM:g} bits of headroom: {best.missing:.1f} bits are missing.")
    if changed:
        pairs = ", ".join(f"{old:g} becomes {new:.4g}" for old, new in sorted(changed.items()))
        notes.append(f"Constants that stand beside a scaled value are scaled with it: {pairs}.")
    if best.mode.left:
        notes.append("The eps of some norms stays as it is, beside values of another scale.")
    if savable and not best.mode.savable:
        notes.append("A checkpoint alone cannot carry this: some constants are no field of the config. Paste the code.")
    return tuple(notes)


def _check_saved(model: nn.Module, edits: Edits, folder: Path) -> None:
    """Load what was saved with plain transformers and compare. Raises UsageError where the folder does not carry it."""
    from overflow_lab.subjects.quiet import quiet_loading

    with quiet_loading():
        loader: Any = type(model)
        again = loader.from_pretrained(folder, dtype=torch.float32)
    mine, theirs = named(model), named(again)
    lost = [name for name in edits.weights if name not in theirs or not torch.equal(mine[name].cpu(), theirs[name])]
    for name, value in edits.constants.items():
        path, _, attribute = name.rpartition(":")
        if getattr(again.get_submodule(path), attribute) != value:
            lost.append(name)
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise UsageError(
            f"{folder} does not carry the rescale: {lost[0]}{more} came back otherwise; paste the code instead."
        )

"""The cheap oracle of the search: a plain forward of all batches with a set of members in float32.

The models are loaded once and the islands toggled in place, so a trial costs one forward of each batch. What a trial
accepts is still to be confirmed by a scan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from overflow_lab.analysis.effects import effect, is_imprecise, is_wrong
from overflow_lab.capture.buffers import kept_buffers
from overflow_lab.capture.emulated import products
from overflow_lab.capture.modes import outside_modes
from overflow_lab.capture.outputs import Outputs, compare_outputs, mask_of, outputs_of
from overflow_lab.capture.positions import RealPositions
from overflow_lab.capture.precisions import REFERENCE, Prepared, parse_precision, prepare
from overflow_lab.capture.randomness import kept_random_state, reseed
from overflow_lab.capture.record import Recorder
from overflow_lab.capture.runs import Reference
from overflow_lab.formats import FORMATS
from overflow_lab.progress import Progress, Silent
from overflow_lab.recording import NoiseRow, OutputRow, Recording
from overflow_lab.recording.writer import Writer
from overflow_lab.remedies.islands.apply import apply
from overflow_lab.remedies.islands.keep import Undo, keep_weights
from overflow_lab.remedies.islands.members import Members, modules_of
from overflow_lab.remedies.islands.operations import WideMode, run_under
from overflow_lab.subjects import Subject
from overflow_lab.subjects.containers import tensors

Ports = set[tuple[int, str, str]]  # batch, module, port
# Batches that a trial runs; the scans of what it accepts run them all.
MOST_BATCHES = 8


class BudgetSpent(Exception):
    """The search has no runs left."""


@dataclass
class Trials:
    """Runs a precision with members in float32, against float32; `runs` counts what it took, scans among them.

    `strict` also asks that no module gives NaN or inf where float32's gives none: what is absorbed later, too.
    """

    subject: Subject
    name: str
    found: Recording
    most: int
    runs: int = 0
    strict: bool = True
    progress: Progress = field(default_factory=Silent)
    _known: dict[tuple[Members, bool], bool] = field(default_factory=dict)
    _references: list[Reference] = field(default_factory=list)
    _meant: Ports = field(default_factory=set)

    def __post_init__(self) -> None:
        self.precision = parse_precision(self.name)
        with kept_random_state(), torch.no_grad():
            self.base = self._reference()
            self.low = prepare(self.subject, self.precision)
            for reference in self._references:
                _, bad = self._forward(self.base, reference)
                self._meant |= bad

    def spend(self, runs: int = 1) -> None:
        """Count runs. Raises BudgetSpent where there are none left."""
        if self.runs + runs > self.most:
            raise BudgetSpent
        self.runs += runs
        self.progress.advance()

    def mends(self, members: Members) -> bool:
        """Return whether a forward is right with these members in float32. Raises BudgetSpent."""
        key = (members, self.strict)
        if key not in self._known:
            self.spend()
            with self._with(lambda: apply(self.low.model, self.base.model, members, self.precision)):
                self._known[key] = self._judged()
        return self._known[key]

    @contextmanager
    def sparing(self, runs: int) -> Iterator[None]:
        """Leave so many runs for later."""
        self.most -= runs
        try:
            yield
        finally:
            self.most += runs

    def accepted(self) -> list[Members]:
        """Return the sets with which a forward was right."""
        return [members for (members, strict), right in self._known.items() if right and strict == self.strict]

    def rejected(self, members: Members) -> bool:
        """Return whether a trial of these members, or of more, was not right."""
        tried = (known for (known, strict), right in self._known.items() if not right and strict == self.strict)
        return any(members <= known for known in tried)

    def weights_alone(self, members: Members) -> bool:
        """Return whether a forward is right where the modules' weights are float32 and nothing is cast at borders."""
        self.spend()
        paths = modules_of(members)
        with self._with(lambda: keep_weights(self.low.model, self.base.model, paths)):
            return self._judged()

    def watch(self, mode: WideMode) -> bool:
        """Run all batches under a mode, as one trial, and return whether none raised."""
        self.spend()
        undo = run_under(self.low.model, mode)
        try:
            with kept_random_state(), torch.no_grad():
                for reference in self._references:
                    self._forward(self.low, reference, watched=False)
        except MemoryError:
            raise
        except Exception:
            return False
        finally:
            _undo(undo)
        return True

    @contextmanager
    def _with(self, change: Callable[[], Undo]) -> Iterator[None]:
        undo = change()
        try:
            yield
        finally:
            _undo(undo)

    def _judged(self) -> bool:
        """Return whether the model as it is now gives what float32 gives."""
        rows: list[OutputRow] = []
        try:
            with kept_random_state(), torch.no_grad():
                for reference in self._references:
                    outputs, bad = self._forward(self.low, reference)
                    made, apart = compare_outputs(self.name, reference.outputs, outputs)
                    if apart or (self.strict and bad - self._meant):
                        return False
                    rows += made
        except MemoryError:
            raise
        except Exception:  # a kernel that is missing still, or dtypes that clash at an island's border
            return False
        return self._is_right(rows)

    def _is_right(self, rows: list[OutputRow]) -> bool:
        merged: dict[Any, OutputRow] = {}
        for row in rows:
            merged[row.key] = merged[row.key] + row if row.key in merged else row
        noise = [row for row in self.found.of(NoiseRow) if row.precision == self.name]
        reached = effect(Recording(self.found.header, (*merged.values(), *noise)), self.name, self._format)
        return not (is_wrong(reached, self._format) or is_imprecise(reached, self._format))

    @property
    def _format(self) -> Any:
        return FORMATS[self.precision.dtype]

    def _reference(self) -> Prepared:
        """Run float32 once on the first batches, as a scan does."""
        recorder = Recorder(self.subject, (), Writer(None, self.found.header))
        base = recorder.watched(parse_precision(REFERENCE))
        for number, batch in zip(range(MOST_BATCHES), self.subject.batches, strict=False):
            self._references.append(recorder.reference(base, number, batch))
        return base.prepared

    def _forward(self, prepared: Prepared, reference: Reference, *, watched: bool = True) -> tuple[Outputs, Ports]:
        inputs, positional = prepared.inputs(dict(reference.inputs)), prepared.inputs(reference.batch.positional)
        positions = RealPositions.in_inputs(reference.inputs)
        reseed()
        with (
            kept_buffers(prepared.model),
            prepared.context(),
            products(prepared),
            _Borders(prepared.model, watched) as borders,
        ):
            output = prepared.model(*positional, **inputs)
        outputs = outputs_of(output, mask_of(reference.inputs), positions=positions)
        return outputs, {(reference.number, path, port) for path, port in borders.bad}


class _Borders:
    """Notes, while entered, which modules give NaN or inf; `bad` holds (path, port)."""

    def __init__(self, model: nn.Module, watched: bool) -> None:
        self._modules = dict(model.named_modules()) if watched else {}
        self._handles: list[Any] = []
        self.bad: set[tuple[str, str]] = set()

    def __enter__(self) -> _Borders:
        for path, module in self._modules.items():
            if not isinstance(module, torch.jit.ScriptModule):
                self._handles.append(module.register_forward_hook(self._hook(path)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, path: str) -> Any:
        def look(_module: nn.Module, _args: Any, output: Any) -> None:
            with outside_modes():
                for port, tensor in tensors(output, "output", caches=False):
                    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                        self.bad.add((path, port))

        return look


def _undo(steps: Undo) -> None:
    for step in steps:
        step()

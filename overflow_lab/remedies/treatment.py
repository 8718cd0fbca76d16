"""From a subject that breaks to remedies that are proven: propose, prove, keep what holds."""

from __future__ import annotations

import html
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overflow_lab.analysis import analyze
from overflow_lab.capture.precisions import parse_precisions
from overflow_lab.errors import OverflowLabError, UsageError, one_line
from overflow_lab.progress import Progress, Silent
from overflow_lab.recording import ProofRow, build
from overflow_lab.recording.writer import append
from overflow_lab.remedies.checkpoint import new_folder
from overflow_lab.remedies.holdout import Split
from overflow_lab.remedies.proof import prove
from overflow_lab.remedies.remedy import Remedy
from overflow_lab.scan import Scan, scan_subject

if TYPE_CHECKING:
    import torch

# In the order in which people want them: a rescale costs nothing at run time, another precision is another machine.
PROPOSERS: Mapping[str, str] = {
    "rescale": "overflow_lab.remedies.scaling",
    "island": "overflow_lab.remedies.islands",
    "clamp": "overflow_lab.remedies.clamp",
    "precision": "overflow_lab.remedies.other_precision",
}
RUNS = 60


@dataclass(frozen=True)
class Treatment:
    """A remedy and its proof. `model()` gives a mended copy, `save(folder)` a checkpoint where there can be one."""

    remedy: Remedy
    proof: ProofRow
    _split: Split = field(repr=False)

    @property
    def proven(self) -> bool:
        """Whether the second scan found it right."""
        return self.proof.proven

    def model(self) -> torch.nn.Module:
        """Return a copy of the model with the remedy applied, in the precision in which it runs."""
        from overflow_lab.remedies.measure import prepared

        return prepared(self.remedy.mend(self._split.search), self.remedy.runs_in).model

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write the mended model as a checkpoint and return its folder.

        Raises UsageError where this remedy is no change of weights, or where the folder holds something already,
        unless it may be replaced with `overwrite`.
        """
        if self.remedy.save is None:
            raise UsageError(
                f"a remedy of the kind {self.remedy.kind!r} cannot be saved as a checkpoint here; paste its snippet."
            )
        with new_folder(Path(folder), overwrite=overwrite) as made:
            self.remedy.save(made)
        return Path(folder)


@dataclass(frozen=True)
class Remedies:
    """What was tried against what breaks: `before` is the first scan; `offered` is proven, the best of each first.

    `asked` are the precisions that were to work; `tried` holds all remedies, those without a proof too. `notes` say in
    one line each what was not found, and why.
    """

    before: Scan
    asked: tuple[str, ...] = ()
    tried: tuple[Treatment, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def offered(self) -> tuple[Treatment, ...]:
        """The remedies that are proven."""
        return tuple(treatment for treatment in self.tried if treatment.proven)

    @property
    def best(self) -> Treatment | None:
        """The first remedy that is proven; None where none is."""
        return next(iter(self.offered), None)

    @property
    def broken(self) -> tuple[str, ...]:
        """The precisions that were to work and break."""
        verdicts = self.before.verdicts
        return tuple(name for name in self.asked if name in verdicts and _breaks(verdicts[name]))

    @property
    def mended(self) -> bool:
        """Whether each precision that breaks has a proven remedy."""
        return {treatment.proof.precision for treatment in self.offered} >= set(self.broken)

    def to_dict(self) -> dict[str, Any]:
        """Return the machine-readable verdict of the first scan, with `remedies`: a dict for each proof."""
        return self.before.to_dict()

    def save_report(self, path: str | Path) -> Path:
        """Write the HTML report, before and after, to `path` and return it."""
        return self.before.save_report(path)

    def __repr__(self) -> str:
        lines = [repr(self.before)]
        lines += [f"  {_mark(each)} {each.proof.precision}: {each.remedy.title}" for each in self.tried]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(each.proof.precision)}</td><td>{html.escape(each.remedy.title)}</td>"
            f"<td>{'proven' if each.proven else html.escape(each.proof.reason)}</td></tr>"
            for each in self.tried
        )
        head = "<tr><th>precision</th><th>remedy</th><th>second scan</th></tr>"
        return f"{self.before._repr_html_()}<table>{head}{rows}</table>"


def _mark(treatment: Treatment) -> str:
    return "\N{CHECK MARK}" if treatment.proven else "\N{MULTIPLICATION X}"


def _breaks(verdict: Any) -> bool:
    return bool(verdict.verdict != "ok")


def treat(
    split: Split,
    precisions: Sequence[str],
    *,
    kinds: Iterable[str] | None = None,
    progress: Progress | None = None,
    runs: int = RUNS,
    scan_options: Mapping[str, Any] | None = None,
) -> Remedies:
    """Scan a subject, propose remedies for each precision that breaks, and prove each of them.

    `kinds` are those of `PROPOSERS`, in this order; `runs` bounds the search of each. `scan_options` are those of
    `scan_subject`. What a proposer raises is a note, and the others go on.
    """
    tell, wanted = progress or Silent(), _kinds(kinds)
    before = scan_subject(split.search, precisions, progress=progress, **(scan_options or {}))
    tried: list[Treatment] = []
    notes: list[str] = []
    asked = [each.name for each in parse_precisions(precisions)]
    for precision, verdict in before.verdicts.items():
        if precision == "float32" or not _breaks(verdict):
            continue
        # What the scan added by itself (`float16-to`) is to be mended by what mends the weights, not searched anew.
        for kind in wanted if precision in asked else [kind for kind in wanted if kind == "rescale"]:
            tell.stage(f"looking for a remedy of {precision} ({kind})")
            for remedy in _proposed(kind, split, before, precision, (tell, runs, notes)):
                tell.stage(f"proving: {remedy.title}")
                proof = prove(remedy, split, before, progress=progress, options=_again(scan_options))
                tried.append(Treatment(remedy, proof, split))
                keep_proof(before, proof)
    proofs = [treatment.proof for treatment in tried]
    return Remedies(with_proofs(before, proofs), tuple(asked), tuple(tried), tuple(notes))


def _kinds(kinds: Iterable[str] | None) -> tuple[str, ...]:
    wanted = tuple(PROPOSERS) if kinds is None else tuple(kinds)
    wrong = next((kind for kind in wanted if kind not in PROPOSERS), None)
    if wrong is not None:
        raise UsageError(f"there is no remedy of the kind {wrong!r}; choose among {', '.join(PROPOSERS)}.")
    return wanted


def _proposed(
    kind: str, split: Split, before: Scan, precision: str, how: tuple[Progress, int, list[str]]
) -> Iterator[Remedy]:
    progress, runs, notes = how
    try:
        found = importlib.import_module(PROPOSERS[kind]).propose(
            split.search, before, precision, progress=progress, runs=runs
        )
    except MemoryError:
        raise
    except Exception as error:  # what the user's model raises in a search ends this search alone
        reason = str(error) if isinstance(error, OverflowLabError) else one_line(error)
        notes.append(f"{precision}: the search for a remedy of the kind {kind!r} ended early: {reason}")
        return
    if not found.remedies:
        notes.append(f"{precision}: no {kind} mends it" + (f": {found.reason}" if found.reason else ""))
    yield from found.remedies


def _again(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options for a second scan, which writes no file of its own."""
    return {name: value for name, value in (options or {}).items() if name not in ("recording", "progress")}


def keep_proof(scan: Scan, proof: ProofRow) -> None:
    """Add a proof to the recording's file as soon as it is known: a search may be ended early."""
    if scan.recording.path is not None:
        append(Path(scan.recording.path), [proof])


def with_proofs(scan: Scan, proofs: Sequence[ProofRow]) -> Scan:
    """Return the scan with its proofs in the recording."""
    recording = scan.recording
    if not proofs:
        return scan
    rows = [*recording.rows, *proofs, *([recording.footer] if recording.footer else [])]
    made = build(recording.header, rows, path=recording.path)
    return Scan(made, analyze(made), scan.report_path, scan.reproduction)

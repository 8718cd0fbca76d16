"""The safe converter: casts a checkpoint to half precision, says what that costs, and refuses to write what breaks."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overflow_lab.analysis.casts import worst_first
from overflow_lab.analysis.numbers import number
from overflow_lab.analysis.results import SEVERITIES
from overflow_lab.errors import UsageError
from overflow_lab.recording import CastRow, PrecisionRow
from overflow_lab.recording.codec import plain
from overflow_lab.remedies.checkpoint import check_free, check_savable, new_folder
from overflow_lab.report.summary import first_sentence
from overflow_lab.scan import Scan, scan_subject, subject_of

if TYPE_CHECKING:
    from overflow_lab.analysis import Verdict
    from overflow_lab.progress import Progress
    from overflow_lab.remedies.reloaded import Same
    from overflow_lab.subjects import Subject

# Remedies that a checkpoint can hold: islands and clamps are code of whoever loads it, another precision another --to.
REMEDIES = ("none", "auto", "rescale")
TARGETS = ("float16", "bfloat16")
FAIL_ON = ("never", "warning", "error")


@dataclass(frozen=True)
class Conversion:
    """What a conversion found, and where it wrote.

    `scan` is of the checkpoint as it is written, a remedy applied; `before` of the original, where that was applied.
    `folder` is None where the conversion was refused, and `refused` then says why, in one line. `kept` are the modules
    that stay in float32, since their class asks for it. `same` is what was compared after loading the folder again.
    """

    model: str
    to: str
    scan: Scan
    folder: Path | None = None
    refused: str = ""
    remedy: str | None = None
    before: Scan | None = None
    same: Same | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict on the precision that it is cast to."""
        return self.scan.verdicts[self.to]

    @property
    def lost(self) -> tuple[CastRow, ...]:
        """What the cast lost, the worst tensor first; those with few subnormals and nothing else are left out."""
        rows = self.scan.recording.of(CastRow)
        return tuple(worst_first(row for row in rows if row.precision == self.to and row.role != "input"))

    @property
    def kept(self) -> tuple[str, ...]:
        """The modules that the loader keeps in float32."""
        rows = self.scan.recording.of(PrecisionRow)
        return next((row.kept for row in rows if row.precision == self.to), ())

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `convert --json` prints: the scan's, and "conversion"."""
        made = {
            "to": self.to,
            "folder": None if self.folder is None else str(self.folder),
            "refused": self.refused or None,
            "remedy": self.remedy,
            "lost": [dataclasses.asdict(row) for row in self.lost],
            "kept_in_float32": list(self.kept),
            "loaded_again": None if self.same is None else dataclasses.asdict(self.same),
        }
        return {**self.scan.to_dict(), "conversion": plain(made)}


def convert(
    model: str | Path,
    to: str,
    folder: str | Path,
    *,
    remedy: str = "none",
    force: bool = False,
    **options: Any,
) -> Conversion:
    """Cast the checkpoint `model` to `to` ("float16" or "bfloat16") and save it in `folder`, if the scan says it works.

    The folder is as `save_pretrained` writes it, with tokenizer, processor and generation config; its config names the
    dtype, and modules that the class keeps in float32 stay so. After writing it is loaded again by transformers alone,
    and has to give the same bits as the cast in memory. With `remedy` "auto" or "rescale" a model that breaks is mended
    first, where that is proven. A model that breaks, or of which a weight becomes infinite, is not written (see
    `Conversion.refused`) unless `force`.

    Further options are those of `scan`, and `fail_on` ("error", or "warning", or "never": the severity that is
    refused), `overwrite`, `progress` and `recording`, a file. Raises UsageError for what is no checkpoint, an existing
    folder, or one inside the model's own; OverflowLabError where what was written does not load as the same.
    """
    asked = _asked(str(model), to, Path(folder).expanduser(), remedy=remedy, options={"force": force, **options})
    # What `.to(dtype)` would do is not asked here: the checkpoint is what the loader gives.
    subject = dataclasses.replace(subject_of(asked.model, None, asked.options, None), loader_casts=False)
    check_savable(subject)
    found = asked.scan(subject, recording=asked.recording)
    done = Conversion(asked.model, asked.to, found)
    if asked.remedy == "none" or (done.verdict.verdict == "ok" and not asked.refuses(done)):
        return asked.finish(done, subject)
    with tempfile.TemporaryDirectory(prefix=".mending-", dir=_parent(asked.folder)) as scratch:
        subject, done = next(asked.mended(subject, found, Path(scratch)), (subject, done))
        return asked.finish(done, subject)


@dataclass(frozen=True)
class _Asked:
    """What was asked for, checked."""

    model: str
    to: str
    folder: Path
    remedy: str
    fail_on: str
    overwrite: bool
    progress: Progress | None
    recording: str | Path | None
    level: str
    options: Mapping[str, Any]

    def scan(self, subject: Subject, *, recording: str | Path | None = None) -> Scan:
        """Scan a subject in the precision that it is cast to."""
        return scan_subject(
            subject,
            [self.to],
            recording=recording,
            progress=self.progress,
            level=self.level,
            options=self.header,
        )

    @property
    def header(self) -> dict[str, Any]:
        """The options that a recording's header tells of."""
        return {"device": "cpu", **self.options}

    def refuses(self, done: Conversion) -> bool:
        """Return whether a verdict is at or above the severity that is refused, or a weight would become infinite.

        The latter is refused where the scan's inputs do not use that weight, too: others will.
        """
        if self.fail_on == "never":
            return False
        severity = done.verdict.severity
        breaks = severity != "none" and SEVERITIES.index(severity) >= SEVERITIES.index(self.fail_on)
        return breaks or any(row.to_infinity for row in done.lost)

    def mended(self, subject: Subject, found: Scan, scratch: Path) -> Iterator[tuple[Subject, Conversion]]:
        """Yield what proven remedies give, each as the subject of a checkpoint that holds it, with its scan.

        Some of the inputs are held back from the search, and what it finds has to hold on them.
        """
        from overflow_lab.remedies.holdout import split
        from overflow_lab.remedies.treatment import treat

        kinds = [kind for kind in REMEDIES[2:] if self.remedy in (kind, "auto")]
        options = {"level": self.level, "options": self.header}
        treated = treat(split(subject), [self.to], kinds=kinds, progress=self.progress, scan_options=options)
        for count, offered in enumerate(treated.offered):
            if offered.remedy.save is None:
                continue
            mended = self._at(subject, offered.save(scratch / str(count)))
            done = Conversion(self.model, self.to, self.scan(mended), remedy=offered.remedy.title, before=found)
            if not self.refuses(done):
                yield mended, done

    def _at(self, subject: Subject, place: Path) -> Subject:
        """Return the subject with the weights in a folder, and the same inputs."""
        moved = {name: value for name, value in self.options.items() if name not in ("revision", "subfolder")}
        loaded = subject_of(str(place), None, moved, None)
        return dataclasses.replace(subject, load=loaded.load, save=loaded.save)

    def finish(self, done: Conversion, subject: Subject) -> Conversion:
        """Write the checkpoint, or refuse."""
        if self.refuses(done):
            return dataclasses.replace(done, refused=self._refusal(done, subject))
        from overflow_lab.capture.precisions import parse_precision, prepare
        from overflow_lab.capture.runs import watched
        from overflow_lab.remedies.reloaded import compare_reloaded

        if self.progress is not None:
            self.progress.stage("writing and loading again")
        precision = parse_precision(self.to)
        made = watched(prepare(subject, precision))
        trust = bool(self.options.get("trust_remote_code", False))
        with new_folder(self.folder, overwrite=self.overwrite) as place:
            assert subject.save is not None
            subject.save(made.prepared.model, place)
            same = compare_reloaded(subject, made, place, trust_remote_code=trust)
        return dataclasses.replace(done, folder=self.folder, same=same)

    def _refusal(self, done: Conversion, subject: Subject) -> str:
        """Return one line: what breaks, at which origin, and the ways out."""
        verdict = done.verdict
        does = {"error": "breaks", "warning": "is risky", "none": "loses weights"}[verdict.severity]
        reason = _infinite(done.lost[0]) if verdict.severity == "none" else first_sentence(verdict.reason).rstrip(".")
        tried = "no rescale mends it" if self.remedy != "none" else "--remedy auto looks for a rescale"
        return f"{subject.name} {does} in {self.to}: {reason}; {tried}, --force writes it as it is."


def _infinite(row: CastRow) -> str:
    return (
        f"the cast turns {row.to_infinity:,} of {row.elements:,} elements of `{row.name}` into infinities "
        f"({number(row.absmax)} does not fit)"
    )


def _asked(model: str, to: str, folder: Path, *, remedy: str, options: Mapping[str, Any]) -> _Asked:
    """Return what was asked for. Raises UsageError before anything is loaded."""
    more = dict(options)
    force, fail_on = bool(more.pop("force")), more.pop("fail_on", "error")
    overwrite = bool(more.pop("overwrite", False))
    if remedy not in REMEDIES:
        raise UsageError(f"a checkpoint cannot hold the remedy {remedy!r}; choose among {', '.join(REMEDIES)}.")
    if fail_on not in FAIL_ON:
        raise UsageError(f"fail_on is {fail_on!r}; choose among {', '.join(FAIL_ON)}.")
    check_free(folder, overwrite=overwrite)
    _check_apart(model, folder)
    return _Asked(
        model=model,
        to=_target(to),
        folder=folder,
        remedy=remedy,
        fail_on="never" if force else fail_on,
        overwrite=overwrite,
        progress=more.pop("progress", None),
        recording=more.pop("recording", None),
        level=more.pop("level", "auto"),
        options=more,
    )


def _target(to: str) -> str:
    """Return the precision's full name. Raises UsageError where a checkpoint is not stored in it."""
    from overflow_lab.formats import get_format

    name = get_format(to.strip().lower()).name
    if name not in TARGETS:
        raise UsageError(f"a checkpoint is converted to {' or '.join(TARGETS)}, not to {to!r}; choose one of them.")
    return name


def _check_apart(model: str, folder: Path) -> None:
    """Raise UsageError where the folder to write is the model's own, inside it or around it."""
    source, target = Path(model).expanduser(), folder.resolve()
    if not source.is_dir():
        return
    own = source.resolve()
    if target == own or own in target.parents or target in own.parents:
        raise UsageError(f"{folder} holds the model's own folder, or lies in it; choose a folder apart from it.")


def _parent(folder: Path) -> Path:
    parent = folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    return parent

"""A scan: subject -> capture -> recording -> analysis, in one call."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overflow_lab.analysis import Diagnosis, Verdict, analyze
from overflow_lab.errors import OverflowLabError, ScanInterrupted, UsageError, one_line
from overflow_lab.recording import FORMAT, Header, Recording, Resumable, load, load_progress
from overflow_lab.recording.codec import decode, encode
from overflow_lab.recording.writer import Writer

if TYPE_CHECKING:
    import pandas as pd

    from overflow_lab.capture.precisions import Precision
    from overflow_lab.capture.record import Recorder
    from overflow_lab.progress import Progress
    from overflow_lab.reproduce import Reproduction
    from overflow_lab.subjects import Subject
    from overflow_lab.subjects.options import SubjectOptions

LEVELS = ("auto", "operation", "module")


@dataclass(frozen=True)
class Scan:
    """What a scan found: the recording and its diagnosis. In a notebook it shows itself as a table."""

    recording: Recording
    diagnosis: Diagnosis
    report_path: str | None = None
    reproduction: Reproduction | None = None

    @classmethod
    def from_recording(cls, path: str | Path) -> Scan:
        """Return the scan of a recording file."""
        recording = load(path)
        return cls(recording, analyze(recording))

    @property
    def verdicts(self) -> Mapping[str, Verdict]:
        """The verdict on each precision."""
        return self.diagnosis.verdicts

    def to_dict(self) -> dict[str, Any]:
        """Return the machine-readable verdict, as `overflow-lab scan --json` prints it."""
        from overflow_lab.report.exports import to_json

        return to_json(self.recording, self.diagnosis, recording_path=self.recording.path, report_path=self.report_path)

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each module's output in order of execution; see `overflow_lab.layers`."""
        from overflow_lab.analysis.frame import layers

        return layers(self.recording)

    def save_report(self, path: str | Path) -> Path:
        """Write the HTML report to `path` and return it. Raises UsageError when it cannot be written."""
        from overflow_lab.report import write_report

        return write_report(self.recording, self.diagnosis, Path(path))

    def __repr__(self) -> str:
        model = self.recording.header.subject.get("name", "?")
        lines = [
            f"  {name}: {v.verdict}{'' if v.verdict == 'ok' else f' ({v.severity})'}: {v.reason}"
            for name, v in self.verdicts.items()
        ]
        return "\n".join([f"<Scan of {model}", *lines]) + ">"

    def _repr_html_(self) -> str:
        from overflow_lab.report.notebook import summary

        return summary(self.recording, self.diagnosis)


def scan(
    model: Any,
    inputs: Any = None,
    *,
    precisions: Iterable[str] = ("float16", "bfloat16"),
    recording: str | Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Scan:
    """Scan a model and return what was found.

    `model` is a torch.nn.Module (with `inputs`: a dict of keyword inputs, a tuple of positional ones, or a list of
    these, one for each call), or a string as on the command line: a hub id, a folder, "path/to/file.py:function" or
    "demo". `precisions` names what is judged; float32 always runs as the reference, and is judged itself (against
    float64) where it is named or where its output holds NaN; "forecast" asks for float32's run alone.
    `recording` is a file to write (.jsonl or .jsonl.gz); without it the recording stays in memory. Further options are
    the fields of `overflow_lab.subjects.options.SubjectOptions` (texts, batch_size, generate, device, ...) and
    `store_texts=True`, which keeps prompts and answers in the recording. `level="module"` leaves out the shadow run,
    which names operations; "auto" does so for models of more than two billion parameters. `resume` is the recording of
    a scan that was interrupted: it goes on there with the inputs that are missing, and is refused where anything else
    differs. A model in memory is asked to generate with `generate=True` only; `tokenizer` then turns its answers into
    text. `repro` is a folder for a script that rebuilds the failure (see `Scan.reproduction`): the weights and inputs
    of the module at fault are written there. `share=(rank, ranks)` runs every `ranks`-th batch only, from batch `rank`
    on; `merge` makes one of all shares.

    Raises UsageError for what cannot be scanned as asked; ScanInterrupted when the scan ends early, with the
    recording saved; KeyboardInterrupt is passed on, the recording saved as well.
    """
    store_texts, tokenizer = bool(options.pop("store_texts", False)), options.pop("tokenizer", None)
    recording, resumed = _resumed(recording, options.pop("resume", None))
    level, folder = _level(options.pop("level", "auto")), options.pop("repro", None)
    share = _share(options.pop("share", None), resumed)
    options = default_device(model, options)
    subject = subject_of(model, inputs, options, tokenizer)
    found = scan_subject(
        subject,
        precisions,
        recording=recording,
        progress=progress,
        store_texts=store_texts,
        level=level,
        options=options,
        resumed=resumed,
        share=share,
    )
    if folder is None:
        return found
    return dataclasses.replace(found, reproduction=_reproduced(found, subject, Path(folder), model))


def scan_subject(
    subject: Subject,
    precisions: Iterable[str],
    *,
    recording: str | Path | None = None,
    progress: Progress | None = None,
    store_texts: bool = False,
    level: str = "auto",
    options: Mapping[str, Any] | None = None,
    resumed: Resumable | None = None,
    share: tuple[int, int] | None = None,
) -> Scan:
    """Scan a subject; as `scan`, which makes one of what the user gives. `options` are written into the header."""
    from overflow_lab.capture.record import Recorder
    from overflow_lab.capture.share import SHARE_BATCHES, Share
    from overflow_lab.progress import Silent

    wanted = _precisions(precisions)
    divided = {} if share is None else {"rank": share[0], "ranks": share[1]}
    header = _header(subject, wanted, {**(options or {}), "level": level, **divided})
    if resumed is not None:
        _check_resumed(header, resumed)
    writer = Writer(None if recording is None else Path(recording), header, resumed=resumed)
    recorder = Recorder(subject, wanted, writer, progress or Silent(), store_texts, level=level, resumed=resumed)
    if share is not None:
        recorder = dataclasses.replace(recorder, share=Share(*share), most=SHARE_BATCHES)
    return _recorded(recorder)


def _resumed(recording: str | Path | None, resume: str | Path | None) -> tuple[str | Path | None, Resumable | None]:
    """Return where to write, and what to go on from. Raises UsageError for a recording that cannot be gone on from."""
    if resume is None:
        return recording, None
    if recording is not None and Path(recording) != Path(resume):
        raise UsageError(f"a scan that is resumed goes on in {resume}; leave the recording {recording} out.")
    resumed = load_progress(resume)
    if resumed is None:
        raise UsageError(f"{resume} was interrupted before any inputs had run in all precisions; scan anew.")
    return resume, resumed


def _check_resumed(header: Header, resumed: Resumable) -> None:
    from overflow_lab.capture.resume import check_same_header
    from overflow_lab.subjects.options import SubjectOptions

    shown = _shown({**dataclasses.asdict(SubjectOptions()), "level": "auto"})
    now = decode(json.loads(encode(header)))  # as a file has it: lists for tuples
    check_same_header(now, resumed.recording.header, str(resumed.recording.path), defaults=shown)


def _share(given: Any, resume: Any) -> tuple[int, int] | None:
    """Return (rank, ranks) of what the user gives. Raises UsageError for anything else."""
    if given is None:
        return None
    whole = isinstance(given, (tuple, list)) and len(given) == 2 and all(isinstance(n, int) for n in given)
    if not whole or not 0 <= given[0] < given[1]:
        raise UsageError(f"share is {given!r}; give (rank, ranks), with rank from 0 to ranks - 1.")
    if resume is not None:
        raise UsageError("a scan that several processes share cannot be resumed; scan anew, or merge what there is.")
    return given[0], given[1]


def _precisions(names: Iterable[str]) -> tuple[Precision, ...]:
    from overflow_lab.capture.precisions import parse_precisions

    return parse_precisions([names] if isinstance(names, str) else names)


def _reproduced(found: Scan, subject: Subject, folder: Path, model: Any) -> Reproduction | None:
    """Write the reproduction of a scan; the recording, which is done, is named where that fails."""
    from overflow_lab.reproduce import reproduce

    try:
        with _quiet():
            return reproduce(subject, found.recording, found.diagnosis, folder, model=model)
    except Exception as error:
        reason = str(error) if isinstance(error, OverflowLabError) else one_line(error)
        raise ScanInterrupted(f"the reproduction was not written: {reason}", found.recording.path) from error


def _level(level: str) -> str:
    """Return the level, "auto", "operation" or "module". Raises UsageError for any other."""
    if level not in LEVELS:
        raise UsageError(f"the level is {level!r}; choose among {', '.join(LEVELS)}.")
    return level


def _recorded(recorder: Recorder) -> Scan:
    writer = recorder.writer
    path = None if writer.path is None else str(writer.path)
    try:
        with writer, _quiet():
            recorder.run()
    except UsageError:
        raise
    except Exception as error:  # the user's data loader or loading code among them: what was recorded is saved
        message = str(error) if isinstance(error, OverflowLabError) else f"the scan ended early: {one_line(error)}"
        raise ScanInterrupted(message, path) from error
    made = load(path) if path is not None and writer.untouched else writer.recording()
    return Scan(made, analyze(made))


def _quiet() -> contextlib.AbstractContextManager[None]:
    """Return what silences transformers' log and warnings during the runs, where it is loaded at all."""
    if "transformers" not in sys.modules:
        return contextlib.nullcontext()
    from overflow_lab.subjects.quiet import quiet

    return quiet()


def subject_of(model: Any, inputs: Any, options: Mapping[str, Any], tokenizer: Any) -> Subject:
    """Return the subject of what the user gave to `scan`. Raises UsageError for options that do not exist."""
    from overflow_lab.subjects.options import KERNELS, SubjectOptions

    known = [field.name for field in dataclasses.fields(SubjectOptions)]
    wrong = [name for name in options if name not in known]
    if wrong:
        raise UsageError(
            f"scan() has no option {wrong[0]!r}; "
            f"choose among {', '.join([*known, 'level', 'repro', 'resume', 'share', 'store_texts', 'tokenizer'])}."
        )
    texts = options.get("texts")
    chosen = SubjectOptions(**{**options, "texts": (texts,) if isinstance(texts, str) else texts and tuple(texts)})
    if chosen.kernels not in KERNELS:
        raise UsageError(f"kernels is {chosen.kernels!r}; choose among {', '.join(KERNELS)}.")
    return dataclasses.replace(_found(model, inputs, chosen, options, tokenizer), kernels=chosen.kernels)


def _found(model: Any, inputs: Any, chosen: SubjectOptions, options: Mapping[str, Any], tokenizer: Any) -> Subject:
    if isinstance(model, (str, Path)):
        from overflow_lab.subjects.find import find

        if tokenizer is not None:
            raise UsageError("tokenizer= is for a model in memory; a model by name brings its own.")
        if inputs is not None:
            raise UsageError(
                "inputs are given for a model by name; load the model and pass it, or use texts=, inputs_file=."
            )
        return find(str(model), chosen)
    return _in_memory(model, {} if inputs is None else inputs, chosen, options.get("generate", False), tokenizer)


def _in_memory(model: Any, inputs: Any, chosen: SubjectOptions, generate: bool, tokenizer: Any) -> Subject:
    from overflow_lab.subjects.module import from_module

    subject = from_module(model, inputs, device=chosen.device)
    if not generate:
        return subject
    from overflow_lab.subjects.generation import generation_of

    return dataclasses.replace(subject, generation=generation_of(model, chosen, tokenizer=tokenizer))


def default_device(model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the device that a module in memory is on, unless they name one."""
    return dict(options) if isinstance(model, (str, Path)) else {"device": _device(model), **options}


def _device(model: Any) -> str:
    """Return where a module in memory is, since that is where it is scanned; the CPU for anything else."""
    import torch

    from overflow_lab.capture.precisions import device_of

    device = device_of(model) if isinstance(model, torch.nn.Module) else torch.device("cpu")
    return "cpu" if device.type == "meta" else str(device)


def _header(subject: Subject, wanted: tuple[Precision, ...], options: Mapping[str, Any]) -> Header:
    """Return the header; texts, paths and prompts among the options are not written."""
    from overflow_lab import __version__
    from overflow_lab.capture.environment import environment

    return Header(
        format=FORMAT,
        overflow_lab=__version__,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        subject={"name": subject.name, "kind": subject.kind, **subject.facts, "notes": list(subject.notes)},
        precisions=tuple(dict.fromkeys(("float32", *(precision.name for precision in wanted)))),
        environment=environment(str(options.get("device", "cpu"))),
        options=_shown(options),
    )


def _shown(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a header tells of."""
    named = ("attn_implementation", "task", "device", "level")
    return {k: v for k, v in options.items() if isinstance(v, (int, float, bool)) or k in named}

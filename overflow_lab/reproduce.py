"""A reproduction of the module at fault alone: its weights, its inputs and a script, in a folder to share.

The weights and inputs are the user's: this is done where it was asked for, and never otherwise.
"""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from overflow_lab.analysis import Diagnosis
from overflow_lab.errors import OverflowLabError, UsageError
from overflow_lab.recording import Recording
from overflow_lab.report import repro

if TYPE_CHECKING:
    from overflow_lab.capture.captured import Captured
    from overflow_lab.capture.rebuild import Rebuild
    from overflow_lab.subjects import Subject

SCRIPT, TENSORS = "repro.py", "tensors.safetensors"


@dataclass(frozen=True)
class Reproduction:
    """A script that was written and run: what is rebuilt by it ("module" or "model"), and why no more could be done."""

    path: Path
    rebuilds: str
    note: str = ""


def reproduce(
    subject: Subject, recording: Recording, diagnosis: Diagnosis, folder: Path, *, model: object
) -> Reproduction | None:
    """Write the reproduction of a scan of `model`, which is what the scan was given; see `write_reproduction`."""
    from overflow_lab.subjects.demo import built_in_texts
    from overflow_lab.subjects.python_file import is_python_file

    name = str(model)
    source = None
    if isinstance(model, (str, Path)) and is_python_file(name):
        file, _, function = name.rpartition(":")
        source = (Path(file), function)
    return write_reproduction(
        subject, recording, diagnosis, folder, source=source, built_in=built_in_texts(recording.header.subject)
    )


def write_reproduction(
    subject: Subject,
    recording: Recording,
    diagnosis: Diagnosis,
    folder: Path,
    *,
    source: tuple[Path, str] | None = None,
    built_in: Sequence[str] = (),
) -> Reproduction | None:
    """Write a script that rebuilds the origin's module alone and shows the failure; None where nothing breaks.

    `source` are the file and function of the user's that build the model: the file is copied into the folder where the
    module's class stands in it. Each way to build the module is tried by running the script; where none shows the
    failure, or the fault is in the model's own code, the script is that of the whole model (see `report.repro`).
    Raises UsageError where the folder cannot be written.
    """
    if diagnosis.worst == "none":
        return None
    failure = repro.failure_of(recording, diagnosis)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        alone = _alone(subject, recording, failure, folder, source)
        if alone is None:
            return Reproduction(folder / SCRIPT, "module")
        script = repro.script(recording, diagnosis, built_in=built_in)
        (folder / SCRIPT).write_text(script, encoding="utf-8", errors="backslashreplace", newline="\n")
    except OSError as error:
        raise UsageError(f"{folder.name} cannot be written ({error.strerror}); choose another folder.") from error
    return Reproduction(folder / SCRIPT, "model", alone)


def _alone(
    subject: Subject, recording: Recording, failure: repro.Failure, folder: Path, source: tuple[Path, str] | None
) -> str | None:
    """Write the script of the module alone; return None where it shows the failure, otherwise why it does not."""
    from overflow_lab.capture.captured import capture_call
    from overflow_lab.capture.rebuild import rebuilds

    if not failure.origin:
        return "the fault is in the model's own code, so the whole model is needed"
    precision = failure.verdict.precision
    try:
        captured = capture_call(
            subject, recording.header, failure.origin, precision=precision, run=failure.run, batch=failure.batch
        )
    except OverflowLabError as error:
        return str(error)
    file, function = source or (None, "")
    for way in rebuilds(captured.module, captured.model, failure.origin, file, function):
        made = _write(recording, failure, captured, way, folder)
        if shows(folder / SCRIPT, failure.verdict.verdict):
            return None
        for path in made:
            path.unlink()
    return f"{failure.origin} alone could not be rebuilt, or does not fail alone"


def _write(recording: Recording, failure: repro.Failure, captured: Captured, way: Rebuild, folder: Path) -> list[Path]:
    """Write script, tensors and the files that the script reads; return their paths."""
    from safetensors.torch import save_file

    text = repro.module_script(
        recording,
        failure,
        imports=way.imports,
        beside=next((name for name in way.files if name.endswith(".py")), ""),
        build=way.lines,
        call=captured.call,
        wide=captured.wide,
        left_out=captured.left_out,
        training=captured.training,
    )
    save_file(dict(captured.values), folder / TENSORS)
    files = {SCRIPT: text, **way.files}
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8", errors="backslashreplace", newline="\n")
    return [folder / name for name in (TENSORS, *files)]


def shows(script: Path, verdict: str) -> bool:
    """Run a script as if by itself and return whether it shows the failure; what it prints is not shown."""
    with _kept_imports(), contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            return bool(ended.code) and not isinstance(ended.code, str)
        except Exception as error:
            from overflow_lab.capture.unsupported import is_unsupported

            return verdict == "unsupported" and is_unsupported(error)
    return False


@contextlib.contextmanager
def _kept_imports() -> Iterator[None]:
    """Forget what the script imported from its own folder: the next one may bring another file of that name."""
    paths, modules = list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        added = [path for path in sys.path if path not in paths]
        sys.path[:] = paths
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and str(Path(file).parent) in added:
                del sys.modules[name]

"""`overflow-lab scan MODEL`."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from overflow_lab.cli import options as opt
from overflow_lab.cli.places import check_writable, place, stem_of
from overflow_lab.cli.progress import watched
from overflow_lab.cli.show import check_fail_on, exit_code, print_json, print_text
from overflow_lab.errors import ScanInterrupted, UsageError

if TYPE_CHECKING:
    from overflow_lab.scan import Scan


def scan(
    context: typer.Context,
    model: opt.Model,
    precision: opt.Precisions = None,
    text: opt.Text = None,
    inputs: opt.Inputs = None,
    column: opt.Column = None,
    template: opt.Template = None,
    task: opt.Task = None,
    batch_size: opt.BatchSize = 4,
    max_length: opt.MaxLength = None,
    generate: opt.Generate = True,
    num_beams: opt.NumBeams = 4,
    max_new_tokens: opt.MaxNewTokens = 32,
    device: opt.Device = "cpu",
    attn_implementation: opt.AttnImplementation = None,
    revision: opt.Revision = None,
    subfolder: opt.Subfolder = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    allow_pickle: opt.AllowPickle = False,
    level: opt.Level = "auto",
    store_texts: opt.StoreTexts = False,
    recording: opt.RecordingFile = None,
    report: opt.ReportFile = None,
    as_json: opt.AsJson = False,
    fail_on: opt.FailOn = "never",
    overwrite: opt.Overwrite = False,
    quiet: opt.Quiet = False,
) -> int:
    """Run MODEL in float32 and in each low precision: what breaks, where, by how much, and what to do next."""
    check_fail_on(fail_on)
    target = place(report, stem_of(model), ".html", overwrite=overwrite)
    kept = place(recording, target.stem, ".jsonl.gz", overwrite=overwrite)
    check_writable(target)
    with _saved(kept):
        found = _scanned(model, precision, kept, context.params, quiet)
        _report(found, target, kept)
    if as_json:
        print_json(found.recording, found.diagnosis, recording_path=kept, report_path=target)
        return exit_code(found.diagnosis, fail_on)
    print_text(found.recording, found.diagnosis, quiet=quiet)
    if not quiet:
        typer.echo(f"\nreport     {target}\nrecording  {kept}\nagain      overflow-lab report {kept}")
    return exit_code(found.diagnosis, fail_on)


def _scanned(model: str, precision: list[str] | None, kept: Path, params: dict[str, Any], quiet: bool) -> Scan:
    """Scan behind progress bars."""
    with watched(quiet=quiet) as bars:
        import overflow_lab

        wanted = precision or ("float16", "bfloat16")
        options = opt.subject_options(params)
        return overflow_lab.scan(model, precisions=wanted, recording=kept, progress=bars, **options)


def _report(found: Scan, target: Path, kept: Path) -> None:
    """Write the report; where it fails (a full disk), the recording is done and is named."""
    try:
        found.save_report(target)
    except UsageError as error:
        raise ScanInterrupted(str(error), str(kept)) from error


@contextlib.contextmanager
def _saved(kept: Path) -> Iterator[None]:
    """Turn Ctrl-C, and the SIGTERM of a job that runs out of time, into an early end that names the recording."""
    before = (
        signal.signal(signal.SIGTERM, _interrupt) if threading.current_thread() is threading.main_thread() else None
    )
    try:
        yield
    except KeyboardInterrupt:
        raise ScanInterrupted("interrupted.", str(kept) if kept.exists() else None) from None
    except SystemExit as error:  # not our exit, and not our exit code
        message = f"the model ended the process (sys.exit({error.code!r})); take that out and scan again."
        raise ScanInterrupted(message, str(kept) if kept.exists() else None) from error
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt

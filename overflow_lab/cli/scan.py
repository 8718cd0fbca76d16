"""`overflow-lab scan MODEL`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overflow_lab.capture.team import launched
from overflow_lab.cli import options as opt
from overflow_lab.cli.ending import named_end
from overflow_lab.cli.fix import mended
from overflow_lab.cli.places import check_folder, check_writable, place, stem_of
from overflow_lab.cli.progress import watched
from overflow_lab.cli.ranks import shared_scan
from overflow_lab.cli.show import check_fail_on, exit_code, print_json, print_text
from overflow_lab.errors import ScanInterrupted, UsageError

if TYPE_CHECKING:
    from overflow_lab.scan import Scan

ReproFolder = Annotated[
    Path | None,
    typer.Option(
        "--repro",
        metavar="FOLDER",
        help="Write a script that rebuilds the failure, with the weights and inputs of the module at fault, to share.",
        show_default=False,
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="RECORDING",
        help="Go on with a scan that was interrupted, in its own recording; all else must be as it was.",
        show_default=False,
    ),
]
Fix = Annotated[
    bool, typer.Option("--fix", help="Look for what mends it too, and prove it; `overflow-lab fix` has the options.")
]


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
    device_map: opt.DeviceMap = None,
    max_memory: opt.MaxMemory = None,
    attn_implementation: opt.AttnImplementation = None,
    revision: opt.Revision = None,
    subfolder: opt.Subfolder = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    allow_pickle: opt.AllowPickle = False,
    level: opt.Level = "auto",
    kernels: opt.Kernels = "auto",
    store_texts: opt.StoreTexts = False,
    recording: opt.RecordingFile = None,
    report: opt.ReportFile = None,
    resume: Resume = None,
    repro: ReproFolder = None,
    fix: Fix = False,
    as_json: opt.AsJson = False,
    fail_on: opt.FailOn = "never",
    overwrite: opt.Overwrite = False,
    quiet: opt.Quiet = False,
) -> int:
    """Run MODEL in float32 and in each low precision: what breaks, where, by how much, and what to do next."""
    check_fail_on(fail_on)
    if (here := launched()) is not None:
        return shared_scan(here, model, context.params)
    target = place(report, stem_of(model), ".html", overwrite=overwrite)
    kept = resume or place(recording, target.stem, ".jsonl.gz", overwrite=overwrite)
    _check_alone(context.params)
    check_writable(target)
    check_folder(repro, overwrite=overwrite)
    with named_end(kept):
        if fix:
            found = mended(model, kept, context.params, quiet=quiet).before
        else:
            found = _scanned(model, precision, kept, context.params, quiet)
        _report(found, target, kept)
    if as_json:
        print_json(found.recording, found.diagnosis, recording_path=kept, report_path=target)
    else:
        _show(found, context.params, target, kept)
    return exit_code(found.diagnosis, fail_on)


def _show(found: Scan, given: dict[str, Any], target: Path, kept: Path) -> None:
    """Print the verdicts, the files, and what to do next."""
    quiet = given["quiet"]
    print_text(found.recording, found.diagnosis, quiet=quiet)
    if not found.recording.header.precisions[1:]:
        typer.echo("\n" + "\n".join(_forecast(found)))
    if quiet:
        return
    typer.echo(f"\nreport     {target}\nrecording  {kept}\nagain      overflow-lab report {kept}")
    if not given["fix"] and found.diagnosis.worst == "error":
        typer.echo(f"mend       overflow-lab fix {shlex.quote(given['model'])}")
    if given["repro"] is not None:
        typer.echo(_script(found))


def _check_alone(given: dict[str, Any]) -> None:
    """Refuse options that do not go together, before a long scan."""
    if given["fix"] and given["repro"] is not None:
        raise UsageError("--fix and --repro are both given; scan with one of them, then with the other.")
    other = "--fix" if given["fix"] else "--recording" if given["recording"] is not None else None
    if given["resume"] is not None and other is not None:
        raise UsageError(f"--resume and {other} are both given; a scan that is resumed goes on in its own recording.")


def _scanned(model: str, precision: list[str] | None, kept: Path, params: dict[str, Any], quiet: bool) -> Scan:
    """Scan behind progress bars."""
    with watched(quiet=quiet) as bars:
        import overflow_lab

        wanted = precision or ("float16", "bfloat16")
        options = opt.subject_options(params)
        places = {"recording": kept, "resume": params.get("resume"), "repro": params.get("repro")}
        return overflow_lab.scan(model, precisions=wanted, progress=bars, **places, **options)


def _report(found: Scan, target: Path, kept: Path) -> None:
    """Write the report; where it fails (a full disk), the recording is done and is named."""
    try:
        found.save_report(target)
    except UsageError as error:
        raise ScanInterrupted(str(error), str(kept)) from error


def _forecast(found: Scan) -> list[str]:
    """Return a line for each format, of a scan that ran float32 alone: what of it would not fit."""
    from overflow_lab.analysis.forecast import forecast
    from overflow_lab.report import text

    made = []
    for one in forecast(found.recording):
        said = f"{one.beyond:,} of {text.plural(one.layers, 'layer')} do not fit" if one.beyond else "every layer fits"
        where = f", the first is {text.module_name(one.module)} ({text.number(one.value)})" if one.beyond else ""
        weak = f"; {text.plural(one.flushed, 'layer')} lose values to zero" if one.flushed else ""
        made.append(f"forecast   {one.format:<14} {said}{where}; headroom {text.bits(one.headroom)} bits{weak}")
    return made


def _script(found: Scan) -> str:
    """Return what to say of the reproduction: what is in it, since it is to be shared."""
    made = found.reproduction
    if made is None:
        return "script     none: nothing breaks"
    if made.rebuilds == "model":
        return f"script     {made.path}  (of the whole model: {made.note})"
    return f"script     {made.path}  (the module at fault alone; its weights and inputs are in that folder)"

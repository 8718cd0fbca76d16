"""`overflow-lab fix MODEL`: what mends it, each remedy proven by a second scan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.text import Text

from overflow_lab.cli import options as opt
from overflow_lab.cli.ending import named_end
from overflow_lab.cli.places import check_folder, check_writable, place, stem_of
from overflow_lab.cli.progress import watched
from overflow_lab.cli.show import print_json, print_rich, print_text
from overflow_lab.errors import ScanInterrupted, UsageError

if TYPE_CHECKING:
    from overflow_lab.remedies.treatment import Remedies

KINDS = ("auto", "rescale", "island", "clamp", "precision")

Kinds = Annotated[
    list[str] | None,
    typer.Option(
        "--remedy",
        help="rescale, island, clamp or precision; repeats [default: auto, all of them].",
        show_default=False,
        autocompletion=opt.among(*KINDS),
    ),
]
Holdout = Annotated[
    Path | None,
    typer.Option(
        help="A file of inputs that the search does not see and the proof does [default: some are held back].",
        show_default=False,
    ),
]
Save = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Write the mended model as a checkpoint, where it can be one."),
]
_NOT_SAVED = "no proven remedy is a change of weights alone"
Runs = Annotated[int, typer.Option(help="The most runs that a search may take, for each kind.")]


def fix(
    context: typer.Context,
    model: opt.Model,
    precision: opt.Precisions = None,
    remedy: Kinds = None,
    text: opt.Text = None,
    inputs: opt.Inputs = None,
    holdout: Holdout = None,
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
    kernels: opt.Kernels = "auto",
    runs: Runs = 60,
    save: Save = None,
    store_texts: opt.StoreTexts = False,
    recording: opt.RecordingFile = None,
    report: opt.ReportFile = None,
    as_json: opt.AsJson = False,
    overwrite: opt.Overwrite = False,
    quiet: opt.Quiet = False,
) -> int:
    """Find what mends MODEL in each precision that breaks, and prove it by a second scan, also on inputs held back.

    Works on copies. Exit code 1: something breaks and no remedy is proven.
    """
    kinds = kinds_of(remedy)
    target = place(report, stem_of(model), ".html", overwrite=overwrite)
    kept = place(recording, target.stem, ".jsonl.gz", overwrite=overwrite)
    check_writable(target)
    check_folder(save, overwrite=overwrite)
    with named_end(kept):
        found = mended(model, kept, context.params, kinds=kinds, quiet=quiet)
        saved = None if save is None else _saved(found, save, overwrite=overwrite)
        _report(found, target, kept)
    if as_json:
        print_json(found.before.recording, found.before.diagnosis, recording_path=kept, report_path=target)
        return int(not found.mended)
    print_text(found.before.recording, found.before.diagnosis, quiet=quiet)
    for note in found.notes:
        print_rich(Padding(Text(note), (0, 0, 0, 2)))
    if save is not None:
        typer.echo(f"\nsaved      {f'{save}  ({saved})' if saved else 'nothing: ' + _NOT_SAVED}")
    if not quiet:
        typer.echo(f"\nreport     {target}\nrecording  {kept}\nagain      overflow-lab report {kept}")
    return int(not found.mended)


def kinds_of(named: list[str] | None) -> tuple[str, ...] | None:
    """Return the kinds of remedies that were asked for, None for all. Raises UsageError for others."""
    wrong = next((kind for kind in named or () if kind not in KINDS), None)
    if wrong is not None:
        raise UsageError(f"--remedy is {wrong!r}; choose {', '.join(KINDS[:-1])} or {KINDS[-1]}.")
    return None if not named or "auto" in named else tuple(named)


def mended(
    model: str, kept: Path, params: dict[str, Any], *, kinds: tuple[str, ...] | None = None, quiet: bool = False
) -> Remedies:
    """Scan, look for remedies and prove them, behind progress bars."""
    with watched(quiet=quiet) as bars:
        from overflow_lab.remedies.mending import PRECISIONS, remedy

        return remedy(
            model,
            precision=params.get("precision") or PRECISIONS,
            held_back=params.get("holdout"),
            kinds=kinds,
            runs=params.get("runs", 60),
            recording=kept,
            progress=bars,
            **opt.subject_options(params),
        )


def _saved(found: Remedies, folder: Path, *, overwrite: bool) -> str | None:
    """Save the best remedy that can be saved, and return its title; None where there is none."""
    best = next((each for each in found.offered if each.remedy.save is not None), None)
    if best is None:
        return None
    best.save(folder, overwrite=overwrite)
    return best.remedy.title


def _report(found: Remedies, target: Path, kept: Path) -> None:
    """Write the report; where it fails (a full disk), the recording is done and is named."""
    try:
        found.save_report(target)
    except UsageError as error:
        raise ScanInterrupted(str(error), str(kept)) from error

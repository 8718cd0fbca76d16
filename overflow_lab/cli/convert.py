"""`overflow-lab convert MODEL --to float16 --save FOLDER`: the cast as a checkpoint, if the scan says that it works."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overflow_lab.cli import options as opt
from overflow_lab.cli.ending import named_end
from overflow_lab.cli.places import check_writable
from overflow_lab.cli.progress import watched
from overflow_lab.cli.show import check_fail_on, print_text
from overflow_lab.errors import UsageError

if TYPE_CHECKING:
    from overflow_lab.recording import CastRow
    from overflow_lab.remedies.convert import Conversion

To = Annotated[str, typer.Option("--to", help="float16 or bfloat16.", autocompletion=opt.among("float16", "bfloat16"))]
SaveFolder = Annotated[
    Path, typer.Option("--save", metavar="FOLDER", help="The checkpoint to write.", show_default=False)
]
RemedyName = Annotated[
    str,
    typer.Option(
        "--remedy",
        help="What mends a model that breaks, if it is proven: none, auto or rescale.",
        autocompletion=opt.among("none", "auto", "rescale"),
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Write it although the scan says that it breaks.")]
FailOn = Annotated[
    str,
    typer.Option(
        help="Refuse, and exit with 1, at a verdict of this severity or worse: never, warning or error.",
        autocompletion=opt.among(*opt.FAIL_ON),
    ),
]
RecordingFile = Annotated[
    Path | None, typer.Option("--recording", help="Keep the recording of the scan here.", show_default=False)
]
# Tensors that are named; the totals count all.
_WORST = 3


def convert(
    context: typer.Context,
    model: opt.Model,
    to: To,
    save: SaveFolder,
    remedy: RemedyName = "none",
    force: Force = False,
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
    kernels: opt.Kernels = "auto",
    recording: RecordingFile = None,
    as_json: opt.AsJson = False,
    fail_on: FailOn = "error",
    overwrite: opt.Overwrite = False,
    quiet: opt.Quiet = False,
) -> int:
    """Cast a checkpoint to half precision and save it, unless the scan says that it breaks; say what the cast lost."""
    check_fail_on(fail_on)
    if recording is not None:
        if recording.exists() and not overwrite:
            raise UsageError(f"{recording} exists; choose another name, or give --overwrite.")
        check_writable(recording)
    with named_end(recording):
        done = _converted(context.params, quiet)
    if as_json:
        sys.stdout.write(json.dumps(done.to_dict(), indent=2, allow_nan=False) + "\n")
    elif not done.refused:
        print_text(done.scan.recording, done.scan.diagnosis, quiet=True)
        typer.echo("\n" + "\n".join(lines(done)))
    if done.refused:
        sys.stderr.write(f"overflow-lab: {done.refused}\n")
    return int(bool(done.refused))


def _converted(params: dict[str, Any], quiet: bool) -> Conversion:
    """Convert behind progress bars."""
    with watched(quiet=quiet) as bars:
        from overflow_lab.remedies.convert import convert as run

        own = {name: params[name] for name in ("remedy", "force", "recording", "fail_on", "overwrite")}
        options = opt.subject_options(params)
        return run(params["model"], params["to"], params["save"], progress=bars, **own, **options)


def lines(done: Conversion) -> list[str]:
    """Return what to print of a checkpoint that was written: what was lost, kept and compared, and how to load it."""
    loader = done.scan.recording.header.subject.get("class", "AutoModel")
    return [
        f"{name:<10} {said}"
        for name, said in (
            *_lost(done),
            ("kept", _kept(done)),
            ("remedy", done.remedy),
            ("checked", _checked(done)),
            ("saved", str(done.folder)),
            ("load it", f'{loader}.from_pretrained("{done.folder}", dtype="auto")'),
        )
        if said
    ]


def _lost(done: Conversion) -> Iterator[tuple[str, str]]:
    """Yield what the cast lost in all, and of the worst tensors."""
    from overflow_lab.report import text

    rows = done.lost
    if not rows:
        yield "lost", "nothing: every weight fits"
        return
    total = {name: sum(getattr(row, name) for row in rows) for name in ("to_infinity", "to_zero", "to_subnormal")}
    yield "lost", f"{_counts(**total)}, in {text.plural(len(rows), 'tensor')}"
    for row in rows[:_WORST]:
        yield "", f"{text.visible(row.name, 120)}: {_counts_of(row)} of {row.elements:,}"


def _counts_of(row: CastRow) -> str:
    return _counts(to_infinity=row.to_infinity, to_zero=row.to_zero, to_subnormal=row.to_subnormal)


def _counts(*, to_infinity: int, to_zero: int, to_subnormal: int) -> str:
    named = ((to_infinity, "infinity"), (to_zero, "zero"), (to_subnormal, "subnormal"))
    return ", ".join(f"{count:,} to {name}" for count, name in named if count)


def _kept(done: Conversion) -> str:
    """Return the modules that stay in float32, the first of them by name."""
    from overflow_lab.report import text

    if not done.kept:
        return ""
    more = f" and {len(done.kept) - 1:,} more" if len(done.kept) > 1 else ""
    return f"{text.visible(done.kept[0], 120)}{more} in float32, as the model's class asks for"


def _checked(done: Conversion) -> str:
    """Return what was compared when the folder was loaded again."""
    from overflow_lab.report import text

    same = done.same
    if same is None:
        return ""
    ran = [
        text.plural(same.tensors, "tensor"),
        f"outputs on {text.plural(same.inputs, 'input')}" if same.inputs else "",
    ]
    ran.append(text.plural(same.answers, "answer") if same.answers else "")
    said = ", ".join(part for part in ran if part)
    failed = f"; its runs could not be compared: {text.without_paths(same.failed, 200)}" if same.failed else ""
    return f"loaded again by transformers: {said} bit-identical with the cast in memory{failed}"

"""`overflow-lab weights MODEL`: what is in the files of a checkpoint, and what casts of it would lose."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from overflow_lab.cli import options as opt
from overflow_lab.cli.progress import watched
from overflow_lab.cli.show import check_fail_on, print_rich

if TYPE_CHECKING:
    from overflow_lab.weights import Weights

Checkpoint = Annotated[
    str,
    typer.Argument(
        help="A folder, a file (.safetensors, .bin, .pt, an index of shards), or a hub id.", show_default=False
    ),
]
Formats = Annotated[
    list[str] | None,
    typer.Option(
        "--precision",
        "--dtype",
        "-p",
        help="float16, bfloat16, float8_e4m3fn, float8_e5m2 or tf32; repeats [default: float16 and bfloat16].",
        show_default=False,
        autocompletion=opt.among("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "tf32"),
    ),
]
Most = Annotated[int, typer.Option(help="Tensors to show of each precision.")]


def weights(
    model: Checkpoint,
    precision: Formats = None,
    revision: opt.Revision = None,
    subfolder: opt.Subfolder = None,
    most: Most = 10,
    as_json: opt.AsJson = False,
    fail_on: opt.FailOn = "never",
    quiet: opt.Quiet = False,
) -> int:
    """Scan the weights of a checkpoint without loading the model: ranges, and what a cast to each precision loses."""
    check_fail_on(fail_on)
    with watched(quiet=quiet) as bars:
        from overflow_lab.weights import weights as run

        wanted = precision or ("float16", "bfloat16")
        found = run(model, precisions=wanted, revision=revision, subfolder=subfolder, progress=bars)
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=2, allow_nan=False) + "\n")
    else:
        _print(found, 0 if quiet else most)
    return exit_code(found, fail_on)


def _print(found: Weights, most: int) -> None:
    from overflow_lab.report import text
    from overflow_lab.report.weights_table import render

    elements = sum(row.range.count for row in found.tensors)
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in found.tensors)) or "none"
    bad = sum(row.range.nonfinite for row in found.tensors)
    said = [f"{text.plural(len(found.tensors), 'tensor')}, {text.plural(elements, 'element')} ({dtypes})"]
    said.append(f"{found.nbytes / 1e9:,.2f} GB in {text.plural(len(found.files), 'file')}")
    said += [f"{bad:,} are NaN or infinite already"] if bad else []
    said += [f"{text.plural(len(found.others), 'tensor')} of other kinds left alone"] if found.others else []
    summaries = {name: found.summary(name) for name in found.precisions}
    lost = {name: found.lost(name) for name in found.precisions}
    print_rich(render(f"{text.model_name(found.model)}  {', '.join(said)}", summaries, lost, most=most))


def exit_code(found: Weights, fail_on: str) -> int:
    """Return 1 where the weights lose as much as `fail_on` says in any precision."""
    from overflow_lab.analysis.results import SEVERITIES

    if fail_on == "never":
        return 0
    worst = max((SEVERITIES.index(found.severity(name)) for name in found.precisions), default=0)
    return int(worst >= SEVERITIES.index(fail_on))

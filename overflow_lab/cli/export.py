"""`overflow-lab export RECORDING FILE`: a recording's tables for other tools. Needs neither the model nor torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from overflow_lab.cli import options as opt
from overflow_lab.errors import UsageError
from overflow_lab.report.exports import FILE_FORMATS, TABLES

_STANDARD_OUTPUT = Path("-")

File = Annotated[
    Path,
    typer.Argument(
        help="The file to write: its ending (.csv, .parquet, .json) names the format; - is standard output.",
        show_default=False,
    ),
]
TableName = Annotated[
    str,
    typer.Option(
        help="layers (a row a layer, precisions side by side), sites (a row a value), operations or findings.",
        autocompletion=opt.among(*TABLES),
    ),
]
FormatName = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="csv, parquet, json, or tensorboard (then FILE is a folder) [default: by the ending].",
        show_default=False,
        autocompletion=opt.among(*FILE_FORMATS),
    ),
]


def export(
    recording: opt.RecordingArgument,
    file: File,
    table: TableName = "layers",
    file_format: FormatName = None,
    overwrite: opt.Overwrite = False,
) -> int:
    """Write one table of a recording as CSV, Parquet or JSON, or all layers for TensorBoard."""
    from overflow_lab.recording import load
    from overflow_lab.report import exports_tables as tables

    if table not in TABLES:
        raise UsageError(f"there is no table {table!r}; choose among {', '.join(TABLES)}.")
    if file == _STANDARD_OUTPUT:
        sys.stdout.write(tables.to_text(load(recording), table=table, format=file_format or "csv"))
        return 0
    chosen = cast("tables.FileFormat", tables.file_format(file, file_format))
    if not overwrite and _taken(file, chosen):
        raise UsageError(f"{file} exists; choose another name, or give --overwrite.")
    written = tables.export(load(recording), file, table=cast("tables.Table", table), format=chosen)
    then = f"\nopen it    tensorboard --logdir {written}" if chosen == "tensorboard" else ""
    typer.echo(f"{'layers' if chosen == 'tensorboard' else table:<10} {written}{then}")
    return 0


def _taken(file: Path, chosen: str) -> bool:
    """Return whether something would be written over: an empty folder is free for TensorBoard's events."""
    if chosen == "tensorboard" and file.is_dir():
        return any(file.iterdir())
    return file.exists()

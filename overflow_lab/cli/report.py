"""`overflow-lab report RECORDING`: render a recording again, without the model and without torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overflow_lab.cli import options as opt
from overflow_lab.cli.optional import STANDARD_OUTPUT
from overflow_lab.cli.places import place
from overflow_lab.cli.show import check_fail_on, exit_code, print_json, print_text
from overflow_lab.errors import UsageError

if TYPE_CHECKING:
    from overflow_lab.analysis import Diagnosis
    from overflow_lab.recording import Recording

Markdown = Annotated[
    str | None,
    typer.Option(
        "--markdown",
        metavar="[FILE.md]",
        help="The body of an issue in Markdown: on standard output, or in a file.",
        show_default=False,
    ),
]
Repro = Annotated[
    str | None,
    typer.Option(
        "--repro",
        metavar="[FILE.py]",
        help="A script without overflow-lab that shows the failure: on standard output, or in a file.",
        show_default=False,
    ),
]
Zip = Annotated[
    Path | None,
    typer.Option(
        "--zip",
        metavar="FILE.zip",
        help="All to attach to an issue: recording, report, Markdown and script, without private paths.",
        show_default=False,
    ),
]
OfPrecision = Annotated[
    str | None,
    typer.Option(
        "--precision", "-p", help="The precision that --repro is about [default: the worst].", show_default=False
    ),
]


def report(
    recording: opt.RecordingArgument,
    output: opt.Output = None,
    markdown: Markdown = None,
    repro: Repro = None,
    precision: OfPrecision = None,
    to_zip: Zip = None,
    as_json: opt.AsJson = False,
    fail_on: opt.FailOn = "never",
    overwrite: opt.Overwrite = False,
    quiet: opt.Quiet = False,
) -> int:
    """Render a recording again: the verdicts here and an HTML report, or what an issue needs.

    Needs neither the model nor torch.
    """
    from overflow_lab.analysis import analyze
    from overflow_lab.recording import load

    check_fail_on(fail_on)
    _check_outputs(markdown, repro, as_json=as_json, precision=precision)
    given = [output, to_zip, *(Path(name) for name in (markdown, repro) if name not in (None, STANDARD_OUTPUT))]
    for path in given:
        if path is not None:
            place(path, "", "", overwrite=overwrite)
    found = load(recording)
    diagnosis = analyze(found)
    wanted = (markdown, repro, to_zip)
    target = _html(found, diagnosis, recording, output) if output or wanted == (None, None, None) else None
    written = {"report": target, "zip": to_zip}
    if markdown is not None:
        written["markdown"] = _text(_markdown(found, diagnosis), markdown)
    if repro is not None:
        written["script"] = _text(_script(found, diagnosis, precision), repro)
    if to_zip is not None:
        _zip(found, to_zip)
    if as_json:
        print_json(found, diagnosis, recording_path=recording, report_path=target)
    elif wanted == (None, None, None):
        print_text(found, diagnosis, quiet=quiet)
    if not as_json and not quiet and STANDARD_OUTPUT not in wanted:
        gap = "\n" if wanted == (None, None, None) else ""
        typer.echo(gap + "\n".join(f"{name:<10} {path}" for name, path in written.items() if path is not None))
    return exit_code(diagnosis, fail_on)


def _check_outputs(markdown: str | None, repro: str | None, *, as_json: bool, precision: str | None) -> None:
    """Refuse two texts on one standard output, and a precision that nothing asks for."""
    printed = [name for name, value in (("--markdown", markdown), ("--repro", repro)) if value == STANDARD_OUTPUT]
    printed += ["--json"] if as_json else []
    if len(printed) > 1:
        raise UsageError(f"{' and '.join(printed)} both go to standard output; give one of them a file.")
    if precision is not None and repro is None:
        raise UsageError("--precision is about --repro; give that, too.")


def _html(found: Recording, diagnosis: Diagnosis, recording: Path, output: Path | None) -> Path:
    from overflow_lab.report import write_report

    name = recording.name.removesuffix(".gz").removesuffix(".jsonl")
    # The report beside a recording is made from it alone: to make it again loses nothing.
    return write_report(found, diagnosis, output or recording.with_name(f"{name}.html"))


def _markdown(found: Recording, diagnosis: Diagnosis) -> str:
    from overflow_lab.report.markdown import render

    return render(found, diagnosis)


def _script(found: Recording, diagnosis: Diagnosis, precision: str | None) -> str:
    from overflow_lab.report.repro import script

    return script(found, diagnosis, precision=precision, built_in=_built_in(found))


def _zip(found: Recording, target: Path) -> None:
    from overflow_lab.report.exports_zip import write_zip

    write_zip(found, target, built_in=_built_in(found))


def _built_in(found: Recording) -> tuple[str, ...]:
    """Return the texts that the scan used where none were given."""
    from overflow_lab.subjects.demo import built_in_texts

    return built_in_texts(found.header.subject)


def _text(content: str, target: str) -> Path | None:
    """Write a text to standard output (then there is no path to name) or to a file."""
    if target == STANDARD_OUTPUT:
        sys.stdout.write(content)
        return None
    from overflow_lab.report.writing import write_file

    return write_file(Path(target), content)

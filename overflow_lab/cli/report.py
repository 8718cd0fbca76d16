"""`overflow-lab report RECORDING`: render a recording again, without the model and without torch."""

from __future__ import annotations

import typer

from overflow_lab.cli import options as opt
from overflow_lab.cli.places import place
from overflow_lab.cli.show import check_fail_on, exit_code, print_json, print_text


def report(
    recording: opt.RecordingArgument,
    output: opt.Output = None,
    as_json: opt.AsJson = False,
    fail_on: opt.FailOn = "never",
    overwrite: opt.Overwrite = False,
    quiet: opt.Quiet = False,
) -> int:
    """Render a recording again: the verdicts here and an HTML report. Needs neither the model nor torch."""
    from overflow_lab.analysis import analyze
    from overflow_lab.recording import load
    from overflow_lab.report import write_report

    check_fail_on(fail_on)
    found = load(recording)
    diagnosis = analyze(found)
    name = recording.name.removesuffix(".gz").removesuffix(".jsonl")
    # The report beside a recording is made from it alone: to make it again loses nothing.
    beside = recording.with_name(f"{name}.html")
    target = place(output or beside, name, ".html", overwrite=overwrite or output is None)
    write_report(found, diagnosis, target)
    if as_json:
        print_json(found, diagnosis, recording_path=recording, report_path=target)
        return exit_code(diagnosis, fail_on)
    print_text(found, diagnosis, quiet=quiet)
    if not quiet:
        typer.echo(f"\nreport     {target}")
    return exit_code(diagnosis, fail_on)

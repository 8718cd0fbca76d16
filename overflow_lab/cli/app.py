"""The commands, and how their errors become one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from overflow_lab import __version__
from overflow_lab.cli.convert import convert
from overflow_lab.cli.diff import diff
from overflow_lab.cli.export import export
from overflow_lab.cli.finetune import finetune
from overflow_lab.cli.fix import fix
from overflow_lab.cli.kernels import kernels
from overflow_lab.cli.merge import merge
from overflow_lab.cli.optional import completed
from overflow_lab.cli.report import report
from overflow_lab.cli.scan import scan
from overflow_lab.cli.weights import weights
from overflow_lab.errors import OverflowLabError, RecordingFormatError, ScanInterrupted, UsageError

DONE, FAILED_ON, USAGE, ENDED_EARLY = 0, 1, 2, 3
# What typer returns after Ctrl-C, as a shell would: 128 + SIGINT. Older ones raise Abort.
INTERRUPTED = 130

app = typer.Typer(
    name="overflow-lab",
    help="Find where a model breaks in float16 or bfloat16, why, and whether it matters.",
    no_args_is_help=True,
    # Options of transformers' scripts and accelerate have underscores: --num_beams is --num-beams.
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(scan)
app.command()(fix)
app.command()(convert)
app.command()(finetune)
app.command()(weights)
app.command()(report)
app.command()(diff)
app.command()(merge)
app.command()(export)
app.command()(kernels)


def _version(value: bool) -> None:
    if value:
        sys.stdout.write(f"overflow-lab {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Find where a model breaks in float16 or bfloat16, why, and whether it matters."""


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code: 0 done, 1 verdict at or above --fail-on, 2 usage, 3 ended early."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a console that is not UTF-8 gets "?" for what it cannot show
            stream.reconfigure(errors="replace")
    try:
        code = app(completed(arguments), prog_name="overflow-lab", standalone_mode=False)
        sys.stdout.flush()  # whether the reader is gone shows here, and not in an exit code of Python's own
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return _ended(error)
    if code == INTERRUPTED:
        return _say("interrupted.", ENDED_EARLY)
    return code if isinstance(code, int) else DONE


def _ended(error: BaseException) -> int:
    """Say in one line what ended a command, and return its exit code. What nobody foresaw is raised again."""
    if isinstance(error, UsageError | RecordingFormatError):
        return _say(str(error), USAGE)
    if isinstance(error, OverflowLabError):
        recorded = error.recording if isinstance(error, ScanInterrupted) else None
        return _say(str(error) + (f" What was recorded is in {recorded}." if recorded else ""), ENDED_EARLY)
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "Abort":
        return _say("interrupted.", ENDED_EARLY)
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        # `overflow-lab ... | head` is not our failure, for all that typer exits with 1; nothing may be written on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    if isinstance(error, SystemExit):  # typer's, after it has completed a line for a shell
        return error.code if isinstance(error.code, int) else DONE
    return _wrong_usage(error)


def _wrong_usage(error: BaseException) -> int:
    """Return the exit code of typer's own errors, whose classes have moved between its versions."""
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        text = error.format_message()
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stderr.write(f"{text}\n")
            return USAGE
        return _say(f"{text} See overflow-lab --help.", USAGE) if text else int(error.exit_code)
    if isinstance(error, RuntimeError) and type(error).__name__ == "Exit":
        return int(getattr(error, "exit_code", ENDED_EARLY))
    raise error


def _say(message: str, code: int) -> int:
    sys.stderr.write(f"overflow-lab: {message}\n")
    return code

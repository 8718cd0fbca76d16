"""The commands, and how their errors become one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from overflow_lab import __version__
from overflow_lab.cli.kernels import kernels
from overflow_lab.cli.report import report
from overflow_lab.cli.scan import scan
from overflow_lab.errors import OverflowLabError, RecordingFormatError, ScanInterrupted, UsageError

DONE, FAILED_ON, USAGE, ENDED_EARLY = 0, 1, 2, 3

app = typer.Typer(
    name="overflow-lab",
    help="Find where a model breaks in float16 or bfloat16, why, and whether it matters.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(scan)
app.command()(report)
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
        code = app(list(arguments), prog_name="overflow-lab", standalone_mode=False)
        return code if isinstance(code, int) else DONE
    except (UsageError, RecordingFormatError) as error:
        return _say(str(error), USAGE)
    except ScanInterrupted as error:
        return _say(
            str(error) + (f" What was recorded is in {error.recording}." if error.recording else ""), ENDED_EARLY
        )
    except OverflowLabError as error:
        return _say(str(error), ENDED_EARLY)
    except KeyboardInterrupt:
        return _say("interrupted.", ENDED_EARLY)
    except BrokenPipeError:  # `overflow-lab ... | head`: not our failure, but nothing may be written on exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as error:
        # typer's own usage errors, whose class has moved between its versions: wrong options and the like.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            text = error.format_message()
            if type(error).__name__ == "NoArgsIsHelpError":
                sys.stderr.write(f"{text}\n")
                return USAGE
            return _say(f"{text} See overflow-lab --help.", USAGE) if text else int(error.exit_code)
        if isinstance(error, RuntimeError) and type(error).__name__ in ("Exit", "Abort"):
            return int(getattr(error, "exit_code", ENDED_EARLY))
        raise


def _say(message: str, code: int) -> int:
    sys.stderr.write(f"overflow-lab: {message}\n")
    return code

"""`overflow-lab diff A B`: what changed between two recordings, or between two precisions of one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overflow_lab.cli import options as opt
from overflow_lab.cli.places import place
from overflow_lab.cli.show import check_fail_on, print_rich
from overflow_lab.errors import UsageError

if TYPE_CHECKING:
    from overflow_lab.analysis.comparison import Comparison

FAIL_ON = ("never", "verdict", "worse")

Before = Annotated[Path, typer.Argument(help="The recording before (.jsonl or .jsonl.gz).", show_default=False)]
After = Annotated[
    Path | None,
    typer.Argument(help="The recording after; without it, two precisions of one are compared.", show_default=False),
]
Compared = Annotated[
    list[str] | None,
    typer.Option(
        "--precision",
        "--dtype",
        "-p",
        help="A precision to compare; repeats [default: all that both have]. Of one recording: two of its own.",
        show_default=False,
        autocompletion=opt.among(*opt.JUDGED),
    ),
]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write the comparison as a page.", show_default=False)
]
AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown for an issue or a review.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the comparison as one JSON object.")]
FailOn = Annotated[
    str,
    typer.Option(
        help="Exit with 1 where a verdict got worse (verdict), or a verdict or a site did (worse); or never.",
        autocompletion=opt.among(*FAIL_ON),
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the verdicts alone.")]


def diff(
    before: Before,
    after: After = None,
    precision: Compared = None,
    html: Html = None,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
    fail_on: FailOn = "never",
    overwrite: opt.Overwrite = False,
    quiet: Quiet = False,
) -> int:
    """Compare two recordings, or two precisions of one: what got worse, what got better, where.

    Needs neither the models nor torch.
    """
    check_fail_on(fail_on, FAIL_ON)
    if markdown and as_json:
        raise UsageError("--json and --markdown both print; give one of them.")
    target = None if html is None else place(html, "diff", ".html", overwrite=overwrite)
    from overflow_lab.analysis.compare import compare

    other, names = _second_precision(after, precision)
    found = compare(before, other, precisions=names)
    if target is not None:
        from overflow_lab.report.diff_html import write

        write(found, target)
    _print(found, markdown=markdown, as_json=as_json, quiet=quiet)
    if target is not None and not (quiet or markdown or as_json):
        typer.echo(f"\npage       {target}")
    return exit_code(found, fail_on)


def _second_precision(after: Path | None, names: list[str] | None) -> tuple[Path | None, list[str] | None]:
    """Return the second recording and the precisions; `-p float16 bfloat16` names two, and no file."""
    from overflow_lab.analysis.compare import full_name

    named = after is not None and not after.exists() and full_name(str(after)) in opt.JUDGED
    return (None, [*names, str(after)]) if names and len(names) == 1 and named else (after, names)


def _print(found: Comparison, *, markdown: bool, as_json: bool, quiet: bool) -> None:
    """Print the one thing that was asked for on standard output."""
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=2, allow_nan=False) + "\n")
    elif markdown:
        from overflow_lab.report import diff_markdown

        sys.stdout.write(diff_markdown.render(found))
    else:
        from overflow_lab.report import diff_terminal

        print_rich(diff_terminal.render(found, brief=quiet))


def exit_code(found: Comparison, fail_on: str) -> int:
    """Return 1 where a verdict, or with "worse" a site, got worse."""
    verdicts = any(pair.judged == "worse" for pair in found.verdicts)
    return int(bool(found.worse) if fail_on == "worse" else verdicts if fail_on == "verdict" else False)

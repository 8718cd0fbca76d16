"""Options whose value may be left out, which typer does not know: `--markdown` alone, or `--markdown issue.md`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

STANDARD_OUTPUT = "-"
# What a value ends in: anything else after the option is something else, such as the recording.
_ENDINGS = {"--markdown": (".md", ".markdown", ".txt"), "--repro": (".py",)}


def completed(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `report` with a value for each such option: the file that follows, or "-"."""
    return list(_completed(arguments)) if "report" in arguments[:1] else list(arguments)


def _completed(arguments: Sequence[str]) -> Iterator[str]:
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        endings = _ENDINGS.get(argument)
        named = endings is not None and (following == STANDARD_OUTPUT or following.lower().endswith(endings))
        yield argument if endings is None or named else f"{argument}={STANDARD_OUTPUT}"

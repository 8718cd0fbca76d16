"""Writes docs/cli.md from the commands themselves: `python -m tests.cli_reference`."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer.models

from overflow_lab.cli.app import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
# One real command line for each command; a command without one fails the test of this page.
EXAMPLES = {
    "scan": 'overflow-lab scan ./my-model --precision fp16 --text "summarize: ..." --fail-on error',
    "fix": "overflow-lab fix ./my-model --precision fp16 --save ./mended",
    "convert": "overflow-lab convert ./my-model --to fp16 --remedy auto --save ./my-model-fp16",
    "finetune": "overflow-lab finetune ./my-model --data texts.txt --save ./my-model-fits",
    "weights": "overflow-lab weights ./my-model --precision fp16",
    "report": "overflow-lab report reports/my-model.jsonl.gz",
    "export": "overflow-lab export reports/my-model.jsonl.gz layers.csv",
    "diff": "overflow-lab diff before.jsonl.gz after.jsonl.gz",
    "merge": "overflow-lab merge monday.jsonl.gz tuesday.jsonl.gz --recording both.jsonl.gz",
    "kernels": "overflow-lab kernels ./my-model --precision bf16",
}
_VALUES = {str: "TEXT", int: "N", float: "X", Path: "PATH"}


@dataclass(frozen=True)
class Parameter:
    """An argument or an option: `names` as they are typed, `value` as it is written in usage lines."""

    names: tuple[str, ...]
    value: str
    default: str
    help: str
    is_argument: bool

    @property
    def row(self) -> str:
        """Return the parameter as a row of a table."""
        names = ", ".join(f"`{name}`" for name in self.names)
        cells = (f"{names} {self.value}".strip(), self.default, self.help.replace("|", "\\|"))
        return f"| {' | '.join(cells)} |"


def commands() -> dict[str, Callable[..., Any]]:
    """Return the functions behind the commands by name, in the order of `overflow-lab --help`."""
    found = {}
    for info in app.registered_commands:
        assert info.callback is not None
        found[info.name or info.callback.__name__.replace("_", "-")] = info.callback
    return found


def parameters(command: Callable[..., Any]) -> list[Parameter]:
    """Return the arguments and options of a command, in the order of its signature."""
    hints = typing.get_type_hints(command, include_extras=True)
    return list(_parameters(inspect.signature(command), hints))


def _parameters(signature: inspect.Signature, hints: dict[str, Any]) -> Iterator[Parameter]:
    for name, parameter in signature.parameters.items():
        hint, default = hints[name], parameter.default
        infos = [part for part in getattr(hint, "__metadata__", ()) if isinstance(part, typer.models.ParameterInfo)]
        infos += [default] if isinstance(default, typer.models.ParameterInfo) else []
        if not infos:
            continue  # typer's own Context
        kind, repeats = _kind(hint.__origin__ if hasattr(hint, "__metadata__") else hint)
        given = getattr(infos[0], "default", ...) if default is infos[0] else default
        yield _parameter(name, infos[0], kind, repeats=repeats, default=given)


def _parameter(name: str, info: Any, kind: type, *, repeats: bool, default: object) -> Parameter:
    if isinstance(info, typer.models.ArgumentInfo):
        shown = (info.metavar or name).upper()
        return Parameter((f"{shown}{' ...' if repeats else ''}",), "", "", info.help or "", is_argument=True)
    flag = "--" + name.replace("_", "-")
    # Within Annotated typer takes a name that stands first for the default, and mends that later itself.
    first = (info.default,) if isinstance(info.default, str) and info.default.startswith("-") else ()
    own = tuple(part.strip() for decl in (*first, *(info.param_decls or ())) for part in decl.split("/"))
    names = own or ((flag, f"--no-{flag[2:]}") if kind is bool else (flag,))
    value = "" if kind is bool else (info.metavar or _VALUES.get(kind, "TEXT")) + (" ..." if repeats else "")
    return Parameter(names, value, _default(default, names), info.help or "", is_argument=False)


def _default(value: object, names: tuple[str, ...]) -> str:
    """Return a default as a cell; the help of an option tells one that is not a constant."""
    if value is None or value is False or value is ... or value is inspect.Parameter.empty or value == []:
        return ""
    return f"`{names[0]}`" if value is True else f"`{value}`"


def _kind(hint: Any) -> tuple[type, bool]:
    """Return the type of one value of an annotation, and whether there may be several."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) in (list, tuple):
        return typing.get_args(hint)[0], True
    return hint, False


def page() -> str:
    """Return the whole of docs/cli.md."""
    return _HEAD + "\n".join(_section(name, command) for name, command in commands().items()) + _FOOT


def _section(name: str, command: Callable[..., Any]) -> str:
    made = parameters(command)
    arguments, options = [p for p in made if p.is_argument], [p for p in made if not p.is_argument]
    usage = " ".join(["overflow-lab", name, "[OPTIONS]", *(p.names[0] for p in arguments)])
    told = [f"| `{p.names[0]}` | {p.help} |" for p in arguments]
    parts = [f"## {name}", f"    {usage}", inspect.cleandoc(command.__doc__ or ""), f"    {EXAMPLES.get(name, usage)}"]
    parts += ["\n".join(["| argument | |", "|---|---|", *told])] if told else []
    parts += ["\n".join(["| option | default | |", "|---|---|---|", *(p.row for p in options)])] if options else []
    return "\n\n".join(parts) + "\n"


_HEAD = """\
# The command line

Written by `python -m tests.cli_reference` from the commands themselves. `overflow-lab` and `python -m overflow_lab`
are the same. Underscores in option names are hyphens (`--num_beams`), as transformers' scripts write them; what has
`...` may be repeated.

    overflow-lab --version
    overflow-lab --install-completion      # for the shell that runs it
    overflow-lab COMMAND --help

"""
_FOOT = """
## Exit codes, streams, environment

Exit codes are 0, 1, 2 and 3: [verdict.md](verdict.md#exit-codes) says which is which. Results go to standard output,
progress and errors to standard error; an error is one line that names the situation, the value and the way out. With
`--json` standard output is one JSON object and nothing else. `NO_COLOR` in the environment takes the colours away, as
a pipe does.
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

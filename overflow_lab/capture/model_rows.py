"""The structure of a model as rows: its modules, their other names, and those that were never called."""

from __future__ import annotations

from torch import nn

from overflow_lab.recording import BlindSpotRow, ModuleRow
from overflow_lab.recording.uncalled import uncalled_row

# Containers that have no forward of their own.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def module_rows(model: nn.Module) -> list[ModuleRow]:
    """Return one row for each distinct module, with every further name by which it can be reached."""
    names: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(path)
    return [
        ModuleRow(
            path=paths[0],
            class_name=type(module).__name__,
            index=index,
            leaf=next(module.children(), None) is None,
            parameters=sum(p.numel() for p in module.parameters(recurse=False) if not nn.parameter.is_lazy(p)),
            aliases=tuple(paths[1:]),
        )
        for index, (module, paths) in enumerate(names.items())
    ]


def uncalled_rows(model: nn.Module, called: set[str]) -> list[BlindSpotRow]:
    """Return a blind spot for each topmost module that no run called."""
    rows: list[BlindSpotRow] = []
    silent: set[str] = set()
    for path, module in model.named_modules():
        if path in called or any(_inside(path, above) for above in silent):
            continue
        if isinstance(module, _CONTAINERS) and any(_inside(name, path) for name in called):
            continue
        if any(_inside(name, path) for name in called):
            continue
        silent.add(path)
        if not isinstance(module, _CONTAINERS) or len(module):
            rows.append(uncalled_row(path, type(module).__name__))
    return rows


def _inside(path: str, above: str) -> bool:
    """Return whether a module's path is that of `above` or below it."""
    return path == above or above == "" or path.startswith(above + ".")

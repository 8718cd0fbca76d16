"""Which outputs are the residual stream: what repeated blocks hand on to each other, told apart from branches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from overflow_lab.analysis.index import Index, role
from overflow_lab.recording import RangeRow

Sites = Mapping[tuple[str, str], RangeRow]


def streams(found: Index, sites: Sites) -> dict[tuple[str, str], str]:
    """Return the sites (module, port) that are a stream's values, each with the name of its stream.

    Numbered modules of one container are blocks of a stream where each is given what the one before it returned: some
    output of the one and some input of the next have the same number of elements, minimum and maximum, over all that
    was run. So the experts of a mixture, or parallel heads, are none, whatever they are called. Where the recording has
    no inputs, outermost containers of two or more modules of one class are taken as such. Leaves are no blocks. The
    stream is named after its outermost container, so that blocks and the sublayers in them are of one stream.
    """
    marked: dict[tuple[str, str], str] = {}
    inputs_known = any(role(port) == "input" for _, port in sites)
    by_module: dict[str, list[RangeRow]] = {}
    for (module, _), row in sorted(sites.items(), key=lambda item: item[1].order):
        by_module.setdefault(module, []).append(row)
    for container, blocks in _containers(found, by_module).items():
        rows = [by_module[block] for block in blocks]
        if inputs_known:
            ports = _handed_on(rows)
        else:
            ports = [_first_output(row) for row in rows] if _alike(found, container, blocks) else []
        marked |= {(block, port): _outermost(block) for block, port in zip(blocks, ports, strict=False) if port}
    return marked


def _containers(found: Index, by_module: Mapping[str, Sequence[RangeRow]]) -> dict[str, list[str]]:
    """Return the numbered modules that are no leaves by their container, by number, two at least."""
    numbered: dict[str, list[tuple[int, str]]] = {}
    for module, rows in by_module.items():
        container, _, name = module.rpartition(".")
        row = found.modules.get(module)
        gives = any(role(port.port) == "output" for port in rows)
        if name.isdecimal() and row is not None and not row.leaf and gives:
            numbered.setdefault(container, []).append((int(name), module))
    return {name: [module for _, module in sorted(members)] for name, members in numbered.items() if len(members) > 1}


def _handed_on(blocks: Sequence[Sequence[RangeRow]]) -> list[str]:
    """Return the port by which each block hands its values to the next; none where one does not.

    Nobody tells what the last one hands on: it is taken to be the same port, or else its first output.
    """
    ports: list[str] = []
    for before, after in pairwise(blocks):
        taken = {_print(row) for row in after if role(row.port) == "input"} - {None}
        given = [row.port for row in before if role(row.port) == "output" and _print(row) in taken]
        if not given:
            return []
        ports.append(given[0])
    last = ports[-1] if any(row.port == ports[-1] for row in blocks[-1]) else _first_output(blocks[-1])
    return [*ports, last]


def _first_output(rows: Sequence[RangeRow]) -> str:
    return min((row for row in rows if role(row.port) == "output"), key=lambda row: row.order).port


def _print(row: RangeRow) -> tuple[int, float, float] | None:
    """Return what tells a port's values from others'; None where they have no extremes."""
    r = row.range
    return None if r.min is None or r.max is None else (r.count, r.min, r.max)


def _alike(found: Index, container: str, blocks: Sequence[str]) -> bool:
    """Return whether a container is an outermost one whose blocks are of one class."""
    nested = any(part.isdecimal() for part in container.split("."))
    return not nested and len({found.class_name(block) for block in blocks}) == 1


def _outermost(module: str) -> str:
    parts = module.split(".")
    first = next(i for i, part in enumerate(parts) if part.isdecimal())
    return ".".join(parts[:first])

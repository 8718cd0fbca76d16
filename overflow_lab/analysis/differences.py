"""What else differs between two recordings: versions, options, inputs and weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from overflow_lab.analysis.comparison import Difference
from overflow_lab.analysis.index import REFERENCE, Index, role
from overflow_lab.recording import RangeRow, Recording, RunRow, TensorRow

# What differs from scan to scan of one model on one machine, and says nothing.
_PASSING = ("subject.notes", "subject.name")


def facts(before: Recording, after: Recording) -> tuple[Difference, ...]:
    """Return the versions, options and facts about the model that differ, with dotted names."""
    ours, theirs = dict(_facts(before)), dict(_facts(after))
    return tuple(_differing(ours, theirs))


def _facts(recording: Recording) -> Iterator[tuple[str, Any]]:
    header = recording.header
    yield "overflow_lab", header.overflow_lab
    for group, values in (
        ("environment", header.environment),
        ("options", header.options),
        ("subject", header.subject),
    ):
        yield from ((name, value) for name, value in _flat(values, f"{group}.") if name not in _PASSING)


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Difference]:
    for name in dict.fromkeys((*ours, *theirs)):
        if ours.get(name) != theirs.get(name):
            yield Difference(name, ours.get(name), theirs.get(name))


def inputs(before: Index, after: Index, pairs: Mapping[str, str]) -> tuple[Difference, ...]:
    """Return how the inputs differ: their number, tokens and ranges, or what the first module made of them.

    Token ids have no range. Where all else is equal, the float32 output of the first module with weights, the same in
    both, tells that it was given other ids.
    """
    found = [*_differing(_sizes(before), _sizes(after)), *_differing(_given(before), _given(after))]
    return tuple(found or _first_output(before, after, pairs))


def _sizes(found: Index) -> dict[str, int]:
    """Return the inputs and tokens of the float32 runs; what was generated is an output."""
    rows = [row for row in found.recording.of(RunRow) if row.precision == REFERENCE and row.run == "forward"]
    return {"inputs": sum(row.inputs for row in rows), "tokens": sum(row.tokens for row in rows)} if rows else {}


def _given(found: Index) -> dict[str, str]:
    """Return what the model was given, by name: extremes and number of elements."""
    rows = {row.name: row.range for row in found.recording.of(TensorRow) if row.role == "input"}
    for (module, port), row in found.ranges.get(REFERENCE, {}).items():
        if not module and role(port) == "input":
            rows.setdefault(port, row.range)
    return {name: f"{r.count:,} elements from {_short(r.min)} to {_short(r.max)}" for name, r in rows.items()}


def _short(value: float | None) -> str:
    return "?" if value is None else f"{value:.6g}"


def _first_output(before: Index, after: Index, pairs: Mapping[str, str]) -> Iterator[Difference]:
    old = _first_weighted(before)
    new = None if old is None else after.reference(pairs.get(old.module, old.module), old.port)
    if old is None or new is None or weights_of(before, old.module) != weights_of(after, new.module):
        return
    ours, theirs = ({"count": row.range.count, "absmax": _short(row.range.absmax)} for row in (old, new))
    yield from (
        Difference(f"the output of {old.module}, {one.name}", one.before, one.after) for one in _differing(ours, theirs)
    )


def _first_weighted(found: Index) -> RangeRow | None:
    weighted = {row.module for row in found.tensors.values() if row.role == "parameter"}
    rows = [row for row in found.ranges.get(REFERENCE, {}).values() if row.module in weighted]
    return min((row for row in rows if role(row.port) == "output"), key=lambda row: row.order, default=None)


def weights_of(found: Index, module: str) -> tuple[tuple[object, ...], ...]:
    """Return (name, shape, smallest and largest value, smallest magnitude) of each of a module's own parameters."""
    return weights_by_module(found).get(module, ())


def weights_by_module(found: Index) -> dict[str, tuple[tuple[object, ...], ...]]:
    """Return `weights_of` for every module that has any. Sums are left out: they depend on the number of threads."""
    made: dict[str, list[tuple[object, ...]]] = {}
    for row in found.recording.of(TensorRow):
        if row.role == "parameter":
            r = row.range
            leaf = row.name.rpartition(".")[2]
            made.setdefault(row.module, []).append((leaf, row.shape, r.min, r.max, r.smallest))
    return {module: tuple(sorted(rows, key=lambda row: str(row[0]))) for module, rows in made.items()}


def weights(before: Index, after: Index, pairs: Mapping[str, str]) -> tuple[Difference, ...]:
    """Return the parameters whose shape or range differs, by their name before; those in one only have one side."""
    ours = _parameters(before, pairs)
    theirs = _parameters(after, {})
    return tuple(_differing(ours, theirs))


def _parameters(found: Index, pairs: Mapping[str, str]) -> dict[str, str]:
    """Return each parameter as text, by its name in the recording after."""
    made = {}
    for row in found.recording.of(TensorRow):
        if row.role == "parameter":
            module, leaf = pairs.get(row.module, row.module), row.name.rpartition(".")[2]
            name = f"{module}.{leaf}" if module else leaf
            shape = "×".join(map(str, row.shape)) or "scalar"
            made[name] = f"{shape}, {_short(row.range.min)} to {_short(row.range.max)}"
    return made

"""Which sets to try, from the narrowest to the widest, led by where the diagnosis says that values break."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from overflow_lab.analysis.results import SEVERITIES, Finding
from overflow_lab.recording import OperationRow, Recording
from overflow_lab.remedies.islands.members import Member, Members, children_of, is_called, parent_of

_ROLES = ("origin", "cause", "harm", "amplifier")


def places(findings: Iterable[Finding], *, chain: bool = False) -> tuple[str, ...]:
    """Return the modules in which findings have their origin, the worst first; with `chain`, those it names too."""
    ordered = sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))
    found = [finding.origin.module for finding in ordered if finding.origin is not None]
    if chain:
        links = [link for finding in ordered for link in finding.chain if link.role in _ROLES]
        found += [link.module for link in links if link.module is not None]
    return tuple(dict.fromkeys(found))


def module_rungs(model: nn.Module, findings: Sequence[Finding]) -> Iterator[Members]:
    """Yield sets of modules to keep: the origins, those of the chain, their kind; then parents; then whole stacks."""
    seen: set[Members] = set()
    for paths in _rungs(model, findings):
        members = frozenset(Member(path) for path in _called(model, paths))
        if members and members not in seen:
            seen.add(members)
            yield members


def _rungs(model: nn.Module, findings: Sequence[Finding]) -> Iterator[Iterable[str]]:
    at = places(findings)
    yield at
    yield places(findings, chain=True)
    yield _kin(model, at)
    while any(at := tuple(dict.fromkeys(parent_of(path) for path in at if parent_of(path)))):
        yield at
        yield _kin(model, at)
    yield children_of(model, "")


def _called(model: nn.Module, paths: Iterable[str]) -> list[str]:
    """Return the paths of modules that can be an island: the model itself and bare lists cannot."""
    known = {path for path, module in model.named_modules() if path and is_called(module)}
    return [path for path in dict.fromkeys(paths) if path in known]


def _kin(model: nn.Module, paths: Iterable[str]) -> list[str]:
    """Return the modules of the same class and last name as any of these: all `wo`, all of a stack's blocks."""
    modules = dict(model.named_modules())
    kinds = {kind(path, modules[path]) for path in paths if path in modules}
    return [path for path, module in modules.items() if path and kind(path, module) in kinds]


def kind(path: str, module: nn.Module) -> tuple[str, type]:
    """Return what modules of a kind share: their class, and their last name where they have one."""
    name = path.rpartition(".")[2]
    return ("" if name.isdigit() else name, type(module))


def operation_rungs(
    model: nn.Module, recording: Recording, precision: str, findings: Sequence[Finding], followed: Members
) -> Iterator[Members]:
    """Yield sets of operations to keep: those that a run followed, the origins, then all of the modules' own code."""
    own = _operations(recording, precision)
    named = frozenset(
        Member(f.origin.module, f.origin.op)
        for f in findings
        if f.origin is not None and f.origin.op and f.origin.op in own.get(f.origin.module, ())
    )
    at = places(findings)
    inside = _all(own, at)
    parents = _all(own, [*at, *(parent_of(path) for path in at)])
    around = _all(own, [*at, *(p for path in at for p in (parent_of(path), *children_of(model, path)))])
    everywhere = _all(own, [*at, *_kin(model, at)])
    seen: set[Members] = set()
    for members in (followed, named, followed | named, inside, followed | inside, parents, around, everywhere):
        if members and members not in seen:
            seen.add(members)
            yield members


def _operations(recording: Recording, precision: str) -> dict[str, set[str]]:
    """Return the operations of each module's own code, as the shadow run of a precision saw them."""
    found: dict[str, set[str]] = {}
    for row in recording.of(OperationRow):
        # Negative ordinals are casts of weights, buffers and inputs; an operation in place writes its operand's dtype.
        if row.precision == precision and row.ordinal >= 0 and not row.op.endswith("_"):
            found.setdefault(row.module, set()).add(row.op)
    return found


def _all(own: dict[str, set[str]], paths: Iterable[str]) -> Members:
    return frozenset(Member(path, op) for path in dict.fromkeys(paths) for op in own.get(path, ()))

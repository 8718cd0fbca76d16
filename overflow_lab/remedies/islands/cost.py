"""What islands cost, and whether they are small: the share of the weights, bytes, and time where it was measured."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from overflow_lab.analysis.index import REFERENCE, index
from overflow_lab.analysis.numbers import module_name, number, percent
from overflow_lab.analysis.streams import streams
from overflow_lab.formats import FORMATS
from overflow_lab.recording import Recording
from overflow_lab.remedies.islands.members import Members, all_weights, is_called, kept_weights, modules_of

# Above this share of the weights, or with a whole stack of layers in it, an island is not called small.
SMALL = 0.5


@dataclass(frozen=True)
class Cost:
    """The weights in an island, of all weights (elements); `stacks` are members that hold a whole list of layers.

    `autocast` says that all weights are float32 anyway, `wrapped` that operations are members.
    """

    kept: int
    total: int
    stacks: tuple[str, ...] = ()
    autocast: bool = False
    wrapped: bool = False

    @property
    def share(self) -> float:
        """The share of the weights that stays in float32."""
        return self.kept / self.total if self.total else 0.0

    @property
    def small(self) -> bool:
        """Whether the island is a small part of the model."""
        return self.share <= SMALL and not self.stacks

    def sentences(self) -> tuple[str, ...]:
        """Return what the island costs, for the notes of a remedy."""
        time = "; the wrapper here looks at every operation, which takes time" if self.wrapped else ""
        if self.autocast:
            return (f"Under autocast it costs no memory of weights: they are float32 anyway{time}.",)
        if not self.kept:
            return (f"It costs no memory of weights: only what these operations give is held in float32{time}.",)
        now, before = 4 * self.kept + 2 * (self.total - self.kept), 2 * self.total
        return (
            f"It costs {4 * self.kept:,} bytes of float32 weights, {percent(self.share)} of all: {now:,} bytes of "
            f"weights in place of {before:,}{time}.",
        )


def cost_of(model: nn.Module, members: Members, *, autocast: bool) -> Cost:
    """Return the cost of members of a model; what it costs in time, the proof measures."""
    stacks = tuple(path for path in modules_of(members) if _holds_stack(model.get_submodule(path)))
    return Cost(
        kept_weights(model, members), all_weights(model), stacks, autocast, any(member.op for member in members)
    )


def _holds_stack(module: nn.Module) -> bool:
    """Return whether a module holds a list of at least two layers of its own."""
    return any(isinstance(part, nn.ModuleList) and len(part) > 1 and _is_layers(part) for part in module.modules())


def _is_layers(part: nn.ModuleList) -> bool:
    """Return whether a list holds modules that have parts themselves: layers, and no mere list of linear maps."""
    return all(is_called(item) and any(True for _ in item.children()) for item in part)


def residual_stream(recording: Recording, dtype: str) -> str:
    """Return a part of a sentence that says where a residual stream passes the limit most, "" where all of them fit.

    It is what float32 has there, in what repeated blocks hand on to each other.
    """
    limit, found = FORMATS[dtype].max, index(recording)
    sites = found.ranges.get(REFERENCE, {})
    values = [(sites[site].range.absmax or 0.0, site[0]) for site in streams(found, sites)]
    most, module = max(values, default=(0.0, ""))
    if most <= limit:
        return ""
    return (
        f"the residual stream itself does not fit ({module_name(module)} hands on {number(most)}, "
        f"the limit of {dtype} is {number(limit)})"
    )

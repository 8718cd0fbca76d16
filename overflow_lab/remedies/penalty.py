"""A penalty on large activations, to train a model into the range of a format."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from overflow_lab.errors import UsageError
from overflow_lab.formats import FORMATS, get_format
from overflow_lab.subjects.containers import tensors

if TYPE_CHECKING:
    from overflow_lab.scan import Scan

Site = tuple[str, str]
# Sites that have this much more headroom than asked for are watched, too: training moves what is large elsewhere.
MARGIN = 1.0
# A mask's finfo.min, and what was added to it, is meant to be as large as it is.
_MEANT = 1e30


class ActivationPenalty:
    """A differentiable penalty on the activations of `model` that leave less than `headroom_bits` below a limit.

    With t = limit / 2**headroom_bits, an element x of a site has the excess e = max(0, log2 |x| - log2 t), in bits. A
    call's penalty is the mean of e**2 over those elements whose excess is above 0, so that neither the size of a tensor
    nor the number of healthy elements dilutes it; a site's is the mean over its calls, and `penalty()` is the sum over
    all sites. It is 0 where everything fits, and it knows magnitudes by their logarithm alone: a model whose values and
    limit are a thousand times larger has the same penalty. The idea, an extra loss on large values in fine-tuning, is
    from the PyTorch forum's thread "Bfloat16 + transformers" (2020); mesh-tensorflow's z-loss, the square of the
    logarithm of the softmax's sum, is such a penalty on logits.

    `sites` are names of modules, whose output (the first tensor of it) is watched, or pairs of a module and an output
    as scans name them ("output[0]", "output['logits']"); without them, the outputs of all modules without children.
    `limit` is a format ("float16") or a number, `weight` a factor of `penalty()`. Use it as a context manager, or with
    `attach()` and `detach()`; forward hooks are all that it adds, and they are gone afterwards.

    Calls without gradients (evaluation, `torch.no_grad()`) add nothing. A module that gradient checkpointing runs again
    in the backward pass counts once. Raises UsageError for a module that the model does not have, or no sites at all.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Iterable[str | Site] | None = None,
        *,
        limit: str | float = "float16",
        headroom_bits: float = 1.0,
        weight: float = 1.0,
    ) -> None:
        self.limit = _limit(limit)
        self.headroom_bits = _finite("headroom_bits", headroom_bits)
        self.weight = _finite("weight", weight)
        self._model = model
        self._by_module = _grouped(model, _leaves(model) if sites is None else sites)
        self._handles: list[RemovableHandle] = []
        self._terms: dict[Site, list[torch.Tensor]] = {}
        self._largest: dict[Site, torch.Tensor] = {}
        self._counted: set[str] = set()

    @classmethod
    def from_scan(
        cls,
        model: nn.Module,
        scan: Scan,
        precision: str = "float16",
        *,
        headroom_bits: float = 1.0,
        weight: float = 1.0,
    ) -> ActivationPenalty:
        """Return the penalty on the module outputs that lack headroom in `precision`, by a scan of this model.

        Those with less than `headroom_bits` + 1 in the scan's float32 run are watched; all of them are asked to have
        `headroom_bits`. Raises UsageError where there is no such output.
        """
        from overflow_lab.capture.precisions import parse_precision

        dtype = parse_precision(precision).dtype
        sites = tight_sites(scan, dtype, below=headroom_bits + MARGIN)
        if not sites:
            raise UsageError(
                f"every module's output has {headroom_bits + MARGIN:g} bits of headroom in {dtype}: there is nothing "
                "to penalise; ask for more headroom_bits, or name the sites."
            )
        return cls(model, sites, limit=dtype, headroom_bits=headroom_bits, weight=weight)

    @property
    def sites(self) -> tuple[Site, ...]:
        """The module and output of each site; "" as output is the first tensor."""
        return tuple((module, port) for module, ports in self._by_module.items() for port in ports)

    @property
    def attached(self) -> bool:
        """Whether the hooks are there."""
        return bool(self._handles)

    def attach(self) -> ActivationPenalty:
        """Add the hooks; returns itself. Raises UsageError where they are there already."""
        if self._handles:
            raise UsageError("the penalty is attached already; call detach() first.")
        modules = dict(self._model.named_modules())
        for name, ports in self._by_module.items():
            hook = functools.partial(self._after, name, ports)
            self._handles.append(modules[name].register_forward_hook(hook))
        return self

    def detach(self) -> None:
        """Remove the hooks, and forget what was collected."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._counted.clear()
        self.reset()

    def __enter__(self) -> ActivationPenalty:
        return self.attach()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def penalty(self) -> torch.Tensor:
        """Return the penalty of the calls since the last one: a float32 scalar to add to the loss, 0 without calls."""
        sums = [torch.stack(terms).mean() for terms in self._terms.values()]
        self._terms.clear()
        if not sums:
            return torch.zeros((), device=_device(self._model))
        place = sums[0].device  # of a model that is spread over several
        total: torch.Tensor = torch.stack([term.to(place) for term in sums]).sum()
        return total.mul(self.weight)

    def reset(self) -> None:
        """Forget what was collected, the largest values too."""
        self._terms.clear()
        self._largest.clear()

    def headroom(self) -> float:
        """Return the least headroom of any site, in bits, since the last call of this or `reset`; inf without calls."""
        found = self.largest()
        self._largest.clear()
        worst = max(found.values(), default=0.0)
        if not math.isfinite(worst):
            return -math.inf
        return math.log2(self.limit / worst) if worst else math.inf

    def largest(self) -> dict[Site, float]:
        """Return the largest magnitude at each site that was called; inf where a value was not finite."""
        return {site: float(value) for site, value in self._largest.items()}

    def _after(self, name: str, ports: tuple[str, ...], module: nn.Module, args: Any, output: Any) -> None:
        again = torch._C._current_graph_task_id() != -1  # a forward inside a backward: gradient checkpointing
        for port, tensor in _watched(output, ports):
            # Also when run again: a checkpoint compares what its two runs save for the backward pass.
            term = self._term(tensor) if torch.is_grad_enabled() and tensor.requires_grad else None
            if again:
                self._check_counted(name, term)
                continue
            self._note((name, port), tensor)
            if term is not None:
                self._counted.add(name)
                self._terms.setdefault((name, port), []).append(term)

    def _term(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the excess over the elements that have one; float32, with gradient."""
        wide = tensor if tensor.dtype == torch.float64 else tensor.float()
        ratio = wide.abs() / (self.limit / 2.0**self.headroom_bits)
        inside = ratio.isfinite() & (ratio > 1.0)
        excess = torch.where(inside, ratio, 1.0).log2()
        mean: torch.Tensor = excess.square().sum() / inside.sum().clamp(min=1)
        return mean.float()

    def _note(self, site: Site, tensor: torch.Tensor) -> None:
        if not tensor.numel():
            return
        largest = torch.nan_to_num(tensor.detach().abs().amax().float(), nan=math.inf, posinf=math.inf)
        before = self._largest.get(site)
        self._largest[site] = largest if before is None else torch.maximum(before, largest)

    def _check_counted(self, name: str, term: torch.Tensor | None) -> None:
        """Raise where a module counts for the first time when it is too late."""
        if term is not None and name not in self._counted:
            raise UsageError(
                f"gradient checkpointing ran {name!r} without gradients, so its penalty is not in the loss; use "
                'gradient_checkpointing_kwargs={"use_reentrant": False}.'
            )


def tight_sites(scan: Scan, dtype: str, *, below: float) -> tuple[Site, ...]:
    """Return module and output of those that leave less than `below` bits in a format, by a scan's float32 run.

    Of modules that pass the same tensor on, the innermost is taken. Keys, values and masks are left out.
    """
    frame, limit = scan.to_frame(), FORMATS[dtype].max
    found: dict[tuple[float, ...], Site] = {}
    for row in frame.to_dict("records"):
        absmax, module, port = row["absmax"], str(row["module"]), str(row["port"])
        if absmax is None or not 0 < absmax < _MEANT or math.log2(limit / absmax) >= below:
            continue
        if module and "cache" not in port:
            found.setdefault((absmax, row["min"], row["max"], row["count"]), (module, port))
    return tuple(found.values())


def _watched(output: Any, ports: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    found = [(name, t) for name, t in tensors(output, "output", caches=False) if t.is_floating_point()]
    for port in ports:
        if not port:
            yield from ((port, tensor) for _, tensor in found[:1])
        yield from ((port, tensor) for name, tensor in found if name == port)


def _grouped(model: nn.Module, sites: Iterable[str | Site]) -> dict[str, tuple[str, ...]]:
    known = dict(model.named_modules())
    grouped: dict[str, tuple[str, ...]] = {}
    for site in [sites] if isinstance(sites, str) else sites:
        name, port = (site, "") if isinstance(site, str) else site
        if name not in known:
            raise UsageError(f"{type(model).__name__} has no module {name!r}; name one of its named_modules().")
        grouped[name] = tuple(dict.fromkeys((*grouped.get(name, ()), port)))
    if not grouped:
        raise UsageError("there are no sites to penalise; name modules, or leave sites out for all without children.")
    return grouped


def _leaves(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if not any(module.children())]


def _limit(limit: str | float) -> float:
    value = get_format(limit).max if isinstance(limit, str) else float(limit)
    if not 0 < value < math.inf:
        raise UsageError(f"the limit is {limit!r}; give a format such as float16, or a positive number.")
    return float(value)


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise UsageError(f"{name} is {value!r}; give a finite number.")
    return float(value)


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

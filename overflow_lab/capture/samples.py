"""Elements of each module's values in float32, kept to compare the same elements in another precision.

Keeping whole activations costs as much memory as the model's training would. An evenly spread sample estimates a
relative error to within a few percent of itself, in constant memory for each value; small values are kept whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from overflow_lab.capture.devices import widest
from overflow_lab.capture.positions import RealPositions
from overflow_lab.recording import ErrorRow

# Elements kept of one value: 1 / sqrt(4096) = 1.6 percent is the sampling error of a root mean square of independent
# ones.
SAMPLE = 4096

Key = tuple[str, str, int]


@dataclass
class Samples:
    """The float32 samples of one batch, by module, port and call; the same tensor at several ports is kept once.

    Only real `positions` are sampled.
    """

    positions: RealPositions = field(default_factory=RealPositions)
    kept: dict[Key, tuple[torch.Tensor, torch.Size]] = field(default_factory=dict)
    _by_number: dict[int, tuple[torch.Tensor, torch.Size]] = field(default_factory=dict)

    def keep(self, key: Key, tensor: torch.Tensor, number: int) -> None:
        """Keep the sample of a tensor; the same tensor at another port has the same `number`."""
        found = self._by_number.get(number)
        if found is None:
            found = self._by_number[number] = (sample(tensor, self.positions).clone(), tensor.shape)
        self.kept[key] = found

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(values.nbytes for values, _ in {id(v): v for v in self.kept.values()}.values())


@dataclass
class Differences:
    """Accumulates, for one precision, the differences from the float32 samples at each port."""

    precision: str
    mismatched: set[str] = field(default_factory=set)
    _pending: list[tuple[str, str, int, torch.Tensor]] = field(default_factory=list)
    _by_number: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    _rows: dict[tuple[str, str], ErrorRow] = field(default_factory=dict)

    def compare(self, samples: Samples, key: Key, tensor: torch.Tensor, *, number: int, order: int) -> None:
        """Compare a tensor with the sample of the same call in float32; no transfer from the device yet."""
        reference = samples.kept.get(key)
        if reference is None or reference[1] != tensor.shape:
            self.mismatched.add(key[0])
            return
        pair = (number, id(reference[0]))
        sums = self._by_number.get(pair)
        if sums is None:
            sums = self._by_number[pair] = differences(sample(tensor, samples.positions), reference[0])
        self._pending.append((key[0], key[1], order, sums))

    def settle(self) -> None:
        """Move what is pending to the host, at once, and merge it."""
        pending, self._pending = self._pending, []
        self._by_number.clear()
        if not pending:
            return
        device = pending[0][3].device
        table = torch.stack([entry[3].to(device) for entry in pending]).cpu().tolist()
        for (module, port, order, _), (squares, reference, nonfinite, compared) in zip(pending, table, strict=True):
            made = ErrorRow(self.precision, module, port, order, int(compared), int(nonfinite), squares, reference)
            old = self._rows.get((module, port))
            self._rows[module, port] = made if old is None else old + made

    def rows(self) -> list[ErrorRow]:
        """Return the rows so far, and start anew."""
        rows, self._rows = list(self._rows.values()), {}
        return rows


def sample(tensor: torch.Tensor, positions: RealPositions | None = None) -> torch.Tensor:
    """Return at most about SAMPLE elements, evenly spread, of a tensor of any shape; a view where it can be.

    With `positions`, only of those.

    The step has no common factor with the last dimension, so that every channel is met.
    """
    flat = tensor.detach().reshape(-1)
    real = positions.of(tensor) if positions is not None and flat.numel() else None
    if real is None:
        return flat[:: _step(flat.numel(), tensor.shape[-1] if tensor.dim() else 1)]
    width = flat.numel() // (tensor.shape[0] * tensor.shape[1])
    total = len(real) * width
    taken = torch.arange(0, total, _step(total, tensor.shape[-1]), device=tensor.device)
    return flat[real[taken // width] * width + taken % width]


def _step(elements: int, last: int) -> int:
    step = elements // SAMPLE
    if step < 2:
        return 1
    while math.gcd(step, last) > 1:
        step += 1
    return step


def differences(low: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return [sum (low - reference)^2, sum reference^2, elements finite in reference only, finite in reference].

    Computed in float64 where the device has it; shape [4].
    """
    wide = widest(low.device)
    a, b = low.to(wide), reference.to(wide)
    meant = torch.isfinite(b)
    kept = meant & torch.isfinite(a)
    error = torch.where(kept, a - b, 0.0)
    scale = torch.where(kept, b, 0.0)
    return torch.stack([error.dot(error), scale.dot(scale), (meant & ~kept).sum().to(wide), meant.sum().to(wide)])

"""The model's own output in two precisions: error, non-finite values, decisions that changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from overflow_lab.capture.devices import widened
from overflow_lab.capture.margins import margin_exponents
from overflow_lab.capture.positions import RealPositions
from overflow_lab.capture.samples import differences
from overflow_lab.recording import OutputRow
from overflow_lab.subjects.containers import tensors

# Outputs by these names are scores over choices: the largest of each last dimension is what the model decides.
_SCORES = ("logits", "scores", "probs", "probabilities")
# The elements of outputs by these parts of a name are compared with each other, whether or not the largest is chosen.
_COMPARED = ("logit", "score", "prob", "simil")
_CHUNK = 1 << 22
# Fewer values than these have no spread to speak of.
_SOME = 8
# Elements that share the largest value of a row and still are a tie.
_FEW = 3


@dataclass(frozen=True)
class Outputs:
    """The tensors of one output by port, caches left out, and the mask of its real positions, [batch, length].

    `mask` is that of the scores; `positions` are those of all that was put in.
    """

    tensors: dict[str, torch.Tensor]
    mask: torch.Tensor | None = None
    positions: RealPositions = field(default_factory=RealPositions)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def outputs_of(
    output: Any,
    mask: torch.Tensor | None,
    unknown: set[str] | None = None,
    *,
    positions: RealPositions | None = None,
) -> Outputs:
    """Return copies of the tensors of a model's output: it may write into its own output at the next batch."""
    found = tensors(output, "output", caches=False, unknown=unknown)
    return Outputs({name: tensor.detach().clone() for name, tensor in found}, mask, positions or RealPositions())


def mask_of(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the mask of the positions that the logits speak of."""
    mask = inputs.get("decoder_attention_mask") if "decoder_input_ids" in inputs else inputs.get("attention_mask")
    return mask if isinstance(mask, torch.Tensor) else None


def compare_outputs(precision: str, reference: Outputs, low: Outputs) -> tuple[list[OutputRow], list[str]]:
    """Return a row for each output that both have alike, and the ports that are missing or of another shape."""
    rows, apart = [], []
    for port, tensor in reference.tensors.items():
        other = low.tensors.get(port)
        if other is None or other.shape != tensor.shape or other.is_complex() != tensor.is_complex():
            apart.append(port)
        elif tensor.numel():
            rows.append(_compare(precision, port, reference, other.to(tensor.device)))
    return rows, apart


def _compare(precision: str, port: str, expected: Outputs, low: torch.Tensor) -> OutputRow:
    reference = expected.tensors[port]
    if reference.is_complex():
        reference, low = torch.view_as_real(reference.resolve_conj()), torch.view_as_real(low.resolve_conj())
    if not reference.is_floating_point():
        changed = int((reference != low).sum())
        return OutputRow(precision, port, reference.numel(), decisions=reference.numel(), changed=changed)
    a, b = (expected.positions.select(tensor).reshape(-1) for tensor in (low, reference))
    chunks = zip(a.split(_CHUNK), b.split(_CHUNK), strict=True)
    parts = [differences(*_unmasked(x, y)) for x, y in chunks]
    squares, scale, nonfinite, compared = torch.stack(parts).sum(0).tolist()
    ranked, evened = _evened(reference, low, expected.mask) if is_ranked(port, reference) else (0, 0)
    row = OutputRow(precision, port, int(compared), int(nonfinite), squares, scale, ranked=ranked, evened=evened)
    return row + _decisions(row, reference, low, expected.mask) if is_scores(port, reference) else row


def _unmasked(low: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both, flat, without the elements that each of them masks by the lowest value of its own dtype.

    Those may differ by 3e38 and still are the same, and beside their squares no other error would be seen.
    """
    masked = reference == torch.finfo(reference.dtype).min
    if not bool(masked.any()):
        return low, reference
    kept = ~(masked & (low == torch.finfo(low.dtype).min))
    return low[kept], reference[kept]


def has_nan(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of any dtype holds a NaN; infinities may be meant (a mask), NaN never is."""
    return bool(torch.isnan(tensor).any())


def is_scores(port: str, tensor: torch.Tensor) -> bool:
    """Return whether an output holds scores over choices along its last dimension."""
    return tensor.ndim >= 2 and tensor.shape[-1] >= 2 and any(name in port for name in _SCORES)


def compared(ports: Iterable[str]) -> set[str]:
    """Return the outputs whose elements a reader compares with each other: the only one, the first of a tuple, scores.

    What else a model returns beside them (attention maps, reference points) is measured as a whole, and may be nearly
    constant without anybody losing anything.
    """
    names = list(ports)
    return set(names) if len(names) == 1 else {p for p in names if p == "output[0]" or any(n in p for n in _COMPARED)}


def whole_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the error of a tensor relative to it, over what is finite in `wanted`; inf where `got` is not there."""
    return _ratio(got, wanted, centered=False)


def spread_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the error of a tensor relative to its spread around its mean; 0 where there are too few values for one."""
    return _ratio(got, wanted, centered=True) if wanted.numel() >= _SOME else 0.0


def _ratio(got: torch.Tensor, wanted: torch.Tensor, *, centered: bool) -> float:
    a, b = widened(got), widened(wanted)
    kept = torch.isfinite(b)
    if not bool(torch.isfinite(a[kept]).all()):
        return math.inf
    a, b = a[kept], b[kept]
    if not b.numel():
        return 0.0
    off, around = (a - b, b) if not centered else (a - b - (a - b).mean(), b - b.mean())  # to move all alike loses none
    error, scale = float(off.square().sum()), float(around.square().sum())
    if centered and scale < 1e-12 * float(b.square().sum()):
        return 0.0  # a constant has no spread to lose
    return math.sqrt(error / scale) if scale > 0 else 0.0 if error == 0 else math.inf


def is_ranked(port: str, tensor: torch.Tensor) -> bool:
    """Return whether an output's rows may be ranked by its reader: scores by name, or all that a model returns."""
    return (
        tensor.is_floating_point()
        and tensor.ndim >= 2
        and tensor.shape[-1] >= 2
        and (port == "output" or is_scores(port, tensor))
    )


def _real_rows(tensor: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the rows of the last dimension, [rows, elements], those of padding left out."""
    kept = tensor[mask.bool()] if mask is not None and mask.shape == tensor.shape[:-1] else tensor
    return kept.reshape(-1, tensor.shape[-1])


def _evened(reference: torch.Tensor, low: torch.Tensor, mask: torch.Tensor | None) -> tuple[int, int]:
    """Return how many rows there are, and in how many float32's best and another became equal and the other is first.

    Values that many elements share are a bound that they reached (a sigmoid's 1, a clamp), which says nothing of ties.
    """
    a, b = _real_rows(low, mask), _real_rows(reference, mask)
    found, rows = 0, max(1, _CHUNK // a.shape[-1])
    for x, y in zip(a.split(rows), b.split(rows), strict=True):
        top, best = x.amax(-1, keepdim=True), y.argmax(-1, keepdim=True)
        equal = (x.gather(-1, best) == top)[:, 0] & (x.argmax(-1, keepdim=True) != best)[:, 0]
        found += int((equal & ((x == top).sum(-1) <= _FEW)).sum())
    return len(a), found


def _decisions(row: OutputRow, reference: torch.Tensor, low: torch.Tensor, mask: torch.Tensor | None) -> OutputRow:
    """Return a row that holds only the decisions and the divergence of the real positions."""
    a, b = _real_rows(low, mask), _real_rows(reference, mask)
    undecided = torch.isnan(b).any(-1)  # in float32 too: nothing is lost
    unknown = torch.isnan(a).any(-1) & ~undecided
    differs = (a.argmax(-1) != b.argmax(-1)) & ~(unknown | undecided)
    whole = torch.isfinite(a).all(-1) & torch.isfinite(b).all(-1)
    kl = 0.0
    rows = max(1, _CHUNK // a.shape[-1])  # in float64 and several copies: a vocabulary can have 262,144 words
    for x, y in zip(a[whole].split(rows), b[whole].split(rows), strict=True):
        logs = widened(x).log_softmax(-1), widened(y).log_softmax(-1)
        kl += float(F.kl_div(*logs, reduction="sum", log_target=True))
    return OutputRow(
        row.precision,
        row.port,
        0,
        decisions=len(a),
        changed=int((differs | unknown).sum()),
        kl_sum=max(kl, 0.0),
        kl_rows=int(whole.sum()),
        margins=margin_exponents(b[differs], a[differs].argmax(-1)),
    )

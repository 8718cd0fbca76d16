"""The noise floor: how far the output moves when every weight is rounded to a format, up or down at random.

A low precision is judged against that and not against zero: a model whose own conditioning makes 5 percent of one
rounding of its weights is not imprecise for showing 5 percent (the idea of TTrace, 2025).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from overflow_lab.capture.buffers import kept_buffers
from overflow_lab.capture.outputs import Outputs, compare_outputs, compared, outputs_of, spread_error
from overflow_lab.capture.precisions import Prepared
from overflow_lab.capture.randomness import reseed
from overflow_lab.capture.runs import Reference
from overflow_lab.formats import FORMATS, FloatFormat
from overflow_lab.recording import NoiseRow

_SEED = 1


def noise_row(base: Prepared, reference: Reference, precision: str, format_name: str) -> NoiseRow | None:
    """Return the noise floor of a precision on one batch; None where the output cannot be compared.

    Costs one float32 forward and a copy of the weights.
    """
    weights = rounded_weights(base.model, FORMATS[format_name])
    inputs, positional = base.inputs(dict(reference.inputs)), base.inputs(reference.batch.positional)
    reseed()
    with kept_buffers(base.model), base.context():
        output: Any = functional_call(base.model, weights, positional, inputs)
    moved, expected = outputs_of(output, None).tensors, reference.outputs.tensors
    rows, _ = compare_outputs(precision, reference.outputs, Outputs(moved))
    scored = [row for row in rows if row.decisions and row.kl_rows] or rows
    errors = [
        row.relative_error for row in scored if row.relative_error is not None and math.isfinite(row.relative_error)
    ]
    judged = [p for p in compared(expected) if p in moved and moved[p].shape == expected[p].shape]
    spreads = [spread_error(moved[p], expected[p]) for p in judged if expected[p].is_floating_point()]
    return NoiseRow(precision, max(errors), max(spreads, default=0.0)) if errors else None


def rounded_weights(model: nn.Module, fmt: FloatFormat) -> dict[str, torch.Tensor]:
    """Return the floating parameters rounded to `fmt` at random: up as likely as a value is near the upper one."""
    generator = torch.Generator().manual_seed(_SEED)
    return {
        name: stochastically_rounded(parameter.detach(), fmt, generator)
        for name, parameter in model.named_parameters()
        if parameter.dtype == torch.float32
    }


def stochastically_rounded(values: torch.Tensor, fmt: FloatFormat, generator: torch.Generator) -> torch.Tensor:
    """Return float32 `values` rounded to the grid of `fmt` (its range is not limited), unbiased."""
    exponent = torch.frexp(values).exponent.clamp(min=fmt.min_exponent + 1)
    spacing = torch.ldexp(torch.ones_like(values), exponent - fmt.precision)
    draw = torch.rand(values.shape, generator=generator).to(values.device)
    return torch.floor(values / spacing + draw) * spacing

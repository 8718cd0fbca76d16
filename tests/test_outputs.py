"""The model's own output in two precisions, against numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from overflow_lab.capture.outputs import compare_outputs, is_scores, outputs_of
from overflow_lab.recording import OutputRow


def compare(reference: Any, low: Any, mask: torch.Tensor | None = None) -> list[OutputRow]:
    rows, apart = compare_outputs("float16", outputs_of(reference, mask), outputs_of(low, mask))
    assert apart == []
    return rows


def kl(reference: np.ndarray, low: np.ndarray) -> float:
    """Sum over rows of KL(reference || low) in nats, by the definition."""
    p, q = (np.exp(x - x.max(-1, keepdims=True)) for x in (reference, low))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    return float((p * np.log(p / q)).sum())


def test_errors_decisions_and_divergence_are_those_of_numpy() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(3, 5, 7, generator=generator)
    low = reference + 0.3 * torch.randn(3, 5, 7, generator=generator)
    (row,) = compare(CausalLMOutput(logits=reference), CausalLMOutput(logits=low))
    a, b = low.double().numpy(), reference.double().numpy()
    assert (row.port, row.elements, row.nonfinite) == ("output['logits']", 105, 0)
    assert row.relative_error == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b), rel=1e-9)
    assert (row.decisions, row.changed) == (15, int((a.argmax(-1) != b.argmax(-1)).sum()))
    assert row.kl_rows == 15
    assert row.kl_sum == pytest.approx(kl(b, a), rel=1e-6)


def test_padding_is_no_decision() -> None:
    reference = torch.eye(4).reshape(1, 4, 4)
    mask = torch.tensor([[1, 1, 0, 0]])
    (row,) = compare({"logits": reference}, {"logits": reference.flip(-1)}, mask)
    assert (row.decisions, row.changed, row.elements) == (2, 2, 16)


def test_nan_and_masked_scores() -> None:
    reference = torch.tensor([[0.0, 1.0, -math.inf], [2.0, 1.0, 0.0]])
    low = torch.tensor([[0.0, 1.0, -math.inf], [math.nan, 1.0, 0.0]])
    (row,) = compare({"logits": reference}, {"logits": low})
    assert (row.elements, row.nonfinite) == (5, 1)  # the mask is meant
    assert (row.decisions, row.changed, row.kl_rows) == (2, 1, 0)


def test_masks_at_the_lowest_value_of_each_dtype_are_the_same_mask() -> None:
    reference = torch.tensor([[3.0, 4.0, 0.0, 0.0]])
    low = torch.tensor([[3.0, 4.5, 0.0, 0.0]], dtype=torch.float16)
    reference[0, 3], low[0, 3] = torch.finfo(torch.float32).min, torch.finfo(torch.float16).min
    (row,) = compare({"hidden": reference}, {"hidden": low})
    assert (row.elements, row.nonfinite) == (3, 0)
    assert row.relative_error == pytest.approx(0.5 / 5)
    (alike,) = compare({"hidden": reference}, {"hidden": reference.clone()})  # as an autocast's float32 output is
    assert (alike.elements, alike.reference_squares) == (3, 25.0)


def test_a_mask_that_became_infinite_or_a_number_is_off() -> None:
    reference = torch.tensor([[1.0, torch.finfo(torch.float32).min]])
    (infinite,) = compare({"hidden": reference}, {"hidden": torch.tensor([[1.0, -math.inf]], dtype=torch.float16)})
    assert infinite.nonfinite == 1
    (lost,) = compare({"hidden": reference}, {"hidden": torch.tensor([[1.0, 0.0]], dtype=torch.float16)})
    assert lost.relative_error == pytest.approx(1.0)


def test_integers_and_bools_are_decisions() -> None:
    rows = compare(
        (torch.tensor([1, 2, 3]), torch.tensor([True, False])), (torch.tensor([1, 5, 3]), torch.tensor([True, True]))
    )
    assert [(row.decisions, row.changed, row.relative_error) for row in rows] == [(3, 1, 0.0), (2, 1, 0.0)]


def test_complex_outputs_are_compared_as_pairs() -> None:
    reference = torch.tensor([3 + 4j, 0j])
    (row,) = compare(reference, reference * 1.1)
    assert row.elements == 4
    assert row.relative_error == pytest.approx(0.1, rel=1e-6)


def test_an_empty_output_has_nothing_to_compare() -> None:
    assert compare(torch.zeros(0, 4), torch.zeros(0, 4)) == []
    assert compare(None, None) == []


@pytest.mark.parametrize("low", [(torch.ones(3),), (torch.ones(2), torch.ones(3)), (torch.ones(2) * 1j, torch.ones(2))])
def test_what_is_missing_or_of_another_shape_is_named(low: Any) -> None:
    reference = (torch.ones(2), torch.ones(2))
    rows, apart = compare_outputs("float16", outputs_of(reference, None), outputs_of(low, None))
    assert len(rows) + len(apart) == 2
    assert apart


def test_an_output_that_the_model_overwrites_is_kept_as_it_was() -> None:
    state = torch.ones(2)
    kept = outputs_of(state, None)
    state.zero_()
    assert kept.tensors["output"].tolist() == [1.0, 1.0]
    assert kept.nbytes == 8


@pytest.mark.parametrize(
    ("port", "shape", "expected"),
    [
        ("output['logits']", (2, 3), True),
        ("output.scores", (2, 3), True),
        ("output['logits']", (3,), False),
        ("output['logits']", (3, 1), False),
        ("output['hidden_states'][0]", (2, 3), False),
    ],
)
def test_scores_are_known_by_name_and_shape(port: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_scores(port, torch.zeros(shape)) is expected


def test_many_batches_add_up_to_one() -> None:
    generator = torch.Generator().manual_seed(1)
    reference = torch.randn(6, 4, 5, generator=generator)
    low = reference.half().float()
    (whole,) = compare({"logits": reference}, {"logits": low})
    total: OutputRow | None = None
    for a, b in zip(reference.split(1), low.split(1), strict=True):
        (row,) = compare({"logits": a}, {"logits": b})
        total = row if total is None else total + row
    assert total is not None
    assert (total.elements, total.decisions, total.changed) == (whole.elements, whole.decisions, whole.changed)
    assert total.kl_sum == pytest.approx(whole.kl_sum)
    assert total.relative_error == pytest.approx(whole.relative_error)

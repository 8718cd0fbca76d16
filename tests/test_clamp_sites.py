"""The hooks of a clamp, and the same as code to paste: one gives bit by bit what the other gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from overflow_lab.remedies.clamp.sites import Site, Tally, clamp_model, snippet

LIMIT = 64480.0


class Gives(nn.Module):
    """Returns its input, which is half, in one of the ways in which modules return things."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        other = x.clone()
        return {
            "tensor": x,
            "tuple": (other, x),
            "list": [x, other],
            "dict": {"y": x, "z": other},
            "model output": BaseModelOutput(last_hidden_state=x, attentions=(other,)),
            "masked": x if mask is None else x + mask,
        }[self.way]


class Outer(nn.Module):
    """Calls its parts in every way: by position, by keyword, with an argument left out."""

    def __init__(self, *ways: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Gives(way) for way in ways)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        return [part(x.clone()) if mask is None else part(x.clone(), mask=mask.clone()) for part in self.parts]


def values() -> torch.Tensor:
    inf = float("inf")
    return torch.tensor([[inf, -inf, float("nan"), 65504.0, -65504.0, 64480.0, 1.5, -0.0, 6e-8]]).half()


def flat(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in torch.utils._pytree.tree_leaves(value) if isinstance(tensor, torch.Tensor)]


def pasted(model: nn.Module, sites: list[Site], limit: float = LIMIT, dtype: str = "float16") -> nn.Module:
    """Return the model with the hooks of the snippet, which is given the model and torch alone."""
    exec(compile(snippet(sites, limit, dtype), "pasted", "exec"), {"model": model, "torch": torch})
    return model


ALL = [
    ("tensor", Site("parts.0", "output"), 0, 1),
    ("tuple", Site("parts.0", "output[1]"), 1, 2),
    ("list", Site("parts.0", "output[0]"), 0, 2),
    ("dict", Site("parts.0", "output['y']"), 0, 2),
    ("model output", Site("parts.0", "output['last_hidden_state']"), 0, 2),
    ("tensor", Site("parts.0", "input[0]"), 0, 1),
]


@pytest.mark.parametrize(("way", "site", "place", "count"), ALL)
def test_only_the_tensor_at_the_port_is_clamped(way: str, site: Site, place: int, count: int) -> None:
    found = flat(clamp_model(Outer(way), [site], LIMIT)(values()))
    expected = values()
    expected[0, :5] = torch.tensor([LIMIT, -LIMIT, float("nan"), LIMIT, -LIMIT])
    assert len(found) == count
    for number, tensor in enumerate(found):
        wanted = expected if number == place else values()
        assert torch.equal(tensor.view(torch.int16), wanted.view(torch.int16)), number


@pytest.mark.parametrize(("way", "site", "place", "count"), ALL)
def test_the_code_to_paste_gives_the_same_bits(way: str, site: Site, place: int, count: int) -> None:
    ours, theirs = clamp_model(Outer(way), [site], LIMIT), pasted(Outer(way), [site])
    for a, b in zip(flat(ours(values())), flat(theirs(values())), strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_an_argument_by_keyword_is_clamped_and_may_be_missing() -> None:
    site = Site("parts.0", "input['mask']")
    mask = torch.full((1, 9), -float("inf")).half()
    x = torch.zeros(1, 9).half()
    ours, theirs = clamp_model(Outer("masked"), [site], LIMIT), pasted(Outer("masked"), [site])
    for model in (ours, theirs):
        assert torch.equal(flat(model(x, mask))[0], torch.full((1, 9), -LIMIT).half())
    assert torch.equal(flat(ours(x))[0], x)
    assert mask.isinf().all(), "what the caller holds is not written to"


def test_an_output_that_is_missing_is_left_as_it_is() -> None:
    model = clamp_model(Outer("list", "dict"), [Site("parts.0", "output[5]"), Site("parts.1", "output['no']")], LIMIT)
    for tensor in flat(model(values())):
        assert torch.equal(tensor.view(torch.int16), values().view(torch.int16))


def test_a_model_output_keeps_its_class_and_its_attributes_in_step() -> None:
    site = Site("parts.0", "output['last_hidden_state']")
    (made,) = clamp_model(Outer("model output"), [site], LIMIT)(values())
    assert type(made) is BaseModelOutput
    assert made.last_hidden_state is made["last_hidden_state"] is made[0]
    assert not made.last_hidden_state.isinf().any()


def test_many_sites_are_pasted_as_loops_and_each_kind_of_port_has_its_hook() -> None:
    sites = [
        Site("parts.0", "output"),
        Site("parts.1", "output"),
        Site("parts.2", "output[1]"),
        Site("", "output[0]"),
    ]
    ways = ("tensor", "tensor", "tuple")
    ours, theirs = clamp_model(Outer(*ways), sites, LIMIT), pasted(Outer(*ways), sites)
    for a, b in zip(flat(ours(values())), flat(theirs(values())), strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))
    text = snippet(sites, LIMIT, "float16")
    assert text.count("def clamp_output") == 3
    assert text.count("for path in [") == 1


def test_the_code_to_paste_says_what_share_of_the_largest_value_the_limit_is() -> None:
    assert "LIMIT = 65504.0  # the largest value of float16" in snippet([Site("a", "output")], 65504.0, "float16")
    assert "# 0.5 times the largest value of float16" in snippet([Site("a", "output")], 32752.0, "float16")


def test_a_hostile_module_name_is_a_string_in_the_code_to_paste() -> None:
    name = 'a"]\nimport os\n["'
    model = nn.Module()
    model.add_module(name, nn.Identity())
    pasted(model, [Site(name, "output")])
    assert len(model.get_submodule(name)._forward_hooks) == 1


@pytest.mark.parametrize("port", ["output[0][1]", "input", "output.key_cache[0]", "input['a']['b']"])
def test_what_lies_deeper_is_out_of_reach_and_said_to_be(port: str) -> None:
    assert not Site("m", port).can_be_clamped


@pytest.mark.parametrize(("_way", "site", "_place", "_count"), ALL)
def test_what_a_hook_reaches_is_said_to_be_within_reach(_way: str, site: Site, _place: int, _count: int) -> None:
    assert site.can_be_clamped


def test_changed_values_are_counted_by_site_over_all_calls() -> None:
    tally = Tally()
    first, second = Site("parts.0", "output"), Site("parts.1", "output")
    model = clamp_model(Outer("tensor", "tensor"), [first, second], LIMIT, tally)
    model(values())
    model(values().abs().clamp(max=1.0))
    assert tally.of(first) == tally.of(second) == 4, "two infinities and two beyond the limit; NaN is not one"
    assert tally.of(Site("parts.9", "output")) == 0


def test_a_copy_of_a_clamped_model_is_clamped_too() -> None:
    model = copy.deepcopy(clamp_model(Outer("tensor"), [Site("parts.0", "output")], LIMIT))
    assert not flat(model(values()))[0].isinf().any()

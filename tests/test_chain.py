"""Explanation chains of real small scans: from what reaches the output back to the operation that began it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import overflow_lab
from overflow_lab.analysis import Link, Verdict
from tests.modules import Step, chain

X = torch.linspace(0.5, 2.0, 8).reshape(2, 4)


def linear(value: float, size: int = 4) -> nn.Linear:
    made = nn.Linear(size, size, bias=False)
    nn.init.constant_(made.weight, value)
    return made


def verdict(model: nn.Module, x: torch.Tensor = X, *, precision: str = "float16", level: str = "operation") -> Verdict:
    return overflow_lab.scan(model.eval(), (x,), precisions=[precision], level=level).verdicts[precision]


def roles(links: tuple[Link, ...]) -> list[str]:
    return [link.role for link in links]


def place(link: Link) -> tuple[str | None, str | None]:
    return (link.module, link.op)


class Attention(nn.Module):
    """Scores that do not fit, softmaxed to NaN, and projected: a hook sees NaN in the projection's input first."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = linear(60.0, 8), linear(60.0, 8), linear(0.1, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, length, 8]."""
        scores = self.q(x) @ self.k(x).mT
        return self.o(torch.softmax(scores, -1) @ x)  # type: ignore[no-any-return]


class Shifted(nn.Module):
    """Divides by a variance that the cast to float16 makes infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("variance", torch.full((4,), 1e6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the shape of `x`."""
        return x / torch.sqrt(self.variance) * 1e3  # type: ignore[arg-type]


def test_an_overflow_inside_attention_leads_from_the_output_through_nan_to_the_score() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Attention())
    found = verdict(module, torch.randn(2, 5, 8) * 3)
    assert roles(found.chain) == ["effect", "carrier", "origin"]
    effect, carrier, origin = found.chain
    assert "of the output is NaN or inf" in effect.text
    assert (place(carrier), carrier.text) == (("0.o", None), "its output is the first with NaN")
    assert place(origin) == ("0", "aten.bmm")
    assert found.origin is not None
    assert place(origin) == (found.origin.module, found.origin.op)
    assert origin.text.startswith("makes infinities: ")
    assert origin.text.endswith("does not fit, the limit is 65,504")
    assert origin.source.startswith("test_chain.py:")
    assert origin.source.endswith(" in forward")


def half_clamp(x: torch.Tensor) -> torch.Tensor:
    """Clamp in half precision alone, as T5 does."""
    return x.clamp(-6e4, 6e4) if x.dtype == torch.float16 else x


def test_a_clamp_that_restores_a_wrong_value_is_the_harm() -> None:
    found = verdict(chain(lambda x: x * 7e4, half_clamp))
    assert roles(found.chain) == ["effect", "harm", "origin"]
    assert place(found.chain[1]) == ("1", "aten.clamp")
    assert "clamps infinities to finite values, which are wrong" in found.chain[1].text
    assert "140,000 does not fit, the limit is 65,504" in found.chain[2].text


def test_a_value_that_a_clamp_of_the_models_own_makes_right_again_is_absorbed() -> None:
    found = verdict(chain(lambda x: x * 7e4, lambda x: x.clamp(-6e4, 6e4)))
    assert "harm" not in roles(found.chain)


def test_a_choice_that_infinities_change_is_the_harm() -> None:
    model = chain(lambda x: x * 7e4, lambda x: nn.functional.one_hot(x.argmax(-1), 4).float())
    harm = verdict(model).chain[1]
    assert (harm.role, place(harm)) == ("harm", ("1", "aten.argmax"))
    assert "decides otherwise" in harm.text


def test_a_buffer_that_does_not_fit_is_named_with_the_tensor_and_without_a_line_of_code() -> None:
    origin = verdict(Shifted()).chain[-1]
    assert (origin.role, place(origin), origin.source) == ("origin", ("", "aten._to_copy"), "")
    assert "1,000,000 does not fit" in origin.text
    assert "`variance`" in origin.text


def test_a_zero_that_should_not_be_one_is_said() -> None:
    found = verdict(chain(lambda x: (x - x) / ((x - x).abs() + 1e-12)))
    assert found.mechanism == "eps-flushed"
    assert found.chain[-1].text == "makes NaN, since an operand is zero that float32 holds apart from zero"


def test_rounding_leads_over_the_cancellation_that_lays_it_bare_to_the_operation_with_its_share() -> None:
    model = nn.Sequential(linear(1.0), Step(lambda x: x + 1000.0), Step(lambda x: x - 1000.0))
    found = verdict(model, precision="bfloat16")
    assert found.verdict == "precision"
    assert roles(found.chain) == ["effect", "amplifier", "origin"]
    assert found.chain[0].text.startswith("the output is off by ")
    assert place(found.chain[1]) == ("2", "aten.sub")
    assert place(found.chain[2]) == ("1", "aten.add")
    assert "of the error alone: off by " in found.chain[2].text


def test_a_missing_kernel_says_what_the_scan_did_instead() -> None:
    links = verdict(chain(lambda x: torch.fft.rfft(x).abs())).chain
    assert roles(links) == ["effect", "origin"]
    assert "did the operation in float32 and went on" in links[0].text
    assert place(links[1]) == ("0", "aten._fft_r2c")
    assert "Unsupported dtype Half" in links[1].text


def test_without_a_shadow_run_the_chain_tells_what_module_borders_show() -> None:
    torch.manual_seed(0)
    found = verdict(nn.Sequential(Attention()), torch.randn(2, 5, 8) * 3, level="module")
    assert roles(found.chain) == ["effect", "carrier", "origin"]
    assert place(found.chain[1]) == ("0.o", None)
    assert place(found.chain[2]) == ("0", None)


def test_what_is_right_needs_no_explanation() -> None:
    assert verdict(nn.Linear(4, 4)).chain == ()


@pytest.mark.parametrize("level", ["operation", "module"])
def test_every_finding_has_a_short_chain_that_is_json_and_ends_in_its_origin(level: str) -> None:
    model = chain(lambda x: x * 7e4, lambda x: half_clamp(x) / 6e4, lambda x: x * 9e4, lambda x: x / 1e9)
    scan = overflow_lab.scan(model, (X,), precisions=["float16"], level=level)
    made = json.loads(json.dumps(scan.to_dict(), allow_nan=False))
    assert made["verdicts"]["float16"]["chain"] == made["findings"][0]["chain"]
    for finding in made["findings"]:
        assert 2 <= len(finding["chain"]) <= 6
        assert finding["chain"][0]["role"] == "effect"
        assert finding["chain"][-1]["module"] == finding["origin"]["module"]

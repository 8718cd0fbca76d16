"""Module islands in place: weights, ties, borders, caches, and that they can be undone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from overflow_lab.capture.precisions import parse_precision, prepare
from overflow_lab.recording import OperationRow
from overflow_lab.remedies.islands.apply import apply, mended
from overflow_lab.remedies.islands.keep import keep
from overflow_lab.remedies.islands.members import Member
from overflow_lab.scan import scan_subject, subject_of
from overflow_lab.subjects.demo import ANSWERS, PROMPTS, folder
from overflow_lab.subjects.module import from_module
from tests import island_models as models
from tests import tiny_models

HALVES = [torch.float16, torch.bfloat16]


def cast(model: nn.Module, dtype: torch.dtype = torch.float16) -> Any:
    return copy.deepcopy(model).to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_inside_all_is_as_in_float32_on_the_uncast_weights(dtype: torch.dtype) -> None:
    original = models.seeded(models.Layers, 1.0)
    low, x = cast(original, dtype), models.values(2, 5, 8).to(dtype)
    keep(low, original, ["layers.1"], dtype)
    with torch.no_grad():
        got, wanted = low.layers[1](x), original.get_submodule("layers.1")(x.float())
    assert torch.equal(got, wanted.to(dtype))
    assert {p.dtype for p in low.layers[1].parameters()} == {torch.float32}
    assert {p.dtype for p in low.layers[2].parameters()} == {dtype}


def test_the_output_of_an_open_island_stays_in_float32() -> None:
    original = models.seeded(models.Layers, 1.0)
    low, x = cast(original), models.values(2, 5, 8).half()
    keep(low, original, ["layers.0", "layers.1"], torch.float16, open_paths=["layers.1"])
    with torch.no_grad():
        assert low.layers[0](x).dtype == torch.float16
        assert torch.equal(low.layers[1](x), original.get_submodule("layers.1")(x.float()))


def test_keyword_and_nested_inputs_and_outputs_cross_the_border() -> None:
    class Nested(nn.Module):
        def forward(self, given: dict[str, Any], *, more: tuple[torch.Tensor, ...]) -> Any:
            seen.update(a=given["a"].dtype, more=more[0].dtype, ids=given["ids"].dtype)
            return {"sum": given["a"] + more[0], "ids": given["ids"], "parts": [more[0], None]}

    seen: dict[str, torch.dtype] = {}
    model = nn.ModuleDict({"part": Nested()})
    keep(model, copy.deepcopy(model), ["part"], torch.float16)
    half = torch.ones(2, dtype=torch.float16)
    out = model["part"]({"a": half, "ids": torch.arange(2)}, more=(half,))
    assert seen == {"a": torch.float32, "more": torch.float32, "ids": torch.int64}
    assert (out["sum"].dtype, out["ids"].dtype, out["parts"][0].dtype) == (torch.float16, torch.int64, torch.float16)
    assert out["parts"][1] is None


def test_a_tied_weight_outside_stays_as_it_is() -> None:
    original = models.seeded(models.Tied)
    plain, low, ids = cast(original), cast(original), torch.arange(6)[None]
    assert low.head.weight is low.embed.weight
    keep(low, original, ["head"], torch.float16)
    assert low.embed.weight.dtype == torch.float16
    assert low.head.weight.dtype == torch.float32
    assert torch.equal(low.head.weight, original.get_parameter("embed.weight"))
    assert torch.equal(low.embed(ids), plain.embed(ids))


def test_ties_within_an_island_hold() -> None:
    original = nn.ModuleDict({"all": models.seeded(models.Tied)})
    low = cast(original)
    keep(low, original, ["all"], torch.float16)
    assert low["all"].head.weight is low["all"].embed.weight


def test_a_module_that_is_used_inside_and_outside_is_taken_twice() -> None:
    original = hf.AutoModelForSeq2SeqLM.from_pretrained(folder()).eval()
    low = cast(original)
    outside = low.decoder.embed_tokens
    before = outside(torch.arange(5))
    keep(low, original, ["encoder"], torch.float16)
    assert {p.dtype for p in low.encoder.parameters()} == {torch.float32}
    assert {p.dtype for p in low.decoder.parameters()} == {torch.float16}
    assert low.decoder.embed_tokens is outside
    assert torch.equal(outside(torch.arange(5)), before)
    assert low.lm_head.weight.dtype == torch.float16


def test_buffers_have_their_uncast_values_and_are_the_islands_own() -> None:
    original = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    original[1].running_var.fill_(2e5)  # type: ignore[operator]
    low = cast(original)
    assert torch.isinf(low[1].running_var).all()
    keep(low, original, ["1"], torch.float16)
    assert torch.equal(low[1].running_var, torch.full((4,), 2e5))
    low.train()(torch.randn(3, 4).half())
    assert torch.equal(original[1].running_var, torch.full((4,), 2e5))  # type: ignore[arg-type]


def test_an_lstm_can_be_an_island() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.lstm(x)[0])

    original = models.seeded(Recurrent)
    low, x = cast(original), models.values(2, 5, 8).half()
    keep(low, original, ["lstm"], torch.float16)
    with torch.no_grad():
        assert torch.equal(low.lstm(x)[0], original.get_submodule("lstm")(x.float())[0].half())


def test_undone_the_model_is_as_it_was() -> None:
    original = models.seeded(models.Tied)
    low, ids = cast(original), torch.arange(6)[None]
    before = dict(low.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        expected = low(ids)
        for step in apply(low, original, frozenset({Member("layer"), Member("head")}), parse_precision("float16")):
            step()
        got = low(ids)
    assert dict(low.named_parameters(remove_duplicate=False)).keys() == before.keys()
    assert all(p is before[name] for name, p in low.named_parameters(remove_duplicate=False))
    assert (
        torch.equal(
            got,
            expected,
        )
        or (torch.isnan(got) == torch.isnan(expected)).all()
    )
    assert not any("forward" in vars(module) for module in low.modules())


def test_a_copy_of_a_mended_model_is_a_model_of_its_own() -> None:
    original = models.seeded(models.Layers, 1.0)
    low, x = cast(original), models.values(2, 8).half()
    keep(low, original, ["layers.1"], torch.float16)
    made = copy.deepcopy(low)
    with torch.no_grad():
        for p in low.parameters():
            p.zero_()
        assert made(x).abs().max() > 0


def test_autocast_is_off_inside_and_on_again_behind() -> None:
    seen: list[bool] = []

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return x * 1e5

    model = nn.Sequential(nn.Linear(4, 4), Looks(), nn.Identity())
    keep(model, model, ["1"], None)
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(torch.ones(2, 4))
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False]
    assert out.dtype == torch.float32  # under autocast nothing is narrowed at the border
    assert torch.isfinite(out).all()


def test_autocast_is_on_again_after_the_island_raises() -> None:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            raise KeyboardInterrupt

    model = nn.Sequential(Raises())
    keep(model, model, ["0"], None)
    with torch.autocast("cpu", dtype=torch.float16):
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1))
        assert torch.is_autocast_enabled("cpu")


def test_generation_by_beams_gives_the_texts_of_float32_with_an_island() -> None:
    subject = subject_of("demo", None, {}, None)
    fixed = mended(subject, frozenset({Member("encoder")}), "float16")
    tokenizer = hf.AutoTokenizer.from_pretrained(folder())
    model: Any = prepare(fixed, parse_precision("float16")).model
    inputs = tokenizer(list(PROMPTS), padding=True, return_tensors="pt")
    told = model.generate(**inputs, num_beams=4, max_new_tokens=12)
    assert tuple(tokenizer.batch_decode(told, skip_special_tokens=True)) == ANSWERS


def test_a_cache_of_keys_and_values_stays_the_callers_own() -> None:
    original = tiny_models.build("llama").eval()
    low = cast(original)
    keep(low, original, ["model.layers.1.self_attn"], torch.float16)
    ids = torch.tensor([[1, 5, 9, 14]])
    cached = low.generate(input_ids=ids, max_new_tokens=6, do_sample=False, use_cache=True)
    plain = low.generate(input_ids=ids, max_new_tokens=6, do_sample=False, use_cache=False)
    assert torch.equal(cached, plain)


def test_the_shadow_run_sees_into_an_island() -> None:
    subject = from_module(models.seeded(models.Layers), {"x": models.values(2, 5, 8)})
    members = frozenset({Member("layers.1.norm"), Member("layers.3.norm")})
    found = scan_subject(mended(subject, members, "float16"), ["float16"], level="operation")
    rows = [row for row in found.recording.of(OperationRow) if row.precision == "float16"]
    squares = [row for row in rows if (row.module, row.op) == ("layers.1.norm", "aten.pow")]
    assert [row.dtype for row in squares] == ["float32"]
    assert squares[0].absmax > 65504
    assert squares[0].nonfinite == 0
    assert 0 < squares[0].error < 0.01  # what it inherits from float16 before it

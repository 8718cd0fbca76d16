"""Precisions: their names, and models and inputs brought into them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from overflow_lab.capture.precisions import (
    device_of,
    kept_in_float32,
    parse_precision,
    parse_precisions,
    prepare,
)
from overflow_lab.errors import UsageError
from overflow_lab.subjects import Batch, Subject
from overflow_lab.subjects.module import from_module
from tests.modules import Calling

LONG = {"fp16": "float16", "bf16": "bfloat16", "float16": "float16", "bfloat16": "bfloat16"}
CASTS = {"": "loader", "-to": "to", "-autocast": "autocast"}


@pytest.mark.parametrize(("short", "way"), list(itertools.product(LONG, CASTS)))
def test_every_name_is_understood_and_said_in_full(short: str, way: str) -> None:
    precision = parse_precision(f" {short.upper()}{way} ")
    assert (precision.name, precision.dtype, precision.cast) == (LONG[short] + way, LONG[short], CASTS[way])
    assert precision.torch_dtype() is getattr(torch, LONG[short])


@pytest.mark.parametrize("name", ["", "fp32-to", "fp16-", "-to", "fp16-cast", "int8", "tf32", "float8_e4m3fn", "half"])
def test_anything_else_is_refused_in_one_line_with_the_choices(name: str) -> None:
    with pytest.raises(UsageError, match="choose among float32, float16, bfloat16") as caught:
        parse_precision(name)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=12))
def test_no_text_does_anything_but_parse_or_be_refused(name: str) -> None:
    refused = ""
    try:
        parse_precision(name)
    except UsageError as error:
        refused = str(error)
    assert refused == "" or repr(name) in refused


def test_a_format_that_is_only_forecast_is_said_to_be_so() -> None:
    with pytest.raises(UsageError, match="forecast in every report"):
        parse_precision("float8_e5m2")


def test_repeated_names_are_left_out() -> None:
    names = [p.name for p in parse_precisions(["bf16", "fp32", "bfloat16", "fp16-to"])]
    assert names == ["bfloat16", "float32", "float16-to"]


def subject(model: nn.Module) -> Subject:
    return from_module(model, {"x": torch.ones(2, 4)})


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float16-to", "bfloat16-autocast"])
def test_the_users_module_is_as_it_was_and_the_copy_is_cast(name: str) -> None:
    model = Calling(lambda m, x: m.lin(x))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    prepared = prepare(subject(model), parse_precision(name))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert prepared.model is not model
    weights = torch.float32 if "autocast" in name else parse_precision(name).torch_dtype()
    assert {p.dtype for p in prepared.model.parameters()} == {weights}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_inputs_are_copies_and_only_floats_are_cast() -> None:
    prepared = prepare(subject(nn.Linear(4, 4)), parse_precision("fp16"))
    given_inputs: dict[str, Any] = {
        "f": torch.ones(2),
        "i": torch.ones(2, dtype=torch.long),
        "b": [torch.ones(1, dtype=torch.bool)],
    }
    cast = prepared.inputs(given_inputs)
    assert (cast["f"].dtype, cast["i"].dtype, cast["b"][0].dtype) == (torch.float16, torch.int64, torch.bool)
    cast["i"].zero_()
    assert given_inputs["i"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_float32_widens_narrow_inputs_and_leaves_wide_ones(dtype: torch.dtype, expected: torch.dtype) -> None:
    prepared = prepare(subject(nn.Linear(4, 4)), parse_precision("fp32"))
    assert prepared.inputs(torch.ones(2, dtype=dtype)).dtype is expected


def test_only_autocast_precisions_run_under_autocast_whatever_is_around_them() -> None:
    model = subject(nn.Linear(4, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with prepare(model, parse_precision("fp32")).context():
            assert not torch.is_autocast_enabled("cpu")
        with prepare(model, parse_precision("fp16-autocast")).context():
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") is torch.float16
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_modules_that_stay_in_float32_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2))).half()
    model[1][1].float()  # type: ignore[index]
    assert kept_in_float32(model) == ("1.1",)
    assert kept_in_float32(nn.ReLU()) == ()


def native(given: Subject) -> Subject:
    """Return a subject whose products the CPU does itself, on every host."""
    return dataclasses.replace(given, kernels="native")


def test_the_row_says_how_the_precision_was_executed() -> None:
    details = {
        name: prepare(native(subject(nn.Linear(2, 2))), parse_precision(name)).row.detail
        for name in ("fp32", "fp16-to")
    }
    assert details == {"fp32": "float32 throughout: the reference", "fp16-to": "cast by .to(float16)"}
    assert "torch.autocast(dtype=bfloat16)" in prepare(subject(nn.ReLU()), parse_precision("bf16-autocast")).row.detail


def test_buffers_that_the_loader_alone_leaves_in_float32_are_named_with_the_way_to_cast_them() -> None:
    model = nn.Module()
    for layer in ("a", "b"):
        model.add_module(layer, nn.Module())
        model.get_submodule(layer).register_buffer("inv_freq", torch.ones(2))
    loads = Subject("m", "folder", lambda dtype: model, (Batch(),), loader_casts=True)
    detail = prepare(native(loads), parse_precision("fp16")).row.detail
    assert detail.endswith("2 buffers (inv_freq) stayed in float32, which -p float16-to casts")
    assert "buffer" not in prepare(loads, parse_precision("fp16-to")).row.detail


def test_a_model_without_parameters_is_where_its_buffers_are() -> None:
    model = nn.ReLU()
    assert device_of(model) == torch.device("cpu")
    model.register_buffer("b", torch.empty(1, device="meta"))
    assert device_of(model) == torch.device("meta")

"""Models whose weights lie on disk: a scan of them is that of the model in memory, and touches nothing."""

from __future__ import annotations

import dataclasses
import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import overflow_lab
from overflow_lab.analysis.forecast import forecast
from overflow_lab.cli.app import run
from overflow_lab.errors import UsageError
from overflow_lab.formats import FORMATS
from overflow_lab.recording import (
    AnswerRow,
    BlindSpotRow,
    CastRow,
    ErrorRow,
    OutputRow,
    PrecisionRow,
    RangeRow,
    Recording,
    TensorRow,
)
from overflow_lab.subjects.offload import is_offloaded, loading_options, resolver, size_of
from tests import tiny_models

pytest.importorskip("accelerate")

SEEN = (TensorRow, CastRow, PrecisionRow, RangeRow, ErrorRow, OutputRow, AnswerRow)


def seen(recording: Recording) -> list[Any]:
    """What was seen, without how long it took and what is said of the way of loading."""
    return [_plain(row) for row in recording.rows if isinstance(row, SEEN)]


def _plain(row: Any) -> Any:
    if isinstance(row, PrecisionRow):
        return dataclasses.replace(row, detail="")
    if isinstance(row, (TensorRow, RangeRow)):  # sums depend on how a tensor lies in memory, in their last bits
        total, squares = (float(f"{value:.9g}") for value in (row.range.sum, row.range.sum_of_squares))
        return dataclasses.replace(row, range=dataclasses.replace(row.range, sum=total, sum_of_squares=squares))
    return row


def half(folder: Path, name: str = "llama") -> str:
    """A checkpoint in bfloat16, in several files."""
    tiny_models.build(name).bfloat16().save_pretrained(folder, max_shard_size="20KB")
    tiny_models.build_tokenizer().save_pretrained(folder)
    return str(folder)


def scan(folder: str, **options: Any) -> Recording:
    chosen = {
        "texts": ("w5 w6 w7", "w8", "w9 w9"),
        "batch_size": 2,
        "max_new_tokens": 3,
        "num_beams": 2,
        "level": "module",
    }
    return overflow_lab.scan(folder, **{**chosen, **options}).recording


@pytest.mark.parametrize("name", ["llama", "gpt2", "bart"])
@pytest.mark.parametrize("memory", ["0", "30kB"])
def test_a_model_on_disk_is_scanned_as_one_in_memory(tmp_path: Path, name: str, memory: str) -> None:
    folder = half(tmp_path / "m", name)
    expected = scan(folder)
    found = scan(folder, device_map="auto", max_memory=memory)
    assert found.complete
    assert seen(found) == seen(expected)
    assert any("partly on disk" in row.reason for row in found.of(BlindSpotRow))


def test_weights_that_the_loader_joins_are_read_joined(tmp_path: Path) -> None:
    """transformers stacks a mixture's experts; on disk they lie otherwise than in memory, and products round so."""
    folder = half(tmp_path / "m", "mixtral")
    expected, found = scan(folder), scan(folder, device_map="auto", max_memory="0")
    pairs = list(zip(expected.of(RangeRow), found.of(RangeRow), strict=True))
    assert pairs
    for one, other in pairs:
        assert one.range.count == other.range.count
        assert one.range.absmax == pytest.approx(other.range.absmax, rel=1e-2)
    assert [row.name for row in expected.of(TensorRow)] == [row.name for row in found.of(TensorRow)]


def test_weights_that_are_not_safetensors_are_written_once_more_and_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "m"
    model = tiny_models.build("llama")
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    options = {"generate": False, "allow_pickle": True, "texts": None}
    expected = scan(str(folder), **options)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = scan(str(folder), device_map="auto", max_memory="0", **options)
    gc.collect()
    assert seen(found) == seen(expected)
    assert [place.name for place in tmp_path.iterdir()] == ["m"]


def test_a_module_that_its_user_has_offloaded_is_scanned_and_left_as_it_is(tmp_path: Path) -> None:
    from accelerate import disk_offload

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2)).eval()
    inputs = torch.randn(3, 6) * 1e4
    expected = overflow_lab.scan(model, (inputs,), level="module").recording
    disk_offload(model, str(tmp_path / "off"), execution_device=torch.device("cpu"))
    assert is_offloaded(model)
    output, hooks = model(inputs), [id(getattr(m, "_hf_hook", None)) for m in model.modules()]
    found = overflow_lab.scan(model, (inputs,)).recording
    assert seen(found) == seen(expected)
    assert torch.equal(model(inputs), output)
    assert [id(getattr(m, "_hf_hook", None)) for m in model.modules()] == hooks
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_values_are_read_where_the_innermost_hook_has_them(tmp_path: Path) -> None:
    from accelerate import disk_offload

    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    disk_offload(model, str(tmp_path / "off"), execution_device=torch.device("cpu"))
    values = resolver(model)
    for name, parameter in model.named_parameters():
        assert parameter.is_meta
        assert torch.equal(values(name, parameter), weights[name])
    stranger = torch.empty(2, device="meta")
    assert values("elsewhere", stranger) is stranger


def test_what_needs_all_weights_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = half(tmp_path / "m")
    disk = {"device_map": "auto", "max_memory": "0"}
    with pytest.raises(UsageError, match="the level operation needs all weights"):
        scan(folder, level="operation", **disk)
    with pytest.raises(UsageError, match="float16-to casts a model in memory"):
        scan(folder, precisions=["float16-to"], **disk)
    with pytest.raises(UsageError, match="add --device-map auto"):
        scan(folder, max_memory="1GB")
    with pytest.raises(UsageError, match="'sequential'; choose auto"):
        scan(folder, device_map="sequential")
    with pytest.raises(UsageError, match="'much' is no size"):
        scan(folder, device_map="auto", max_memory="much")


def test_without_accelerate_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"overflow-lab\[accelerate\]"):
        loading_options("auto", None, torch.device("cpu"))


@given(st.integers(0, 9999), st.sampled_from([("", 1), ("kB", 1000), ("MB", 10**6), ("GiB", 2**30), ("g", 10**9)]))
def test_sizes_are_decimal_or_binary(number: int, unit: tuple[str, int]) -> None:
    assert size_of(f"{number}{unit[0]}") == size_of(f" {number} {unit[0]} ") == number * unit[1]


def test_a_share_of_what_is_free_is_kept_where_no_size_is_given() -> None:
    from accelerate.utils import get_max_memory

    found = loading_options("auto", None, torch.device("cpu"))
    assert set(found["max_memory"]) == {"cpu"}
    assert 0.2 < found["max_memory"]["cpu"] / get_max_memory()["cpu"] < 0.6


# ---- the forecast ----


def test_the_forecast_is_that_of_float32s_own_ranges(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU())
    with torch.no_grad():
        for layer, value in zip(model.parameters(), (100.0, 0.0, 1000.0, 0.0), strict=True):
            layer.fill_(value)
    found = overflow_lab.scan(model, (torch.ones(1, 4),), precisions="forecast").recording
    assert found.header.precisions == ("float32",)
    peaks = {r.module: r.range.absmax or 0.0 for r in found.of(RangeRow) if r.port == "output"}
    made = {one.format: one for one in forecast(found)}
    assert set(made) <= set(FORMATS)
    for name, one in made.items():
        too_large = [module for module, peak in peaks.items() if peak > FORMATS[name].max]
        assert one.beyond == len(too_large)
        assert one.layers == len(peaks)
    assert (made["float16"].module, made["float16"].value) == ("1", peaks["1"])
    assert made["bfloat16"].module == ""


def test_the_command_line_forecasts_a_model_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, report = half(tmp_path / "m"), str(tmp_path / "r.html")
    asked = ["scan", folder, "-p", "forecast", "--device-map", "auto", "--max-memory", "0", "--report", report]
    assert run([*asked, "--recording", str(tmp_path / "r.jsonl"), "--no-generate", "--text", "w5 w6"]) == 0
    shown = capsys.readouterr().out
    assert "forecast   float16        every layer fits" in shown
    assert Path(report).exists()
    assert run([*asked, "--overwrite", "--json", "--no-generate"]) == 0
    assert json.loads(capsys.readouterr().out)["verdicts"] == {}

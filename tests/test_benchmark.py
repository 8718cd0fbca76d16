"""The benchmark: it runs, tells how noisy it was, and its last line is one JSON object of the promised names."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch

from overflow_lab import benchmark
from overflow_lab.benchmark import Work, forward


def tiny() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=32128, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config).eval()


def test_the_last_line_is_one_json_object_of_the_ratios(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [work.name for work in benchmark.WORKS]
    monkeypatch.setattr(benchmark, "WORKS", tuple(Work(name, forward(1, 4)) for name in names))
    monkeypatch.setattr(benchmark, "t5_small", tiny)
    monkeypatch.setattr(benchmark, "weights_ratios", functools.partial(benchmark.weights_ratios, megabytes=1))
    # Both start processes of their own, for half a minute each.
    monkeypatch.setattr(benchmark, "_memory", lambda: [1.0, 3.0, 2.0])
    monkeypatch.setattr(benchmark, "cold_seconds", lambda rounds: [4.0] * rounds)
    with torch.no_grad():
        benchmark.report(1)
    first, *_, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)
    assert "1 rounds" in first
    assert set(figures) >= {*names, *(f"{name}_peer" for name in names), "shadow_bf16_8x128", "shadow_fp16_8x128"}
    assert all(value > 0 for value in figures.values())
    assert (figures["memory_modules_mb"], figures["demo_cold_s"]) == (2.0, 4.0)


def test_watching_takes_nothing_of_the_model_away() -> None:
    model = tiny()
    with torch.no_grad():
        before = forward(1, 4)(model)
        benchmark.watched(model, forward(1, 4))
        after = forward(1, 4)(model)
    assert torch.equal(before.logits, after.logits)  # type: ignore[attr-defined]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

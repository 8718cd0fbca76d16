"""The sample recording with all that a scan of operations and of `generate` adds, and one of a 7B model's size."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from overflow_lab.recording import (
    ErrorRow,
    EventRow,
    NoiseRow,
    OperationRow,
    PrecisionRow,
    RangeRow,
    Recording,
    Row,
    StepRow,
)
from tests.sample_recording import CULPRIT, Modules, sample_recording, t5_modules

LLAMA = (
    *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn"),
    *("post_attention_layernorm", "mlp.gate_proj", "mlp.act_fn", "mlp.up_proj", "mlp.down_proj", "mlp", ""),
)


def with_rows(recording: Recording, rows: Iterator[Row]) -> Recording:
    """Return the recording with further rows at its end."""
    return dataclasses.replace(recording, rows=(*recording.rows, *rows))


def rich_recording() -> Recording:
    """Return the sample with operations, noise floors, and the steps of greedy and beam search."""
    return with_rows(sample_recording(texts=True), _rich_rows())


def _rich_rows() -> Iterator[Row]:
    modules = [path for path, *_ in t5_modules()]
    yield EventRow("float16", "bad", CULPRIT, "aten.mm", 0, modules.index(CULPRIT), "forward", 0, 0, inf=37)
    for precision, unit in (("float16", 2.0**-11), ("bfloat16", 2.0**-8)):
        yield from operations(precision, modules, unit)
        yield NoiseRow(precision, unit * 1.2)
        yield from _steps(precision, unit)
    yield from _steps("float32", None)


def operations(precision: str, modules: list[str], unit: float, ops: int = 1) -> Iterator[OperationRow]:
    """Yield `ops` operations of each module; in float16 all is lost from the culprit on."""
    error, broken, order = unit, False, 0
    for module in modules:
        broken |= precision == "float16" and module == CULPRIT
        for number in range(ops):
            before, error = error, 0.3 if broken else min(error * 1.01, 0.05)
            bad = 37 if precision == "float16" and module == CULPRIT else 0
            op = ("aten.mm", "aten.add", "aten.mul", "aten._softmax")[number % 4]
            site = OperationRow(precision, module, op, number // 4, order, precision, 1, 1000, nonfinite=bad)
            yield dataclasses.replace(site, absmax=9e4 if bad else 8.0, error=error, error_in=before, local_error=unit)
            order += 1


def _steps(precision: str, unit: float | None) -> Iterator[StepRow]:
    for run, beams in (("greedy", 1), ("beam", 4)):
        for call in range(6):
            rows = 3 * beams
            known = unit is not None and not (precision == "float16" and call > 2)
            errors = tuple(unit if known else None for _ in range(rows)) if unit is not None else ()
            yield StepRow(precision, run, 0, call, beams, tuple(12.0 + call for _ in range(rows)), (0,) * rows, errors)


def large_recording() -> Recording:
    """Return a recording with the sites of a 7B model: 32 blocks, four low precisions, about 10,000 sites."""
    rng = random.Random(5)
    modules: Modules = []
    for block in range(32):
        for name in LLAMA:
            path = f"model.language_model.layers.{block}{'.' * bool(name)}{name}"
            modules.append((path, "LlamaDecoderLayer" if not name else "Linear", bool(name), 2 + 8 * rng.random()))
    recording = sample_recording(modules=modules)
    names = ("float16-to", "float16-autocast", "bfloat16-autocast")
    extra: list[Row] = [PrecisionRow(name, name.partition("-")[0], "to") for name in names]
    for row in recording.rows:
        if isinstance(row, (RangeRow, ErrorRow)) and row.precision == "float16":
            extra += [dataclasses.replace(row, precision=name) for name in names]
    paths = [path for path, *_ in modules]
    for name in ("float16", "bfloat16", *names):
        extra += operations(name, paths, 2.0**-8 * (1 + rng.random()), ops=5)
    header = dataclasses.replace(recording.header, precisions=(*recording.header.precisions, *names))
    return with_rows(dataclasses.replace(recording, header=header), iter(extra))

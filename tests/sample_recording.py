"""A made-up recording and diagnosis of a T5-like model: float16 overflows in an encoder's `wo`, bfloat16 is healthy."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Mapping

from overflow_lab.analysis.results import Diagnosis, Effect, Finding, Origin, Verdict
from overflow_lab.ranges import Range
from overflow_lab.recording import (
    AnswerRow,
    BlindSpotRow,
    CastRow,
    ErrorRow,
    Footer,
    Header,
    ModuleRow,
    Moment,
    OutputRow,
    PrecisionRow,
    RangeRow,
    Recording,
    Row,
    RunRow,
    build,
)

CULPRIT = "encoder.block.2.layer.1.DenseReluDense.wo"
# The modules through which the large value passes, up to the end of the encoder's residual stream.
REACHED = (
    CULPRIT,
    CULPRIT.removesuffix(".wo"),
    "encoder.block.2.layer.1.dropout",
    "encoder.block.2.layer.1",
    "encoder.block.2",
)
BAD_VALUE = 547171.25
FLOAT16_MAX = 65504.0
HOSTILE = "</script><img src=x onerror=alert(1)>"
COUNT = 65536

Modules = list[tuple[str, str, bool, float]]


def t5_modules(encoder_blocks: int = 3, decoder_blocks: int = 2) -> Modules:
    """Return (path, class, leaf, log2 of absmax) in the order in which a T5-like model finishes its modules."""
    modules: Modules = [("shared", "Embedding", True, 9.4)]
    for stack, blocks in (("encoder", encoder_blocks), ("decoder", decoder_blocks)):
        for block in range(blocks):
            modules += _block(f"{stack}.block.{block}", stack, stream=10.0 + 2.6 * block)
        modules.append((f"{stack}.final_layer_norm", "T5LayerNorm", True, 1.4))
        modules.append((f"{stack}.dropout", "Dropout", True, 1.4))
        modules.append((stack, "T5Stack", False, 1.4))
    modules += [("lm_head", "Linear", True, 5.6), ("", "T5ForConditionalGeneration", False, 5.6)]
    return [
        (path, name, leaf, math.log2(BAD_VALUE) if path in REACHED else absmax) for path, name, leaf, absmax in modules
    ]


def _block(path: str, stack: str, *, stream: float) -> Iterator[tuple[str, str, bool, float]]:
    attentions = ("SelfAttention",) if stack == "encoder" else ("SelfAttention", "EncDecAttention")
    for number, attention in enumerate(attentions):
        here = f"{path}.layer.{number}"
        yield f"{here}.layer_norm", "T5LayerNorm", True, 2.2
        for name, absmax in (("q", 3.1), ("k", 4.0), ("v", 3.4), ("o", stream - 1.0)):
            yield f"{here}.{attention}.{name}", "Linear", True, absmax
        yield f"{here}.{attention}", "T5Attention", False, stream - 1.0
        yield f"{here}.dropout", "Dropout", True, stream - 1.0
        yield here, "T5LayerSelfAttention", False, stream
    here = f"{path}.layer.{len(attentions)}"
    yield f"{here}.layer_norm", "T5LayerNorm", True, 2.6
    for name, kind, absmax in (("wi_0", "Linear", 5.2), ("act", "NewGELUActivation", 5.2), ("wi_1", "Linear", 6.3)):
        yield f"{here}.DenseReluDense.{name}", kind, True, absmax
    yield f"{here}.DenseReluDense.dropout", "Dropout", True, stream - 3.0
    yield f"{here}.DenseReluDense.wo", "Linear", True, stream - 0.4
    yield f"{here}.DenseReluDense", "T5DenseGatedActDense", False, stream - 0.4
    yield f"{here}.dropout", "Dropout", True, stream - 0.4
    yield here, "T5LayerFF", False, stream + 0.3
    yield path, "T5Block", False, stream + 0.3


def make_range(log2_absmax: float, *, rng: random.Random, nonfinite: int = 0) -> Range:
    """Return the range of a bell of magnitudes that ends at 2**log2_absmax."""
    absmax = 2.0**log2_absmax
    top = math.floor(log2_absmax)
    width = rng.uniform(1.6, 2.6)
    shares = {
        e: math.exp(-(((e - top + 4.5) / width) ** 2) / 2) + 2.0 ** (e - top) * 0.02 for e in range(top - 22, top + 1)
    }
    total = sum(shares.values())
    exponents = {e: n for e, share in shares.items() if (n := round(COUNT * share / total)) > 0}
    return Range(
        count=COUNT,
        posinf=nonfinite,
        zero=16 + rng.randrange(64),
        min=-absmax * rng.uniform(0.4, 1.0),
        max=absmax,
        smallest=2.0 ** min(exponents),
        sum=0.0,
        sum_of_squares=sum(n * 2.25 * 4.0**e for e, n in exponents.items()),
        exponents=exponents,
    )


def sample_recording(*, modules: Modules | None = None, texts: bool = False, complete: bool = True) -> Recording:
    """Return the recording of a scan in float32, float16 and bfloat16, forward and beam search."""
    known = modules if modules is not None else t5_modules()
    rows: list[Row] = [
        ModuleRow(path, kind, index, leaf, parameters=4096 if kind == "Linear" else 0)
        for index, (path, kind, leaf, _) in enumerate(known)
    ]
    for precision in ("float32", "float16", "bfloat16"):
        cast = "none" if precision == "float32" else "loader"
        kept = tuple(path for path, *_ in known if path.endswith(".wo")) if precision == "float16" else ()
        rows.append(PrecisionRow(precision, precision, cast, kept[:3]))
        rows += [RunRow(precision, "forward", 3, 12, 384, 0.8), RunRow(precision, "beam", 3, 12, 384, 2.4)]
        rows += _module_rows(precision, known)
    rows += [*_casts(), *_outputs(), *_answers(texts=texts), *_blind_spots()]
    footer = Footer("complete") if complete else Footer("interrupted", "KeyboardInterrupt")
    return build(_header(), [*rows, footer], path="/home/somebody/secret/t5-sample.jsonl")


def _header() -> Header:
    subject = {
        "name": "t5-sample",
        "kind": "seq2seq-lm",
        "notes": ["lm_head is tied to shared"],
        "inputs": 12,
        "tokens": 384,
    }
    environment: Mapping[str, object] = {
        "python": "3.11.2",
        "platform": "Linux x86_64",
        "torch": "2.13.0",
        "transformers": "5.24.0",
        "device": "cpu",
        "threads": 2,
    }
    options = {"num_beams": 4, "max_new_tokens": 32, "inputs_file": "/home/somebody/secret/inputs.txt"}
    precisions = ("float32", "float16", "bfloat16")
    return Header(1, "0.1.0", "2026-05-04T10:00:00+00:00", subject, precisions, environment, options)


def _module_rows(precision: str, modules: Modules) -> Iterator[Row]:
    rng = random.Random(7)
    broken = False
    growth = 0.0
    for order, (path, _, _, absmax) in enumerate(modules):
        nonfinite = 0
        broken |= path == CULPRIT
        if precision == "float16" and path in (CULPRIT, CULPRIT.removesuffix(".wo")):
            nonfinite = 37
        clamped = min(absmax, 15.98) if precision == "float16" else absmax
        dtype = precision if not (precision == "float16" and path.endswith(".wo") and not broken) else "float32"
        bad = Moment(order, "forward", 0, 0) if nonfinite else None
        seen = make_range(clamped, rng=rng, nonfinite=nonfinite)
        yield RangeRow(precision, path, "output", order, dtype, 3, seen, bad)
        growth = min(growth + rng.uniform(0.0, 0.06), 4.0)
        if precision != "float32":
            unit = 2.0**-11 if precision == "float16" else 2.0**-8
            relative = (
                unit * 2.0 ** (growth - 1.2) if not (broken and precision == "float16") else 0.18 + 0.02 * rng.random()
            )
            squares = seen.sum_of_squares
            yield ErrorRow(precision, path, "output", order, COUNT, nonfinite, squares * relative**2, squares)


def _casts() -> Iterator[Row]:
    yield CastRow(
        "float16", "shared.weight", "shared", "parameter", "float32", "float16", 8192, to_subnormal=41, absmax=3.1
    )
    yield CastRow(
        "float16",
        "encoder.scale",
        "encoder",
        "buffer",
        "float32",
        "float16",
        64,
        to_infinity=2,
        to_zero=1,
        absmax=497160.0,
    )


def _outputs() -> Iterator[Row]:
    port = "output['logits']"
    yield OutputRow("float16", port, COUNT, 0, 9.6e3, 1e5, decisions=384, changed=46, kl_sum=91.0, kl_rows=384)
    yield OutputRow("bfloat16", port, COUNT, 0, 2.1, 1e5, decisions=384, changed=1, kl_sum=0.02, kl_rows=384)


def _answers(*, texts: bool) -> Iterator[Row]:
    for sample, (prompt, right, wrong) in enumerate(
        (("forty two", "4 2", "4 4 4 4"), ("one hundred", "1 0 0", "1 0 7"), ("seven", "7", "7"))
    ):
        row = AnswerRow("bfloat16", "beam", 0, sample, "same", 5, 5)
        if texts:
            row = dataclasses.replace(row, prompt=prompt, reference_text=right)
        yield dataclasses.replace(row, text=right if texts else None)
        status = "same" if right == wrong else "changed"
        text = wrong if texts else None
        first = None if status == "same" else 2
        yield dataclasses.replace(row, precision="float16", status=status, first_difference=first, text=text)
    error = "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0"
    yield AnswerRow("float16", "beam", 1, 0, "failed", 0, 5, error=error)
    yield AnswerRow("bfloat16", "beam", 1, 0, "same", 5, 5)


def _blind_spots() -> Iterator[Row]:
    yield BlindSpotRow("encoder.block.0.layer.0.SelfAttention.relative_attention_bias", "never called")
    yield BlindSpotRow("decoder", "port output['past_key_values'] is of type Cache, which is not understood", "float16")


def sample_diagnosis() -> Diagnosis:
    """Return what an analysis would say of `sample_recording`, written by hand."""
    origin = Origin(CULPRIT, "aten.mm")
    broken = Verdict(
        "float16",
        "overflow",
        "error",
        "547,171 does not fit: the largest float16 is 65,504.",
        "Use bfloat16, or keep `wo` in float32 (`_keep_in_fp32_modules`).",
        origin,
        "matmul-overflow",
        BAD_VALUE,
        FLOAT16_MAX,
        Effect(0.0, 0.31, 0.12, 0.24, answers=4, changed_answers=2, failed_answers=1),
    )
    healthy = Verdict(
        "bfloat16",
        "ok",
        "none",
        "The largest value, 547,171, leaves 109 bits of headroom; 5.9 of 8 bits reach the output.",
        "Nothing to do.",
        effect=Effect(0.0, 0.0046, 0.0026, 5e-5, answers=4),
    )
    findings = (
        Finding(
            "float16",
            "overflow",
            "matmul-overflow",
            origin,
            "error",
            broken.reason,
            BAD_VALUE,
            FLOAT16_MAX,
            {"elements": 37},
        ),
        Finding(
            "float16",
            "overflow",
            "cast-overflow",
            Origin("encoder"),
            "warning",
            "2 of 64 elements of the buffer `encoder.scale` become infinite in the cast; the largest was 497,160.",
            497160.0,
            FLOAT16_MAX,
        ),
    )
    return Diagnosis({"float16": broken, "bfloat16": healthy}, findings)


def wide_modules(count: int) -> Modules:
    """Return `count` leaf modules with long names, as a large model has them."""
    rng = random.Random(3)
    names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj", "input_layernorm")
    return [
        (
            f"model.language_model.layers.{index // 5}.{names[index % 5]}",
            "Linear",
            True,
            2.0 + 8.0 * rng.random() + index / count * 4,
        )
        for index in range(count)
    ]

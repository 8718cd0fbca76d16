"""The whole recorder on small modules and on small models of transformers with `generate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overflow_lab.capture.precisions import parse_precisions
from overflow_lab.capture.record import Recorder
from overflow_lab.errors import OverflowLabError
from overflow_lab.recording import (
    FORMAT,
    AnswerRow,
    BlindSpotRow,
    CastRow,
    ErrorRow,
    FailureRow,
    Header,
    ModuleRow,
    OutputRow,
    PrecisionRow,
    RangeRow,
    Recording,
    RunRow,
    TensorRow,
    load,
)
from overflow_lab.recording.writer import Writer
from overflow_lab.subjects import Batch, Generation, Subject
from overflow_lab.subjects.module import from_module
from tests import tiny_models
from tests.modules import Calling, Nested, Step, chain

X = torch.linspace(-2, 3, 8).reshape(2, 4)


def record(subject: Subject, *names: str, path: Path | None = None, **options: Any) -> Recording:
    precisions = parse_precisions(names or ("float16",))
    header = Header(FORMAT, "0", "", {"name": subject.name}, ("float32", *(p.name for p in precisions)))
    with Writer(path, header) as writer:
        Recorder(subject, precisions, writer, **options).run()
    return writer.recording()


def spots(recording: Recording) -> list[tuple[str | None, str]]:
    return [(row.precision, row.module) for row in recording.of(BlindSpotRow)]


def ranges(recording: Recording, precision: str) -> dict[tuple[str, str], RangeRow]:
    return {(row.module, row.port): row for row in recording.of(RangeRow) if row.precision == precision}


def test_every_port_of_a_small_model_is_recorded_with_the_numbers_of_torch() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    found = record(from_module(model, (X,)), "fp16", "bf16")
    with torch.no_grad():
        hidden = model[0](X)
    for precision in ("float32", "float16", "bfloat16"):
        rows = ranges(found, precision)
        assert list(rows) == [
            *(("", "input[0]"), ("0", "input[0]"), ("0", "output"), ("1", "input[0]"), ("1", "output"), ("", "output"))
        ]
        assert {row.dtype for row in rows.values()} == {precision}
    row = ranges(found, "float32")["0", "output"].range
    assert (row.count, row.min, row.max) == (6, hidden.min().item(), hidden.max().item())
    assert row.sum_of_squares == pytest.approx(hidden.double().square().sum().item())
    assert [row.path for row in found.of(ModuleRow)] == ["", "0", "1"]
    assert [row.name for row in found.of(TensorRow)] == ["0.weight", "0.bias"]


def test_relative_errors_are_those_of_the_module_run_in_half_precision() -> None:
    model = nn.Linear(4, 3)
    found = record(from_module(model, (X,)), "bf16")
    with torch.no_grad():
        reference = model(X).double()
        low = torch.nn.functional.linear(X.bfloat16(), model.weight.bfloat16(), model.bias.bfloat16()).double()
    (row,) = found.of(OutputRow)
    expected = ((low - reference).norm() / reference.norm()).item()
    assert row.relative_error == pytest.approx(expected, rel=1e-9)
    errors = {row.port: row.relative_error for row in found.of(ErrorRow)}
    assert errors["output"] == pytest.approx(expected, rel=1e-9)
    assert errors["input[0]"] == pytest.approx(((X.bfloat16() - X).norm() / X.norm()).item(), rel=1e-6)


def merged(recording: Recording) -> list[Any]:
    """What a recording says but for times, precise to rounding of sums."""
    return [row for kind in (RangeRow, ErrorRow, OutputRow) for row in recording.of(kind)]


@pytest.mark.parametrize("memory", [1, 3000, 1 << 30])
def test_many_small_batches_are_one_big_one_however_much_memory_there_is(memory: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    whole = torch.randn(32, 4) * 1e4
    big = record(from_module(model, [{"input": whole}]), "fp16", "bf16")
    small = record(from_module(model, [{"input": part} for part in whole.split(4)]), "fp16", "bf16", memory=memory)
    pairs = list(zip(merged(big), merged(small), strict=True))
    assert pairs
    for one, many in pairs:
        assert one.key == many.key
        if isinstance(one, RangeRow):
            a, b = one.range, many.range
            assert (a.count, a.min, a.max, a.smallest, a.zero) == (b.count, b.min, b.max, b.smallest, b.zero)
            assert (a.nonfinite, a.exponents, many.calls) == (b.nonfinite, b.exponents, 8)
            assert a.sum_of_squares == pytest.approx(b.sum_of_squares, rel=1e-9)
        else:
            assert one.nonfinite == many.nonfinite
            assert one.relative_error == pytest.approx(many.relative_error, rel=1e-5)
    assert {(row.run, row.batches, row.inputs) for row in small.of(RunRow)} == {("forward", 8, 32)}
    assert len(small.of(RunRow)) == 3


def test_batches_from_a_generator_are_walked_once() -> None:
    walked = []

    def batches() -> Iterator[Batch]:
        for number in range(3):
            walked.append(number)
            yield Batch(positional=(X,))

    model = nn.Linear(4, 2)
    subject = Subject("m", "module", lambda dtype: nn.Linear(4, 2).to(dtype or torch.float32), batches())
    found = record(subject, "fp16", "bf16", memory=1)
    assert walked == [0, 1, 2]
    assert {row.batches for row in found.of(RunRow)} == {3}
    assert isinstance(model, nn.Linear)


def test_nothing_to_run_is_an_error() -> None:
    subject = Subject("m", "module", lambda dtype: nn.Linear(4, 2), ())
    with pytest.raises(OverflowLabError, match="m has no inputs to run"):
        record(subject)


def test_a_failure_in_float32_names_the_module_and_is_recorded(tmp_path: Path) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("on\npurpose")

    path = tmp_path / "r.jsonl"
    with pytest.raises(OverflowLabError, match="fails in float32 already in 1: ValueError: on purpose; mend"):
        record(from_module(chain(torch.relu, fail), (X,)), path=path)
    found = load(path)
    assert [(row.precision, row.module, row.batch) for row in found.of(FailureRow)] == [("float32", "1", 0)]
    assert ("0", "output") in ranges(found, "float32")
    assert found.status == "failed"


def test_a_failure_in_one_precision_leaves_the_others() -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float16:
            raise RuntimeError("\"some_kernel\" not implemented for 'Half'")
        return x

    inputs = [(X,), (X,)]
    found = record(from_module(chain(torch.tanh, picky), inputs), "fp16", "bf16")
    (row,) = found.of(FailureRow)
    assert (row.precision, row.module, row.run, row.unsupported) == ("float16", "1", "forward", True)
    assert {row.precision for row in found.of(OutputRow)} == {"bfloat16"}
    assert ("0", "output") in ranges(found, "float16")


def test_a_weight_a_buffer_and_inputs_that_the_cast_loses_are_recorded() -> None:
    model = Calling(lambda m, x, scale: m.lin(x) * scale)
    with torch.no_grad():
        model.lin.weight[0, 0] = 1e6
    model.register_buffer("var", torch.tensor([7e4, 1.0, 1e-9]))
    found = record(from_module(model, [Batch({"scale": torch.tensor(1e5)}, (X * 1e5,))]), "fp16", "bf16")
    lost = {(row.role, row.name): (row.module, row.to_infinity, row.to_zero) for row in found.of(CastRow)}
    assert {row.precision for row in found.of(CastRow)} == {"float16"}
    assert lost == {
        ("parameter", "lin.weight"): ("lin", 1, 0),
        ("buffer", "var"): ("", 1, 1),
        ("input", "input[0]"): ("", int((X * 1e5).abs().gt(65519).sum()), 0),
        ("input", "scale"): ("", 1, 0),
    }


def test_a_buffer_that_is_made_in_the_first_run_is_no_obstacle() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(m, "made"):
            m.register_buffer("made", torch.ones(4, dtype=x.dtype) * 2)
        seen: torch.Tensor = m.lin(x) + m.made
        return seen

    assert record(from_module(Calling(forward), (X,))).of(OutputRow)


def test_an_output_that_is_a_buffer_of_the_model_is_compared_batch_by_batch() -> None:
    model = Calling(lambda m, x: m.state.copy_(m.lin(x)))
    model.register_buffer("state", torch.zeros(2, 4))
    found = record(from_module(model, [(torch.full((2, 4), float(i)),) for i in range(4)]))
    (row,) = found.of(OutputRow)
    assert row.error_squares == 0.0
    assert row.reference_squares == pytest.approx(8 * (0 + 1 + 4 + 9))


def test_lazy_modules_are_filled_by_their_first_run() -> None:
    found = record(from_module(nn.Sequential(nn.LazyLinear(3)), (X,)))
    assert ("0", "output") in ranges(found, "float16")


def test_a_module_called_many_times_is_one_row() -> None:
    found = record(from_module(Nested(), {"x": X, "depth": 3}))
    rows = ranges(found, "float16")
    assert (rows["lin", "output"].calls, rows["lin", "output"].range.count) == (4, 32)
    assert rows["", "input['x']"].calls == 1  # the others are called by position
    assert spots(found) == []


def test_blind_spots_are_named() -> None:
    model = Calling(lambda m, x: (object(), x.to_sparse()))
    found = record(from_module(model, (X,)))
    reasons = {row.module: row.reason for row in found.of(BlindSpotRow) if row.module}
    assert reasons == {"lin": "Linear was never called"}
    unseen = sorted(row.reason.partition(" are not")[0] for row in found.of(BlindSpotRow) if not row.module)
    assert unseen == [
        "values of type Tensor (cpu, torch.sparse_coo, torch.float32)",
        "values of type builtins.object",
    ]


def test_an_output_that_cannot_be_compared_is_a_blind_spot() -> None:
    model = Calling(lambda m, x: m.lin(x) if x.dtype is torch.float32 else m.lin(x)[:1])
    found = record(from_module(model, (X,)))
    assert found.of(OutputRow) == []
    assert {("float16", "")} == set(spots(found))


def test_a_scripted_module_is_named_once() -> None:
    found = record(from_module(nn.Sequential(nn.ReLU(), torch.jit.script(nn.Linear(4, 4))), (X,)))
    assert spots(found) == [(None, "1")]


def test_torchs_own_encoder_with_a_padding_mask_is_seen() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    mask = torch.tensor([[False] * 4, [False, False, True, True]])
    found = record(from_module(encoder, {"src": torch.randn(2, 4, 8), "src_key_padding_mask": mask}))
    assert ("layers.1.linear2", "output") in ranges(found, "float16")


# --- models of transformers ------------------------------------------------------------------------------------------

STRATEGIES = {
    "greedy": {"max_new_tokens": 5, "do_sample": False},
    "beam": {"max_new_tokens": 5, "num_beams": 2, "do_sample": False},
}
IDS = torch.tensor([[5, 6, 7, 8], [0, 9, 10, 11]])


def joined(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def language_model(name: str, change: Any = None) -> Subject:
    seq2seq = name != "gpt2"
    model = tiny_models.build(name).eval()
    if change is not None:
        change(model)
    ends = (1,) if name in ("t5", "gpt2") else (2,)
    generation = Generation(
        STRATEGIES, encoder_decoder=seq2seq, padding=1 if name == "gpt2" else 0, ends=ends, decode=joined
    )
    batch = Batch({"input_ids": IDS, "attention_mask": (IDS != 0).long()}, samples=2, tokens=7)
    return from_module(model, [batch, batch], generation=generation)


@pytest.mark.parametrize("name", ["t5", "bart", "gpt2"])
def test_forward_and_generation_of_a_language_model_are_recorded(name: str) -> None:
    found = record(language_model(name), "fp16", "bf16")
    runs = {(row.precision, row.run): (row.batches, row.inputs, row.tokens) for row in found.of(RunRow)}
    assert runs == dict.fromkeys(
        [(p, r) for p in ("float32", "float16", "bfloat16") for r in ("forward", "greedy", "beam")], (2, 4, 14)
    )
    answers = found.of(AnswerRow)
    assert len(answers) == 2 * 2 * 2 * 2
    assert {row.status for row in answers} <= {"same", "changed"}
    assert all(row.text is None and row.prompt is None for row in answers)
    logits = [row for row in found.of(OutputRow) if row.port == "output['logits']"]
    assert len(logits) == 2
    assert all(row.relative_error is not None and 0 < row.relative_error < 0.05 for row in logits)
    assert found.of(FailureRow) == []


def test_answers_are_those_of_the_model_without_us() -> None:
    model = tiny_models.build("gpt2").eval()
    mask = (IDS != 0).long()
    found = record(language_model("gpt2"), store_texts=True)
    for name, settings in STRATEGIES.items():
        sequences = model.generate(input_ids=IDS, attention_mask=mask, **settings)[:, 4:].tolist()
        expected = [joined(row[: row.index(1) + 1] if 1 in row else row) for row in sequences]
        rows = [row for row in found.of(AnswerRow) if row.strategy == name and row.batch == 0]
        assert [row.reference_text for row in rows] == expected
        assert any(expected)


def test_steps_of_generation_are_calls_and_not_batches() -> None:
    def break_late(model: Any) -> None:
        # The prompt has the positions 0 to 3: in float16 the second generated token, at 5, is the first to overflow.
        with torch.no_grad():
            model.transformer.wpe.weight[5] = 1e5

    def one_batch(subject: Subject) -> Subject:
        unpadded = Batch({"input_ids": IDS[:1]}, samples=1, tokens=4)
        return dataclasses.replace(subject, batches=[unpadded, unpadded])

    found = record(one_batch(language_model("gpt2", break_late)))
    row = next(row for row in found.of(RangeRow) if row.precision == "float16" and row.module == "transformer.wpe")
    assert row.first_bad is not None
    assert (row.first_bad.run, row.first_bad.batch, row.first_bad.call) == ("greedy", 0, 2)
    assert {(r.run, r.batches) for r in found.of(RunRow)} == {("forward", 2), ("greedy", 2), ("beam", 2)}


def test_an_exception_in_the_beam_search_of_one_precision_is_an_answer() -> None:
    def fragile(model: Any) -> None:
        def check(x: torch.Tensor) -> torch.Tensor:
            if x.dtype is torch.float16:
                raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
            return x

        model.lm_head = nn.Sequential(model.lm_head, Step(check))

    found = record(language_model("gpt2", fragile))
    failed = found.of(FailureRow)
    assert {(row.precision, row.run, row.module) for row in failed} == {
        ("float16", run, "lm_head.1") for run in ("forward", "greedy", "beam")
    }
    assert {row.status for row in found.of(AnswerRow)} == {"failed"}
    assert len(found.of(AnswerRow)) == 8


def test_what_a_loader_keeps_in_float32_is_scanned_as_a_plain_cast_too() -> None:
    def load_in(dtype: torch.dtype | None) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if dtype is torch.float16:
            model[0].to(dtype)
            model[1].register_forward_pre_hook(lambda module, args: (args[0].float(),))
        return model if dtype in (None, torch.float16) else model.to(dtype)

    subject = Subject("m", "hub", load_in, [Batch(positional=(X,))], loader_casts=True)
    found = record(subject, "fp16", "bf16")
    kept = {row.precision: row.kept for row in found.of(PrecisionRow)}
    assert kept == {"float32": (), "float16": ("1",), "bfloat16": (), "float16-to": ()}
    assert {row.precision for row in found.of(OutputRow)} == {"float16", "bfloat16", "float16-to"}

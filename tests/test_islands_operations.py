"""Operation islands: what runs wide, what is narrowed, and what a run that follows misfits finds."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch

from overflow_lab.capture.precisions import parse_precision
from overflow_lab.recording import RangeRow
from overflow_lab.remedies.islands.apply import apply, mended
from overflow_lab.remedies.islands.discover import Discovery
from overflow_lab.remedies.islands.members import Member
from overflow_lab.remedies.islands.operations import WideMode, run_under
from overflow_lab.scan import scan_subject
from overflow_lab.subjects.module import from_module
from tests import island_models as models
from tests.modules import Step

HALF = torch.float16


def wide(model: nn.Module, *operations: str, module: str = "", dtype: torch.dtype = HALF) -> nn.Module:
    """Return a half-precision copy in which these operations of one module's code run in float32."""
    low = copy.deepcopy(model).to(dtype)
    name = str(dtype).removeprefix("torch.")
    members = frozenset(Member(module, operation) for operation in operations)
    apply(low, model, members, parse_precision(name))
    return low


def run(function: Any, *operations: str, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        made: torch.Tensor = wide(Step(function), *operations)(x)
    return made


def test_a_product_is_kept_wide_until_it_is_scaled() -> None:
    model, x = models.seeded(models.Scores), (3 * models.values(2, 5, 16)).half()
    low: Any = copy.deepcopy(model).half()
    with torch.no_grad():
        got = wide(model, "aten.bmm", "aten.div")(x)
        q, k = low.q(x) * 60.0, low.k(x) * 60.0
        scores = (q.float() @ k.float().transpose(1, 2)) / 60.0**2
        # the softmax is given what fits; the second product is one of the chosen, and so is its result
        expected = scores.half().softmax(-1).float() @ low.v(x).float()
    assert torch.equal(got.float(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_without_chosen_operations_nothing_changes(dtype: torch.dtype) -> None:
    model, x = models.seeded(models.Scores, 1.0), models.values(2, 5, 16).to(dtype)
    with torch.no_grad():
        assert torch.equal(wide(model, "aten.sin", dtype=dtype)(x), copy.deepcopy(model).to(dtype)(x))


def test_views_and_moves_keep_what_is_wide() -> None:
    x = torch.full((2, 3), 300.0, dtype=HALF)

    def program(x: torch.Tensor) -> Any:
        square = (x * x).transpose(0, 1).reshape(-1)[1:]
        return torch.cat([square, square]).view(2, -1) / 300.0

    assert torch.equal(run(program, "aten.mul", "aten.div", x=x).float(), torch.full((2, 5), 300.0))


def test_what_is_not_chosen_is_given_the_low_dtype() -> None:
    seen: list[torch.dtype] = []

    class Sees(_python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "tanh" in str(op):
                seen.append(args[0].dtype)
            return op(*args, **(kwargs or {}))

    model = wide(Step(lambda x: torch.tanh(x * x / 1e6)), "aten.mul", "aten.div")
    with torch.no_grad(), Sees():  # type: ignore[no-untyped-call]
        model(torch.full((3,), 300.0, dtype=HALF))
    assert seen == [HALF]


def test_an_operation_in_place_on_a_wide_value_writes_a_wide_one() -> None:
    def program(x: torch.Tensor) -> Any:
        square = x * x
        square += 1000.0
        square.mul_(0.5)
        return square / 300.0

    x = torch.full((4,), 300.0, dtype=HALF)
    got = run(program, "aten.mul", "aten.div", x=x)
    assert torch.allclose(got.float(), torch.full((4,), (300.0**2 + 1000) / 600))


def test_an_operation_in_place_on_the_programs_own_value_is_left_out() -> None:
    x = torch.full((4,), 300.0, dtype=HALF)
    got = run(lambda x: x.clone().mul_(x) / 300.0, "aten.mul_", "aten.div", x=x)
    assert torch.isinf(got).all()  # it has to write half-precision memory


def test_what_the_program_asks_for_in_float32_stays_its_own() -> None:
    def program(x: torch.Tensor) -> Any:
        exact = (x * x).to(torch.float32)
        return exact.sqrt() + torch.ones((), dtype=torch.float32), exact.dtype

    x = torch.full((4,), 300.0, dtype=HALF)
    with torch.no_grad():
        got, dtype = wide(Step(program), "aten.mul", "aten._to_copy")(x)
    assert dtype == torch.float32
    assert torch.equal(got, torch.full((4,), 301.0))


class UpcastingNorm(nn.Module):
    """As the RMS norms of transformers: up, a square, and back to the dtype of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


class Normed(nn.Module):
    """A stream of 80,000 before a norm that upcasts, and a layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = UpcastingNorm(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(self.norm(x + x))


def test_a_models_own_upcast_of_a_wide_value_is_honoured_without_being_chosen() -> None:
    model, x = models.seeded(Normed), torch.tensor([[40000.0, 100.0, 3.0, 40000.0]], dtype=HALF)
    members = found_in(model, x)
    assert members == {Member("", "aten.add")}
    low = copy.deepcopy(model).half()
    apply(low, model, members, parse_precision("float16"))
    with torch.no_grad():
        seen: list[torch.dtype] = []
        low.layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))  # type: ignore[union-attr]
        got, wanted = low(x), model(x.float())
    assert seen == [HALF]
    assert (got - wanted).norm() < 1e-3 * wanted.norm()


def test_a_creation_in_the_low_dtype_can_be_chosen() -> None:
    def program(x: torch.Tensor) -> Any:
        return torch.arange(4096, 4104, dtype=x.dtype) * x

    got = run(program, "aten.arange", "aten.mul", x=torch.ones((), dtype=HALF))
    assert torch.equal(got.float(), torch.arange(4096, 4104).float())


def test_softmax_in_float32_on_request_works_on_a_wide_value() -> None:
    scores = torch.tensor([[300.0, 250.0]], dtype=HALF)
    got = run(lambda x: (x * x).softmax(-1, dtype=torch.float32).to(HALF), "aten.mul", "aten._to_copy", x=scores)
    assert torch.equal(got.float(), torch.tensor([[1.0, 0.0]]))


def test_a_part_that_is_called_alone_gives_its_output_in_the_low_dtype() -> None:
    model = nn.ModuleDict({"part": Step(lambda x: x * x)})
    apply(model, model, frozenset({Member("part", "aten.mul")}), parse_precision("float16"))
    assert model["part"](torch.ones(3, dtype=HALF)).dtype == HALF


def test_no_mode_is_left_after_the_model_raises() -> None:
    def program(x: torch.Tensor) -> Any:
        raise KeyboardInterrupt

    model = wide(Step(program), "aten.mul")
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1))
    assert not _python_dispatch._get_current_dispatch_mode_stack()


def test_a_copy_runs_in_a_mode_of_its_own() -> None:
    model = models.seeded(models.Scores)
    low = wide(model, "aten.bmm", "aten.div")
    made, x = copy.deepcopy(low), (3 * models.values(1, 4, 16)).half()
    with torch.no_grad():
        expected = low(x)
        for p in low.parameters():
            p.zero_()
        assert torch.equal(made(x), expected)


def test_a_scan_sees_the_wide_values_as_they_are() -> None:
    # What our own hooks do with a value at a module's border is no operation that would be given it narrowed.
    subject = from_module(models.seeded(models.Streamed), {"x": models.values(2, 5, 8)})
    followed = found_in(models.seeded(models.Streamed), models.values(2, 5, 8))
    found = scan_subject(mended(subject, followed, "float16"), ["float16"], level="operation")
    assert found.verdicts["float16"].verdict == "ok"
    rows = [row for row in found.recording.of(RangeRow) if row.precision == "float16" and row.port == "output"]
    stream = {row.module: row for row in rows}["encoder.blocks.2"]
    assert stream.range.nonfinite == 0
    assert stream.range.absmax == pytest.approx(80000, rel=1e-3)
    assert stream.dtype == "float32"


def found_in(model: nn.Module, x: torch.Tensor) -> frozenset[Member]:
    low, mode = copy.deepcopy(model).half(), Discovery(HALF)
    run_under(low, mode)
    with torch.no_grad():
        low(x.half())
    return frozenset(mode.found)


def test_a_run_finds_what_does_not_fit_and_whoever_is_given_it() -> None:
    found = found_in(models.seeded(models.Streamed), models.values(2, 5, 8))
    own = {member for member in found if member.op == "aten.add"}
    assert own == {Member("encoder.blocks.2", "aten.add"), Member("encoder.blocks.3", "aten.add")}
    readers = {member.module for member in found if member.op == "aten.native_layer_norm"}
    assert readers == {"encoder.blocks.3.norm", "encoder.norm"}
    assert not any(member.module.startswith(("encoder.blocks.0", "head")) for member in found)


def test_a_run_finds_nothing_in_a_healthy_model() -> None:
    assert found_in(models.seeded(models.Scores, 1.0), models.values(2, 5, 16)) == frozenset()


def test_a_mask_of_infinities_is_meant_and_not_found() -> None:
    model = Step(lambda x: x.masked_fill(x > 1, -math.inf).softmax(-1))
    assert found_in(model, models.values(3, 4)) == frozenset()


def test_the_mode_knows_the_module_whose_code_runs() -> None:
    mode = WideMode(HALF)
    with mode.inside("a"), mode.inside("a.b"):
        assert mode.path == ["a", "a.b"]
    assert mode.path == []

"""What a program may bring along: other tensors, custom and compiled operators, huge and tiny values. Never a crash."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from overflow_lab.capture.shadow import operations
from overflow_lab.capture.shadow.dispatch import ShadowMode
from tests.shadowed import check, run, values


def test_a_sparse_operand_is_a_blind_spot() -> None:
    mode, result = run(lambda x: torch.mm(x.relu().to_sparse(), x), values((3, 3)), torch.bfloat16)
    refused = ("unsupported", ("", "aten.mm", 0)) in mode.notes.events
    assert refused or any("sparse" in reason for reason in mode.unreplayed)
    assert torch.equal(mode.shadows.of(result), result.float())


def test_a_quantized_operand_is_a_blind_spot() -> None:
    mode = ShadowMode()
    with mode:
        y = torch.quantize_per_tensor(torch.ones(3) * 0.3, 0.1, 0, torch.qint8).dequantize() * 2
    assert any("quantized" in reason for reason in mode.unreplayed)
    torch.testing.assert_close(mode.shadows.of(y), y)


def test_a_nested_tensor_is_run_and_named() -> None:
    mode = ShadowMode()
    with mode:
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
        dense = (nested * 2).to_padded_tensor(0.0)
    assert float(dense.sum()) == 36


def test_a_meta_and_a_fake_tensor_pass_through() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = ShadowMode()
    with mode:
        assert (torch.empty(3, device="meta") * 2).shape == (3,)
        with FakeTensorMode():
            assert (torch.ones(3).half() * 2).shape == (3,)


class Wrapped(torch.Tensor):
    """A tensor class with operations of its own, on the tensor that it holds."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = operations.mapped((args, kwargs or {}), lambda t: t.held if isinstance(t, cls) else t)
        return op(*plain[0], **plain[1])


def test_a_tensor_class_with_operations_of_its_own_is_a_blind_spot() -> None:
    mode = ShadowMode()
    with mode:
        y = torch.sin(Wrapped(torch.ones(3).half()))
    assert torch.equal(y, torch.ones(3).half().sin())
    assert mode.unreplayed == {"aten.sin: an operand is Wrapped"}
    assert torch.equal(mode.shadows.of(y), y.float())


@pytest.fixture
def library() -> Iterator[Any]:
    with torch.library._scoped_library("overflow_lab_test", "FRAGMENT") as made:
        yield made


def test_a_custom_operator_is_seen_as_one_and_replayed(library: Any) -> None:
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 0.3 + x, "CompositeExplicitAutograd")
    mode, result = run(lambda x: torch.ops.overflow_lab_test.twice(x), values((3,)), torch.bfloat16)
    torch.testing.assert_close(mode.shadows.of(result), values((3,))[0] * 1.3)
    assert [key[1] for key in mode.notes.sites] == ["overflow_lab_test.twice"]


def test_a_custom_operator_that_draws_is_not_drawn_twice(library: Any) -> None:
    library.define("noisy(Tensor x) -> Tensor")
    library.impl("noisy", lambda x: x + torch.rand_like(x), "CompositeExplicitAutograd")
    torch.manual_seed(0)
    wanted, after = torch.ops.overflow_lab_test.noisy(torch.ones(3).half()), torch.get_rng_state()
    torch.manual_seed(0)
    mode, result = run(lambda x: torch.ops.overflow_lab_test.noisy(x), [torch.ones(3)], torch.float16)
    assert torch.equal(result, wanted)
    assert torch.equal(torch.get_rng_state(), after)
    assert any("random" in reason for reason in mode.unreplayed)


def test_an_operation_that_fails_on_the_shadow_is_a_blind_spot(library: Any) -> None:
    def half_only(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float16:
            raise RuntimeError("half only")
        return x * 0.3

    library.define("half_only(Tensor x) -> Tensor")
    library.impl("half_only", half_only, "CompositeExplicitAutograd")
    mode, result = run(lambda x: torch.ops.overflow_lab_test.half_only(x) * 1, values((3,)), torch.float16)
    assert [reason for reason in mode.unreplayed if "half only" in reason]
    torch.testing.assert_close(mode.shadows.of(result), result.float())


def test_a_compiled_module_runs_under_the_shadow() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).half().eval()
    compiled = torch.compile(model, backend="aot_eager")
    x, mode = torch.ones(2, 3).half(), ShadowMode()
    with torch.no_grad(), mode:
        got = compiled(x)
    torch.testing.assert_close(got, model(x))


def test_a_scripted_module_a_checkpoint_and_a_generator_are_followed() -> None:
    scripted = torch.jit.trace(nn.Linear(3, 3), torch.ones(2, 3)).bfloat16()

    def program(x: torch.Tensor) -> Any:
        yield checkpoint(torch.tanh, x * 0.3, use_reentrant=False)
        yield scripted(x)

    mode, result = run(lambda x: list(program(x)), values((2, 3)), torch.bfloat16)
    torch.testing.assert_close(mode.shadows.of(result[0]), (values((2, 3))[0] * 0.3).tanh())
    assert mode.unreplayed == set()


def test_an_operator_of_a_higher_order_is_a_blind_spot() -> None:
    def program(x: torch.Tensor) -> Any:
        return torch.ops.higher_order.cond(x.sum() > 0, lambda x: x * 0.5, lambda x: x * 2.0, (x,))

    mode = ShadowMode()
    x = torch.ones(3).half()
    with mode:
        got = program(x)
    assert torch.equal(got, x * 0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_huge_values_do_not_overflow_the_comparison(dtype: torch.dtype) -> None:
    mode, _ = run(lambda x: x * 1.5, [torch.full((4,), 1e30)], dtype)
    (site,) = mode.notes.sites.values()
    assert site.absmax == pytest.approx(1.5e30)
    assert site.error < 0.01


def test_a_complex_overflow_is_an_event() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.complex((x * x).float(), x.float()) * 2

    mode, _ = run(program, [torch.full((3,), 300.0)], torch.float16)
    assert mode.notes.events["bad", ("", "aten.mul", 0)].inf == 3
    assert mode.unreplayed == set()


def test_a_float64_program_has_float64_shadows() -> None:
    mode = check(lambda x: x * 0.1 - x.mean(), [values((3, 4))[0].double()], torch.float64)
    assert mode.notes.events == {}


def test_storage_that_grows_keeps_what_was_known() -> None:
    mode = ShadowMode()
    x, exact = torch.tensor([0.1, 0.2]).half(), torch.tensor([0.1, 0.2])
    mode.shadows.give(x, exact.clone())
    with mode:
        x.resize_(4)
        x[2:] = 0
        y = torch.empty(0).half().set_(x) * 1  # type: ignore[call-overload]
    torch.testing.assert_close(mode.shadows.of(y)[:2], exact)
    assert mode.shadows.of(y)[2:].tolist() == [0, 0]


def test_bits_that_are_written_as_integers_begin_anew() -> None:
    mode = ShadowMode()
    with mode:
        x = torch.ones(3).half() * 0.1
        x.view(torch.int16).bitwise_and_(0)
        y = x + 1
    assert mode.shadows.of(y).tolist() == [1, 1, 1]


def test_memory_with_shared_elements_begins_with_its_own_values() -> None:
    mode = ShadowMode()
    with mode:
        x = torch.empty_strided((3, 2), (0, 1), dtype=torch.float16)
        y = torch.ones(2).half().expand(3, 2) * 0.3
    assert mode.shadows.of(x).shape == (3, 2)
    torch.testing.assert_close(mode.shadows.of(y), torch.full((3, 2), 0.3))


def test_a_missing_kernel_that_writes_is_done_in_float32() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.clone().geqrf()[0]

    mode, result = run(program, values((3, 3)), torch.bfloat16)
    assert result.dtype == torch.bfloat16
    assert any(what == "unsupported" for what, _ in mode.notes.events)
    torch.testing.assert_close(mode.shadows.of(result), torch.geqrf(values((3, 3))[0])[0])

"""The local error of an operation: what it adds by itself, whatever its operands bring along."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from overflow_lab.capture.shadow.dispatch import ShadowMode
from overflow_lab.capture.shadow.sites import Site
from tests.shadowed import HALVES, run, values

Program = Callable[..., torch.Tensor]


def measured(program: Program, given: list[torch.Tensor], dtype: torch.dtype) -> tuple[ShadowMode, list[Site]]:
    """Run a program of which every operand is off by its cast; return the sites in order."""
    mode = ShadowMode()
    low = [value.to(dtype) for value in given]
    for tensor, value in zip(low, given, strict=True):
        mode.shadows.give(tensor, value.clone()).error = 1e-3
    with mode:
        program(*low)
    mode.shadows.close()
    return mode, sorted(mode.notes.sites.values(), key=lambda site: site.order)


def truth(program: Program, given: list[torch.Tensor], dtype: torch.dtype) -> float:
    """Return the relative error of one operation against float64 on the same cast operands."""
    low = [value.to(dtype) for value in given]
    exact = program(*[value.double() for value in low])
    return float((program(*low).double() - exact).norm() / exact.norm())


PROGRAMS: dict[str, tuple[Program, list[torch.Tensor]]] = {
    "mm": (torch.mm, values((6, 40), (40, 7))),
    "addmm": (torch.addmm, values((7,), (6, 40), (40, 7))),
    "bmm": (torch.bmm, values((3, 6, 40), (3, 40, 7))),
    "add": (torch.add, values((6, 7), (6, 7))),
    "broadcast": (torch.mul, values((6, 7), (7,))),
    "exp": (torch.exp, values((6, 7))),
    "softmax": (lambda x: torch.softmax(x, -1), values((6, 7))),
    "softmax over rows": (lambda x: torch.softmax(x, 0), values((6, 7))),
    "mean": (lambda x: x.mean(-1), values((6, 70))),
    "mean of all": (torch.mean, values((60, 70))),
    "sum over rows": (lambda x: x.sum(0), values((60, 7))),
    "conv1d": (F.conv1d, values((2, 3, 20), (4, 3, 5))),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_the_error_against_float64_on_the_programs_own_operands(name: str, dtype: torch.dtype) -> None:
    program, given = PROGRAMS[name]
    _, sites = measured(program, given, dtype)
    assert len(sites) == 1
    assert sites[0].local_error == pytest.approx(truth(program, given, dtype), rel=0.02, abs=1e-6)
    assert sites[0].error > (sites[0].local_error or 0.0) * 0.5


def test_of_several_results_the_worst_is_told() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (7,))  # the operation returns the mean and the scale too, rounded as well

    given = values((6, 7))
    _, sites = measured(program, given, torch.bfloat16)
    assert (sites[0].local_error or 0.0) >= 0.98 * truth(program, given, torch.bfloat16)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("program", "shapes"),
    [
        (torch.mm, [(3000, 64), (64, 700)]),
        (torch.addmm, [(700,), (3000, 64), (64, 700)]),
        (torch.bmm, [(300, 20, 16), (300, 16, 30)]),
        (torch.add, [(3000, 100), (3000, 100)]),
        (torch.add, [(3000, 100), (100,)]),
        (torch.sub, [(3000, 100), (1, 100)]),
        (lambda x: torch.softmax(x, -1), [(3000, 100)]),
        (lambda x: x.sum(-1), [(3000, 100)]),
        (lambda x: F.layer_norm(x, (100,)), [(3000, 100)]),
    ],
)
def test_of_many_rows_some_are_measured_and_say_as_much(
    program: Program, shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    given = values(*shapes)
    _, sites = measured(program, given, dtype)
    assert sites[0].local_error == pytest.approx(truth(program, given, dtype), rel=0.1)


def test_it_tells_who_rounds_from_who_inherits() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        counted = x + 256.0  # loses all that is below 1 in bfloat16
        return (counted * 2.0).neg()  # exact

    _, (add, mul, neg) = measured(program, values((4, 5)), torch.bfloat16)
    assert (add.local_error or 0.0) > 1e-3
    assert (mul.local_error, neg.local_error) == (0.0, 0.0)
    assert mul.error == pytest.approx(mul.error_in) == pytest.approx(add.error)


def test_an_operation_in_place_is_measured_on_what_was_there_before() -> None:
    given = values((4, 5), (4, 5))

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.add_(y)

    _, sites = measured(program, given, torch.bfloat16)
    assert sites[0].local_error == pytest.approx(truth(torch.add, given, torch.bfloat16), rel=0.02)


def test_exact_operands_leave_no_difference_between_the_two() -> None:
    mode, _ = run(torch.exp, [torch.ones(4, 5)], torch.bfloat16)
    site = next(iter(mode.notes.sites.values()))
    assert site.local_error == site.error > 0
    mode.shadows.close()


def test_a_loop_is_measured_in_its_first_calls() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            x = x * 1.01
        return x

    mode, sites = measured(program, values((4, 5)), torch.bfloat16)
    assert all(site.local_error for site in sites)
    assert sum(site.calls for site in sites) == 40
    assert mode.unreplayed == set()

"""The tape's rows: the same tensor's row, draining, merging; what it refuses. By each kernel."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from overflow_lab.capture import devices
from overflow_lab.capture.statistics import Rows, Tape, eager
from overflow_lab.errors import UsageError
from overflow_lab.ranges import Range
from tests.test_statistics import CPU, KERNELS, assert_alike, by_definition, normal, numbers

pytestmark = pytest.mark.parametrize("kernel", KERNELS)


def test_an_unchanged_tensor_gets_the_row_it_has(kernel: str) -> None:
    tape, tensor = Tape(CPU, kernel=kernel), normal(10)
    assert tape.measure(tensor) == tape.measure(tensor) == 0
    assert tape.measure(tensor.clone()) == 1
    assert len(tape) == 2


def test_a_tensor_changed_in_place_gets_a_new_row(kernel: str) -> None:
    tape, tensor = Tape(CPU, kernel=kernel), torch.ones(10)
    before = tape.measure(tensor)
    tensor.add_(1)
    after = tape.measure(tensor)
    tensor.data = torch.full((10,), 3.0)
    swapped = tape.measure(tensor)
    rows = tape.drain()
    assert [rows.row(index).sum for index in (before, after, swapped)] == [10.0, 20.0, 30.0]


def test_a_dead_tensor_does_not_lend_its_row_to_a_new_one_at_its_address(kernel: str) -> None:
    tape = Tape(CPU, kernel=kernel)
    rows = [tape.measure(torch.full((4,), float(n))) for n in range(50)]
    drained = tape.drain()
    assert [drained.row(row).max for row in rows] == [float(n) for n in range(50)]


def test_inference_tensors_are_always_measured(kernel: str) -> None:
    tape = Tape(CPU, kernel=kernel)
    with torch.inference_mode():
        tensor = torch.ones(3)
        first = tape.measure(tensor)
        tensor.add_(1)
        assert tape.measure(tensor) != first


def test_draining_clears_the_tape_and_its_memory_of_tensors(kernel: str) -> None:
    tape, tensor = Tape(CPU, kernel=kernel), normal(10)
    tape.measure(normal(5))
    tape.measure(tensor)
    first = tape.drain()
    assert (len(first), len(tape)) == (2, 0)
    assert tape.measure(tensor) == 0
    assert tape.drain().row(0) == first.row(1)
    assert len(tape.drain()) == 0


def test_many_rows_keep_their_order(kernel: str) -> None:
    tape = Tape(CPU, kernel=kernel)
    for n in range(600):
        tape.measure(torch.full((2,), float(n)))
    assert tape.drain().max.tolist() == [float(n) for n in range(600)]


def test_merged_rows_are_the_row_of_the_concatenation(kernel: str) -> None:
    tape = Tape(CPU, kernel=kernel)
    odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1e-44, -7.0])
    parts = [normal(100), normal(3000) * 100, odd, torch.empty(0), normal(64).relu()]
    rows_of = [tape.measure(part) for part in parts]
    groups = [[0, 1, 2], [3], [2, 4, 4], [], [1]]
    row_ids = [rows_of[part] for group in groups for part in group]
    group_ids = [index for index, group in enumerate(groups) for _ in group]
    for merged, group in zip(tape.drain().merge(row_ids, group_ids), groups, strict=True):
        together = torch.cat([parts[part] for part in group]) if group else torch.empty(0)
        assert_alike(merged, by_definition(numbers(together)), magnitude=1e5)


def test_merging_agrees_with_adding_ranges(kernel: str) -> None:
    tape = Tape(CPU, kernel=kernel)
    for part in normal(40, 90).unbind():
        tape.measure(part)
    rows = tape.drain()
    added = sum((rows.row(index) for index in range(40)), Range())
    (merged,) = rows.merge(np.arange(40), np.zeros(40))
    assert_alike(merged, added, magnitude=90 * 40)


@pytest.mark.parametrize(
    ("row_ids", "group_ids", "message"),
    [([0], [0, 1], "1 row ids for 2"), ([1], [0], "from 0 to 0"), ([-1], [0], "from 0"), ([0], [-1], "not negative")],
)
def test_merging_what_is_not_there_is_an_error(
    kernel: str, row_ids: list[int], group_ids: list[int], message: str
) -> None:
    tape = Tape(CPU, kernel=kernel)
    tape.measure(torch.ones(1))
    with pytest.raises(UsageError, match=message):
        tape.drain().merge(row_ids, group_ids)


def test_merging_nothing_gives_nothing(kernel: str) -> None:
    assert Tape(CPU, kernel=kernel).drain().merge([], []) == []


def test_a_tensor_elsewhere_sparse_or_without_memory_is_refused_and_leaves_no_row(kernel: str) -> None:
    tape = Tape(CPU, kernel=kernel)
    with pytest.raises(UsageError, match=r"on meta with a tape for cpu"):
        tape.measure(torch.empty(3, device="meta"))
    with pytest.raises(UsageError, match="sparse_coo"):
        tape.measure(torch.eye(3).to_sparse())
    freed = torch.ones(100)
    freed.untyped_storage().resize_(0)
    with pytest.raises(UsageError, match="without memory"):
        tape.measure(freed)
    assert len(tape) == 0


def test_an_unknown_kernel_is_refused(kernel: str) -> None:
    with pytest.raises(UsageError, match=r"'cuda'.*auto, triton, llvm, eager"):
        Tape(CPU, kernel="cuda")


def test_float32_words_are_understood_where_a_device_has_no_float64(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "has_float64", lambda device: False)
    tensor = torch.tensor([1.5, -2.5, 0.0, math.inf])
    words = eager.measure(tensor)[None].numpy()
    assert Rows.from_words(words, wide=False).row(0) == by_definition(numbers(tensor))

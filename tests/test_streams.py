"""Which outputs are the residual stream: by what blocks hand on to each other, whatever they are called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import overflow_lab
from overflow_lab.analysis.frame import layers
from overflow_lab.recording import RangeRow, Recording
from tests.sample_recording import sample_recording

X = torch.linspace(-2.0, 2.0, 24).reshape(6, 4)


class Block(nn.Module):
    """A residual block around a branch; `sublayers` of them in a list where there are more."""

    def __init__(self, sublayers: int = 0) -> None:
        super().__init__()
        self.branch = nn.Linear(4, 4)
        self.sub = nn.ModuleList(Block() for _ in range(sublayers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.sub:
            x = layer(x)
        return torch.add(x, self.branch(x))


class Stack(nn.Module):
    """Blocks that are used as a function says."""

    def __init__(self, blocks: list[nn.Module], use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body = nn.ModuleList(blocks)
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.body, x)


def one_after_the_other(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def beside_each_other(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([block(x) for block in blocks]).sum(0)


def experts(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([block(part) for block, part in zip(blocks, x.chunk(len(blocks)), strict=True)])


def named(model: nn.Module) -> dict[str, str]:
    torch.manual_seed(1)
    frame = layers(overflow_lab.scan(model, (X,), precisions=["float16"], level="module").recording)
    marked = frame[frame["stream"] != ""]
    return dict(zip(marked["module"], marked["stream"], strict=True))


def test_blocks_that_hand_on_to_each_other_are_a_stream() -> None:
    stack = Stack([Block() for _ in range(3)], one_after_the_other)
    assert named(stack) == {"body.0": "body", "body.1": "body", "body.2": "body"}


@pytest.mark.parametrize("use", [beside_each_other, experts])
def test_blocks_beside_each_other_are_branches(use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    assert named(Stack([Block() for _ in range(3)], use)) == {}


def test_blocks_of_several_classes_and_the_sublayers_in_them_are_of_one_stream() -> None:
    stack = Stack([Block(2), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), Block(3)], one_after_the_other)
    found = named(stack)
    assert set(found.values()) == {"body"}
    assert set(found) == {
        "body.0",
        "body.1",
        "body.2",
        *(f"body.{b}.sub.{n}" for b, n in ((0, 0), (0, 1), (2, 0), (2, 1), (2, 2))),
    }


def test_leaves_and_a_single_block_are_none() -> None:
    assert named(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == {}
    assert named(Stack([Block()], one_after_the_other)) == {}


def test_two_stacks_are_two_streams() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Stack([Block(), Block()], one_after_the_other)
            self.decoder = Stack([Block(), Block()], one_after_the_other)

        def forward(self, x: torch.Tensor) -> Any:
            return self.decoder(self.encoder(x))

    assert set(named(Two()).values()) == {"encoder.body", "decoder.body"}


def _without_inputs(recording: Recording) -> Recording:
    rows = [row for row in recording.rows if not (isinstance(row, RangeRow) and row.port.startswith("input"))]
    return dataclasses.replace(recording, rows=tuple(rows))


def test_without_inputs_outermost_blocks_of_one_class_are_taken() -> None:
    frame = layers(_without_inputs(sample_recording()))
    marked = frame[frame["stream"] != ""]
    assert list(marked["module"]) == [
        *(f"encoder.block.{n}" for n in range(3)),
        *(f"decoder.block.{n}" for n in range(2)),
    ]
    assert set(marked["class_name"]) == {"T5Block"}


def test_a_stream_of_tuples_is_that_of_the_port_that_is_handed_on() -> None:
    class Tupled(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.ones(3), super().forward(x)

    def use(blocks: Any, x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            _, x = block(x)
        return x

    torch.manual_seed(1)
    model = Stack([Tupled(), Tupled(), Tupled()], use)
    frame = layers(overflow_lab.scan(model, (X,), precisions=["float16"], level="module").recording)
    assert list(frame[frame["stream"] != ""]["port"]) == ["output[1]"] * 3

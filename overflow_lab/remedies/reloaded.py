"""Whether a checkpoint that was just written gives what the model in memory gives, bit by bit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overflow_lab.capture.precisions import device_of
from overflow_lab.capture.randomness import kept_random_state
from overflow_lab.capture.record import Recorder
from overflow_lab.capture.runs import Reference, RunFailed, Watched, watched
from overflow_lab.errors import OverflowLabError, one_line
from overflow_lab.recording import Header
from overflow_lab.recording.writer import Writer
from overflow_lab.subjects import Subject
from overflow_lab.subjects.quiet import quiet_loading

# The first batches tell: the weights are compared in full.
BATCHES = 2


@dataclass(frozen=True)
class Same:
    """How much was compared, all of it bit-identical: tensors of the checkpoint, inputs run, answers generated.

    `failed` is why the runs could not be compared, where they could not: then only the weights were.
    """

    tensors: int
    inputs: int = 0
    answers: int = 0
    failed: str = ""


def compare_reloaded(subject: Subject, made: Watched, folder: Path, *, trust_remote_code: bool = False) -> Same:
    """Load `folder` with transformers alone and compare it with the model in `made`, which was saved there.

    Weights and buffers by dtype and bits, then outputs and answers on the first inputs. Raises OverflowLabError, naming
    what differs.
    """
    model: Any = made.prepared.model
    loaded = _loaded(model, folder, trust_remote_code).to(device_of(model))
    count = _same_weights(model, loaded)
    again = watched(dataclasses.replace(made.prepared, model=loaded))
    with kept_random_state(), torch.no_grad():
        return _same_outputs(subject, made, again, count)


def _loaded(model: Any, folder: Path, trust_remote_code: bool) -> nn.Module:
    """Load as a user does who says no more than the folder: the dtype is the config's."""
    more: dict[str, Any] = {"trust_remote_code": True} if trust_remote_code else {}
    attention = getattr(model.config, "_attn_implementation", None)
    if attention is not None:
        more["attn_implementation"] = attention
    try:
        with quiet_loading():
            return type(model).from_pretrained(folder, dtype="auto", local_files_only=True, **more)  # type: ignore[no-any-return]
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise OverflowLabError(
            f"the checkpoint that was written cannot be loaded ({one_line(error)}); nothing was kept."
        ) from error


def _same_weights(model: nn.Module, loaded: nn.Module) -> int:
    """Return how many tensors are the same by name, dtype and bits.

    Raises OverflowLabError for the first that is not.
    """
    expected, found = _tensors(model), _tensors(loaded)
    for name, tensor in expected.items():
        other = found.get(name)
        if other is None or other.dtype != tensor.dtype or not _same(tensor, other):
            what = "is missing" if other is None else f"is another ({other.dtype}, was {tensor.dtype})"
            raise OverflowLabError(f"{name} {what} when the checkpoint is loaded again; nothing was kept.")
    return len(expected)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _same_outputs(subject: Subject, made: Watched, again: Watched, count: int) -> Same:
    recorder = Recorder(subject, (), Writer(None, Header(1, "", "", {}, ())))
    inputs = answers = 0
    for number, batch in enumerate(islice(subject.batches, BATCHES)):
        try:
            # The low precision takes the place of the reference: the question is not how good it is.
            first = recorder.reference(made, number, batch)
            other = _difference(subject, first, again)
            if other and not _difference(subject, first, made):
                raise OverflowLabError(f"the checkpoint, loaded again, gives another {other}; nothing was kept.")
        except RunFailed as failure:
            return Same(count, inputs, answers, failed=failure.row.error)
        if other:  # atomic additions on a GPU, say
            return Same(count, inputs, answers, failed=f"its own {other} differs from run to run")
        inputs += batch.samples
        answers += sum(len(found.tokens) for found in first.answers.values())
    return Same(count, inputs, answers)


def _difference(subject: Subject, first: Reference, again: Watched) -> str:
    """Return the first output, or the search, that gives something else in another run; "" where all is the same."""
    found = again.forward(first, fill=True).tensors
    for port, tensor in first.outputs.tensors.items():
        if port not in found or not _same(tensor, found[port]):
            return port
    generation = subject.generation
    for strategy, answers in first.answers.items():
        assert generation is not None
        if again.generate(strategy, first, generation).tokens != answers.tokens:
            return f"answer by {strategy} search"
    return ""


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal, NaN where the other has NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())

"""Applies a set of members to a model in a low precision, in place; and to a subject, whose loads are then so."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import nn

from overflow_lab.capture.precisions import Precision, parse_precision
from overflow_lab.remedies.islands.keep import Undo, keep
from overflow_lab.remedies.islands.members import Members, modules_of, open_of
from overflow_lab.remedies.islands.operations import WideMode, run_under

if TYPE_CHECKING:
    from overflow_lab.subjects import Subject


def border(precision: Precision) -> torch.dtype | None:
    """Return the dtype in which an island gives its outputs; None under autocast, which narrows by itself."""
    return None if precision.cast == "autocast" else precision.torch_dtype()


def apply(model: nn.Module, original: nn.Module, members: Members, precision: Precision) -> Undo:
    """Let the members of a model run in float32, in place; return what undoes it, to be called in order."""
    undo = keep(model, original, modules_of(members), border(precision), open_paths=open_of(members))
    if any(member.op for member in members):
        undo = [*run_under(model, WideMode(precision.torch_dtype(), members)), *undo]
    return undo


def mended(subject: Subject, members: Members, precision: str) -> Subject:
    """Return the subject whose model, in that precision (and its variants `-to`, `-autocast`), has the islands."""
    before = subject.adapt
    dtype = parse_precision(precision).dtype

    def adapt(model: nn.Module, name: str) -> nn.Module:
        model = model if before is None else before(model, name)
        run = parse_precision(name)
        if run.dtype == dtype:
            apply(model, subject.load(None), members, run)
        return model

    return dataclasses.replace(subject, adapt=adapt)

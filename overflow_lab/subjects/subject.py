"""The value that every kind of subject becomes before it is captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Batch:
    """The arguments of one call of the model, and how much they hold.

    `inputs` are keyword arguments and `positional` positional ones, on the device of the model, floats in float32;
    `samples` counts inputs, `tokens` elements that are not padding (0 where the notion does not apply); `texts` are the
    prompts, kept in memory only for display on request.
    """

    inputs: Mapping[str, Any] = field(default_factory=dict)
    positional: tuple[Any, ...] = ()
    samples: int = 1
    tokens: int = 0
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Generation:
    """How a generative subject is asked to answer.

    `strategies` names the searches ("greedy", "beam"); `settings` are passed to `generate` for each (num_beams,
    max_new_tokens, ...); `decode` turns generated token ids into text; `encoder_decoder` tells seq2seq models apart,
    whose answers begin with the token `start`.
    """

    strategies: Mapping[str, Mapping[str, Any]]
    decode: Callable[[Sequence[int]], str] | None = None
    encoder_decoder: bool = False
    padding: int | None = None
    ends: tuple[int, ...] = ()
    start: int | None = None


@dataclass(frozen=True)
class Subject:
    """What is scanned.

    `load(dtype)` returns the model in the state in which the user has it: `load(None)` in the precision it comes in,
    cast to float32; `load(torch.float16)` as its own loader casts it. Subjects that are a module in memory return
    copies, so the user's module is never touched. `loader_casts` says that the loader's cast may differ from
    `.to(dtype)`. `adapt(model, precision)` is what a remedy does to a model that was just brought into a low precision
    (layers kept in float32, values clamped); it may change that model, which is a copy, and returns it. None for a
    subject as the user has it. `save(model, folder)` writes a model that `load` gave, changed or not, as a checkpoint
    that transformers loads, with the tokenizer and processor of this one; None where there is no checkpoint (see
    `remedies.checkpoint`, which does so without leaving half a folder). `kernels` says how float16's products are done
    on a CPU: "native", "emulated", or "auto" (see `capture.emulated`).
    """

    name: str
    kind: str
    load: Callable[[torch.dtype | None], torch.nn.Module]
    batches: Iterable[Batch]
    generation: Generation | None = None
    loader_casts: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    adapt: Callable[[torch.nn.Module, str], torch.nn.Module] | None = None
    save: Callable[[torch.nn.Module, Path], None] | None = None
    kernels: str = "auto"

"""How a subject is to be found, loaded and fed: one frozen value for all kinds of subjects."""

from __future__ import annotations

from dataclasses import dataclass

KERNELS = ("auto", "native", "emulated")


@dataclass(frozen=True)
class SubjectOptions:
    """What the user may say about a subject; the defaults suit a model of unknown kind.

    `texts` replace the built-in inputs, and so does `inputs_file` (txt, jsonl, csv, parquet), of which `column` names
    one column and `template` ("{question} {context}") joins several. `task` overrules the task read from the config
    (see `tasks.TASKS`). `max_length` counts tokens. `generate` asks generative models to answer, too, by greedy search
    and by a beam search of `num_beams`, `max_new_tokens` long. `allow_pickle` lets weights be read that are not
    safetensors. `device_map` "auto" lets accelerate keep weights beyond `max_memory` ("8GB", of the CPU's; None is a
    share of what is free) on disk and read them at each forward. `kernels` says how float16's products are done on a
    CPU: "native", "emulated" (in float32, rounded once), or "auto": emulated where the CPU has no float16 arithmetic.
    """

    texts: tuple[str, ...] | None = None
    inputs_file: str | None = None
    column: str | None = None
    template: str | None = None
    task: str | None = None
    batch_size: int = 4
    max_length: int | None = None
    num_beams: int = 4
    max_new_tokens: int = 32
    generate: bool = True
    revision: str | None = None
    subfolder: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    device: str = "cpu"
    attn_implementation: str | None = None
    device_map: str | None = None
    max_memory: str | None = None
    kernels: str = "auto"

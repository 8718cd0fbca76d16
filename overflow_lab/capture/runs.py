"""One precision's runs: the plain forward and `generate`, watched, with what they gave or how they failed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from overflow_lab.capture.answers import Answers, answers_of, first_difference
from overflow_lab.capture.devices import wait_for
from overflow_lab.capture.emulated import products
from overflow_lab.capture.margins import Forced, Step, search_margin, step_margin
from overflow_lab.capture.module_ranges import ModuleRanges
from overflow_lab.capture.outputs import Outputs, mask_of, outputs_of
from overflow_lab.capture.ports import Ports
from overflow_lab.capture.positions import RealPositions
from overflow_lab.capture.precisions import Prepared, device_of
from overflow_lab.capture.randomness import reseed
from overflow_lab.capture.samples import Differences, Samples
from overflow_lab.capture.statistics import Tape
from overflow_lab.capture.steps import StepLog, Steps
from overflow_lab.capture.unsupported import is_unsupported
from overflow_lab.errors import one_line
from overflow_lab.formats import FORMATS
from overflow_lab.recording import STEP_BATCHES, FailureRow, RunRow
from overflow_lab.subjects import Batch, Generation
from overflow_lab.tolerances import tolerance

# What a plain forward is given, and `generate` makes or refuses.
_FORWARD_ALONE = frozenset({"labels", "decoder_input_ids", "decoder_attention_mask"})


class RunFailed(Exception):
    """The model raised in a run; `row` says how. Carries the cause."""

    def __init__(self, row: FailureRow) -> None:
        super().__init__(row.error)
        self.row = row


@dataclass
class Reference:
    """What float32 gave for one batch: the inputs of the plain forward, its output, samples and answers."""

    number: int
    batch: Batch
    inputs: Mapping[str, Any] = field(default_factory=dict)
    outputs: Outputs = field(default_factory=lambda: Outputs({}))
    samples: Samples = field(default_factory=Samples)
    answers: dict[str, Answers] = field(default_factory=dict)
    steps: list[list[Step]] = field(default_factory=list)
    logs: dict[str, StepLog] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes held for comparison."""
        return self.outputs.nbytes + self.samples.nbytes + sum(log.nbytes for log in self.logs.values())


@dataclass
class Watched:
    """A prepared model with what is collected about its runs."""

    prepared: Prepared
    ports: Ports
    differences: Differences
    called: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)
    ticks: dict[tuple[str, int], int] = field(default_factory=dict)
    log: StepLog = field(default_factory=StepLog)

    @property
    def precision(self) -> str:
        """The precision's name."""
        return self.prepared.precision.name

    def timed(self, batches: Sequence[Batch]) -> list[RunRow]:
        """Return a row for each kind of run on these batches."""
        inputs, tokens = sum(batch.samples for batch in batches), sum(batch.tokens for batch in batches)
        made = []
        for name, took in self.seconds.items():
            ticks = sum(ticks for (kind, _), ticks in self.ticks.items() if kind == name)
            made.append(RunRow(self.precision, name, len(batches), inputs, tokens, round(took, 3), ticks))
        return made

    @property
    def tolerance(self) -> float:
        """The relative error of an output that is taken as the precision's own rounding."""
        return tolerance(FORMATS[self.prepared.precision.dtype])

    def forward(self, reference: Reference, *, fill: bool) -> Outputs:
        """Call the model on one batch; with `fill` the samples are kept, otherwise they are compared against."""
        inputs = self.prepared.inputs(dict(reference.inputs))
        positional = self.prepared.inputs(reference.batch.positional)
        if fill:
            reference.samples.positions = RealPositions.in_inputs(reference.inputs)
        watch = ModuleRanges(
            self.prepared.model, self.ports, samples=reference.samples, differences=None if fill else self.differences
        )
        output = self._run(watch, "forward", reference.number, lambda: self.prepared.model(*positional, **inputs))
        return outputs_of(output, mask_of(reference.inputs), self.unknown, positions=reference.samples.positions)

    def generate(self, strategy: str, reference: Reference, generation: Generation) -> Answers:
        """Let the model answer one batch by one strategy; `log` then holds its steps."""
        inputs = self._prompt(reference)
        settings = dict(generation.strategies[strategy])
        model: Any = self.prepared.model
        watch = ModuleRanges(model, self.ports)
        with Steps(model, kept=reference.number < STEP_BATCHES) as steps:
            self.log = steps.log
            sequences = self._run(watch, strategy, reference.number, lambda: model.generate(**inputs, **settings))
        return answers_of(getattr(sequences, "sequences", sequences), reference.batch, generation)

    def _prompt(self, reference: Reference) -> dict[str, Any]:
        """Return the inputs of a batch that `generate` takes."""
        given = {name: value for name, value in reference.batch.inputs.items() if name not in _FORWARD_ALONE}
        return dict(self.prepared.inputs(given))

    def margins(self, strategy: str, reference: Reference, generation: Generation, low: Answers) -> list[float | None]:
        """Return, for each answer that differs from this precision's own, its margin; None where there is none."""
        expected = reference.answers[strategy].tokens
        apart = [first_difference(a, b) for a, b in zip(low.tokens, expected, strict=False)]
        if not any(step is not None for step in apart):
            return []
        steps = self._scored(reference, generation, low)
        if generation.strategies[strategy].get("num_beams", 1) == 1:
            return [step_margin(noted, step) for noted, step in zip(steps, apart, strict=False)]
        if not reference.steps:
            reference.steps = self._scored(reference, generation, reference.answers[strategy])
        pairs = zip(reference.steps, steps, apart, strict=False)
        return [None if step is None else search_margin(own, other) for own, other, step in pairs]

    def _scored(self, reference: Reference, generation: Generation, answers: Answers) -> list[list[Step]]:
        """Return how this precision scores given answers; empty where its `generate` cannot be led along them."""
        inputs = self._prompt(reference)
        settings = {**generation.strategies["greedy"], "num_beams": 1}
        forced = Forced(answers.tokens)
        model: Any = self.prepared.model
        reseed()
        try:
            with self.prepared.context():
                output = model.generate(**inputs, **settings, logits_processor=[forced])
        except Exception:  # a `generate` of its own that takes no processor: then the margins are unknown
            return []
        led = answers_of(getattr(output, "sequences", output), reference.batch, generation)
        return forced.steps if led == answers else []

    def _run(self, watch: ModuleRanges, run: str, number: int, call: Callable[[], Any]) -> Any:
        """Run `call` watched; an exception of the model becomes RunFailed, and what was seen until then is kept."""
        reseed()
        self.ports.begin(run, number)
        began, clock = time.perf_counter(), self.ports.clock
        try:
            emulated = products(self.prepared) if run == "forward" else contextlib.nullcontext()
            with watch, self.prepared.context(), emulated:
                return call()
        except MemoryError:
            raise
        except Exception as error:
            # What torch raises on the CPU is a plain RuntimeError.
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                raise MemoryError(one_line(error)) from error
            where = watch.path.failed_at or ""
            row = FailureRow(self.precision, run, number, where, one_line(error), unsupported=is_unsupported(error))
            raise RunFailed(row) from error
        finally:
            wait_for(self.ports.tape.device)
            self.seconds[run] = self.seconds.get(run, 0.0) + time.perf_counter() - began
            self.ticks[run, number] = self.ticks.get((run, number), 0) + self.ports.clock - clock
            self.called |= watch.path.called
            self.refused |= set(watch.path.refused)
            self.unknown |= watch.unknown
            self.ports.settle()
            self.differences.settle()


def watched(prepared: Prepared, ports: Ports | None = None) -> Watched:
    """Return the prepared model with empty collections, or with the ports of earlier batches."""
    name = prepared.precision.name
    return Watched(prepared, ports or Ports(name, Tape(device_of(prepared.model))), Differences(name))

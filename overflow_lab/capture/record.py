"""Runs a subject in float32 and in each precision, batch by batch, and writes the recording."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from overflow_lab.capture import runs
from overflow_lab.capture.answers import AnswerContext, Answers, answer_rows
from overflow_lab.capture.inside import Inside
from overflow_lab.capture.model_rows import module_rows, uncalled_rows
from overflow_lab.capture.noise import noise_row
from overflow_lab.capture.outputs import compare_outputs, has_nan
from overflow_lab.capture.ports import Ports
from overflow_lab.capture.precisions import REFERENCE, Precision, device_of, parse_precision, prepare
from overflow_lab.capture.randomness import kept_random_state
from overflow_lab.capture.runs import Reference, RunFailed, Watched
from overflow_lab.capture.share import Share
from overflow_lab.capture.statistics import Tape
from overflow_lab.capture.steps import StepLog, step_rows
from overflow_lab.capture.weights import Named, cast_rows, named_tensors, tensor_rows
from overflow_lab.errors import OverflowLabError, one_line
from overflow_lab.progress import Progress, Silent
from overflow_lab.recording import BlindSpotRow, OutputRow, PrecisionRow, RunRow, TensorRow
from overflow_lab.recording.writer import Writer
from overflow_lab.subjects import Batch, Subject
from overflow_lab.subjects.containers import tensors
from overflow_lab.tolerances import TIES

# A model with one of these needs no tokens for its decoder: it has them, or makes them of the labels.
_DECODED = frozenset({"decoder_input_ids", "decoder_inputs_embeds", "labels"})

# Above this a shadow run takes minutes and three times the memory of the model.
MOST_PARAMETERS = 2_000_000_000


@dataclass
class Recorder:
    """Records one subject.

    `store_texts` keeps prompts and answers in the file. float32's outputs and samples are held for up to `memory`
    bytes and `most` batches, then the other precisions catch up on those batches; so memory does not grow with the
    number of inputs. Of the batches those of `share` are run.
    """

    subject: Subject
    precisions: Sequence[Precision]
    writer: Writer
    progress: Progress = field(default_factory=Silent)
    store_texts: bool = False
    memory: int = 1 << 30
    level: str = "auto"
    share: Share = field(default_factory=Share)
    most: int = 1 << 30
    _ports: dict[str, Ports] = field(default_factory=dict)
    _before: list[TensorRow] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)
    _failed: set[tuple[str, str]] = field(default_factory=set)
    _differing: list[Precision] = field(default_factory=list)
    _inside: Inside = field(init=False)

    def __post_init__(self) -> None:
        divided = self.share.divided
        self._inside = Inside(lambda reason, precision: self._blind("", reason, precision), shared=divided)

    def run(self) -> None:
        """Record all batches in all precisions.

        Raises OverflowLabError when the model fails in float32 or when there is nothing to run; whatever ends the
        recording early, the rows known until then are in the file.
        """
        with kept_random_state(), torch.no_grad():
            self.progress.stage("loading in float32")
            base = self.watched(parse_precision(REFERENCE))
            self._describe(base.prepared.model)
            self._choose_level(base.prepared.model)
            batches = self.share.of(self.subject.batches)
            chunk = self._reference(base, batches)
            if not chunk and not self.share.divided:
                raise OverflowLabError(f"{self.subject.name} has no inputs to run; give at least one.")
            while chunk:
                for precision in self.precisions:
                    if precision.name != REFERENCE:
                        self._low(precision, base, chunk)
                for precision in self._differing:
                    self._low(precision, base, chunk)
                self._judge_reference(base, chunk)
                chunk = self._reference(base, batches)
            self._finish(base)

    def _choose_level(self, model: nn.Module) -> None:
        """Leave out the shadow run for a large model that nobody asked it for, and say so."""
        if self.level != "auto":
            return
        parameters = sum(p.numel() for p in model.parameters() if not is_lazy(p))  # a lazy one has no size yet
        self.level = "operation" if parameters <= MOST_PARAMETERS else "module"
        if self.level == "module":
            why = f"the shadow run is left out above {MOST_PARAMETERS:,} parameters (--level operation runs it)"
            self._blind("", f"no operation is named: {why}")

    def _reference(self, base: Watched, batches: Iterator[tuple[int, Batch]]) -> list[Reference]:
        """Run float32 on the next batches, until what is held for comparison reaches the budget."""
        chunk: list[Reference] = []
        held = 0
        self.progress.stage("float32", _length(self.subject.batches))
        try:
            for number, batch in batches:
                chunk.append(self.reference(base, number, batch))
                self.progress.advance()
                held += chunk[-1].nbytes
                if held >= self.memory or len(chunk) >= self.most:
                    break
        except RunFailed as failure:
            self.writer.append(failure.row)
            where = f" in {failure.row.module}" if failure.row.module else ""
            raise OverflowLabError(
                f"the model fails in float32 already{where}: {failure.row.error}; mend the model or its inputs first."
            ) from failure.__cause__
        finally:
            self._write(base, chunk)
        return chunk

    def reference(self, base: Watched, number: int, batch: Batch) -> Reference:
        """Run float32 on one batch: answers first, which may become decoder inputs, then the plain forward."""
        reference = Reference(number, batch, inputs=dict(batch.inputs))
        generation = self.subject.generation
        for strategy in generation.strategies if generation else ():
            try:
                assert generation is not None
                reference.answers[strategy] = base.generate(strategy, reference, generation)
                reference.logs[strategy] = base.log
                self._steps(REFERENCE, strategy, reference, base.log)
            except RunFailed as failure:
                self._blind(failure.row.module, f"generate ({strategy}) fails in float32: {failure.row.error}")
        if generation and generation.encoder_decoder and not _DECODED & reference.inputs.keys():
            reference.inputs = {
                **reference.inputs,
                "decoder_input_ids": self._decoder_ids(base.prepared.model, reference),
            }
        reference.outputs = base.forward(reference, fill=True)
        return reference

    def _decoder_ids(self, model: Any, reference: Reference) -> torch.Tensor:
        """Return float32's first answers as decoder inputs, so that the plain forward sees what generation sees."""
        device = next(model.parameters()).device
        generation = self.subject.generation
        start = (generation.start if generation else None) or getattr(model.config, "decoder_start_token_id", None) or 0
        padding = (generation.padding if generation else None) or 0
        answers = next(iter(reference.answers.values()), Answers()).tokens or ((),) * max(reference.batch.samples, 1)
        width = max(2, *(len(answer) for answer in answers)) - 1
        rows = [[start, *answer[:width], *[padding] * (width - len(answer))] for answer in answers]
        return torch.tensor(rows, device=device)

    def _low(self, precision: Precision, base: Watched, chunk: list[Reference]) -> None:
        """Run one precision on the batches that float32 has run."""
        self.progress.stage(f"loading in {precision.name}")
        low = self.watched(precision)
        self._compare_casts(low, base.prepared.model, chunk[0])
        self.progress.stage(precision.name, len(chunk))
        done: list[Reference] = []
        try:
            for reference in chunk:
                self._one_low(low, base, reference)
                done.append(reference)
                self.progress.advance()
        finally:
            self._write(low, done)

    def _judge_reference(self, base: Watched, chunk: list[Reference]) -> None:
        """Look inside float32 itself where that was asked for, and where its own output holds NaN."""
        asked = any(precision.name == REFERENCE for precision in self.precisions)
        if self.level != "operation":
            if asked:
                self._blind("", "float32 is judged by its shadow run, which was left out", REFERENCE)
            return
        for reference in chunk:
            off = any(has_nan(tensor) for tensor in reference.outputs.tensors.values())
            if asked or off:
                self.progress.stage("looking inside float32")
                for seen in self._inside.forward(base, base.prepared, reference, off=off):
                    self.writer.append(seen)

    def _one_low(self, low: Watched, base: Watched, reference: Reference) -> None:
        finite, off = False, True
        try:
            if (low.precision, "forward") not in self._failed:
                outputs = low.forward(reference, fill=False)
                rows, apart = compare_outputs(low.precision, reference.outputs, outputs)
                for row in rows:
                    self.writer.append(row)
                finite = not any(row.nonfinite for row in rows)
                off = not finite or any(_is_off(row, low.tolerance) for row in rows)
                for port in apart:
                    self._blind("", f"{port} has another shape than in float32: not compared", low.precision)
        except RunFailed as failure:
            self._failed.add((low.precision, "forward"))
            self.writer.append(failure.row)
        if self.level == "operation":
            self._measure_noise(low, base, reference)
            for seen in self._inside.forward(low, base.prepared, reference, off=off):
                self.writer.append(seen)
        for strategy in reference.answers:
            # Of answers from NaN or inf nobody asks whether they are near ties.
            self._answer(low, base, reference, strategy, tied=finite)

    def _measure_noise(self, low: Watched, base: Watched, reference: Reference) -> None:
        """Write the noise floor of a precision, on the first batch."""
        key = f"noise:{low.precision}"
        if key in self._seen:
            return
        self._seen.add(key)
        try:
            row = noise_row(base.prepared, reference, low.precision, low.prepared.precision.dtype)
        except MemoryError:
            raise
        except Exception as error:  # a model that torch.func cannot call: the tolerance stands alone
            self._blind("", f"the noise floor could not be measured: {one_line(error)}", low.precision)
            return
        if row is not None:
            self.writer.append(row)

    def _answer(self, low: Watched, base: Watched, reference: Reference, strategy: str, *, tied: bool) -> None:
        """Compare one precision's answers with float32's; an exception is an answer too.

        With `tied`, float32 tells the margins of those that differ: they may be near ties.
        """
        generation = self.subject.generation
        assert generation is not None
        try:
            got = low.generate(strategy, reference, generation)
        except RunFailed as failure:
            got = Answers(error=failure.row.error)
            if (low.precision, strategy) not in self._failed:
                self._failed.add((low.precision, strategy))
                self.writer.append(failure.row)
        self._steps(low.precision, strategy, reference, low.log)
        context = AnswerContext(low.precision, strategy, reference.number, reference.batch)
        margins = base.margins(strategy, reference, generation, got) if tied and got.tokens else []
        expected = reference.answers[strategy]
        if self.level == "operation" and got.tokens != expected.tokens:
            for seen in self._inside.answer(low, base.prepared, reference, strategy, generation):
                self.writer.append(seen)
        for row in answer_rows(context, expected, got, generation, texts=self.store_texts, margins=margins):
            self.writer.append(row)

    def _steps(self, precision: str, strategy: str, reference: Reference, log: StepLog) -> None:
        """Write the steps of one `generate`, beside those of float32."""
        base = StepLog() if precision == REFERENCE else reference.logs.get(strategy, StepLog())
        for row in step_rows(AnswerContext(precision, strategy, reference.number, reference.batch), log, base):
            self.writer.append(row)

    def watched(self, precision: Precision) -> Watched:
        """Return a precision's model ready to run, with the ports of its earlier batches."""
        made = runs.watched(prepare(self.subject, precision), self._ports.get(precision.name))
        if precision.name not in self._ports:
            self.writer.append(made.prepared.row)
            self._tell_casts_apart(precision, made.prepared.row)
        self._ports[precision.name] = made.ports
        return made

    def _tell_casts_apart(self, precision: Precision, row: PrecisionRow) -> None:
        """Where the loader keeps modules in float32, scan what `.to(dtype)` does to them too."""
        plain = parse_precision(f"{precision.dtype}-to") if precision.cast == "loader" else None
        if plain and self.subject.loader_casts and row.kept and plain not in self.precisions:
            self._differing.append(plain)

    def _describe(self, model: nn.Module) -> None:
        """Write the structure of the model and the ranges of its weights."""
        for row in module_rows(model):
            self.writer.append(row)
        self._before = tensor_rows(list(named_tensors(model)), Tape(device_of(model)))
        for tensor in self._before:
            self.writer.append(tensor)

    def _compare_casts(self, low: Watched, original: nn.Module, reference: Reference) -> None:
        """Write what the cast of weights and inputs lost, once for each precision."""
        if low.precision in self._seen or low.prepared.precision.cast == "autocast":
            return
        self._seen.add(low.precision)
        before, after = list(named_tensors(original)), list(named_tensors(low.prepared.model))
        for row in cast_rows(low.precision, self._before, before, after):
            self.writer.append(row)
        given = {**{f"input[{i}]": value for i, value in enumerate(reference.batch.positional)}, **reference.inputs}
        inputs = _named_inputs(given)
        rows = tensor_rows(inputs, Tape(device_of(original)))
        for row in cast_rows(low.precision, rows, inputs, _named_inputs(low.prepared.inputs(given))):
            self.writer.append(row)

    def _write(self, run: Watched, chunk: list[Reference]) -> None:
        """Write what one precision has collected on these batches."""
        for row in run.ports.rows():
            self.writer.append(row)
        for error in run.differences.rows():
            self.writer.append(error)
        inputs, tokens = sum(r.batch.samples for r in chunk), sum(r.batch.tokens for r in chunk)
        for name, seconds in run.seconds.items():
            ticks = sum(ticks for (kind, _), ticks in run.ticks.items() if kind == name)
            self.writer.append(RunRow(run.precision, name, len(chunk), inputs, tokens, round(seconds, 3), ticks))
        for reference in chunk if self.share.divided else ():
            ticks = sum(ticks for (_, batch), ticks in run.ticks.items() if batch == reference.number)
            self.writer.append(self.share.batch_row(run.precision, reference.number, ticks))
        run.seconds.clear()
        run.ticks.clear()
        for module in sorted(run.differences.mismatched):
            self._blind(module, "its values have another shape or order than in float32: not compared", run.precision)

    def _finish(self, base: Watched) -> None:
        """Write the blind spots of the whole."""
        for path in sorted(base.refused):
            self._blind(path, "a TorchScript module takes no hooks: seen from outside only")
        for name in sorted(base.unknown):
            self._blind("", f"values of type {name} are not understood: not measured")
        for row in uncalled_rows(base.prepared.model, base.called | base.refused):
            self.writer.append(row)
        if (end := self.share.end_row()) is not None:
            self.writer.append(end)

    def _blind(self, module: str, reason: str, precision: str | None = None) -> None:
        """Write a blind spot once."""
        key = f"{precision}:{module}:{reason}"
        if key not in self._seen:
            self._seen.add(key)
            self.writer.append(BlindSpotRow(module, reason, precision))


def _is_off(row: OutputRow, tolerance: float) -> bool:
    """Return whether an output differs by more than rounding and a few near ties explain."""
    changed = max(row.changed - TIES * row.decisions, row.evened - TIES * row.ranked)
    return (row.relative_error or 0.0) > tolerance or changed > 0


def _named_inputs(inputs: dict[str, Any]) -> list[Named]:
    """Return the floating inputs in the form of named tensors."""
    return [
        ("input", name, t) for key, value in inputs.items() for name, t in tensors(value, key) if t.is_floating_point()
    ]


def _length(batches: Any) -> int | None:
    return len(batches) if hasattr(batches, "__len__") else None

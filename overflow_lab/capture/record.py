"""Runs a subject in float32 and in each precision, batch by batch, and writes the recording."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from overflow_lab.capture import runs
from overflow_lab.capture.answers import AnswerContext, Answers, answer_rows, decoder_ids
from overflow_lab.capture.devices import has_float64
from overflow_lab.capture.inside import Inside
from overflow_lab.capture.known import Known
from overflow_lab.capture.model_rows import module_rows, uncalled_rows
from overflow_lab.capture.noise import noise_row
from overflow_lab.capture.outputs import compare_outputs, has_nan
from overflow_lab.capture.ports import Ports
from overflow_lab.capture.precisions import REFERENCE, Precision, device_of, parse_precision, prepare
from overflow_lab.capture.randomness import kept_random_state
from overflow_lab.capture.resume import Walk, check_same_state, check_same_weights
from overflow_lab.capture.room import KEPT_BYTES, MOST_BATCHES, MOST_SECONDS, nbytes, room
from overflow_lab.capture.runs import Reference, RunFailed, Watched
from overflow_lab.capture.share import Share
from overflow_lab.capture.statistics import Tape
from overflow_lab.capture.steps import StepLog, step_rows
from overflow_lab.capture.weights import cast_rows, named_inputs, named_tensors, tensor_rows
from overflow_lab.errors import OverflowLabError, UsageError, one_line
from overflow_lab.progress import Progress, Silent
from overflow_lab.recording import OutputRow, PrecisionRow, ProgressRow, Resumable, Row, TensorRow
from overflow_lab.recording.writer import Writer
from overflow_lab.subjects import Batch, Subject
from overflow_lab.subjects.offload import is_offloaded, resolver
from overflow_lab.tolerances import TIES

# A model with one of these needs no tokens for its decoder: it has them, or makes them of the labels.
_DECODED = frozenset({"decoder_input_ids", "decoder_inputs_embeds", "labels"})

# Above this a shadow run takes minutes and three times the memory of the model.
MOST_PARAMETERS = 2_000_000_000


@dataclass
class Recorder:
    """Records one subject.

    `store_texts` keeps prompts and answers in the file. float32's outputs and samples are held for up to `memory`
    bytes (None: as the model's size suggests) and `most` batches, then the other precisions catch up on those batches,
    and a progress row says so. So neither memory nor file grows with the number of inputs, and with `resumed` a scan
    goes on from there. Of the batches those of `share` are run.
    """

    subject: Subject
    precisions: Sequence[Precision]
    writer: Writer
    progress: Progress = field(default_factory=Silent)
    store_texts: bool = False
    memory: int | None = None
    level: str = "auto"
    resumed: Resumable | None = None
    share: Share = field(default_factory=Share)
    most: int = MOST_BATCHES
    _ports: dict[str, Ports] = field(default_factory=dict)
    _before: list[TensorRow] = field(default_factory=list)
    _differing: list[Precision] = field(default_factory=list)
    _loaded: dict[str, Watched] = field(default_factory=dict)
    _walk: Walk = field(init=False)
    _batches: Iterator[tuple[int, Batch]] = field(init=False)
    _known: Known = field(init=False)
    _inside: Inside = field(init=False)

    def __post_init__(self) -> None:
        self._known = Known(self.writer)
        divided = self.share.divided
        self._inside = Inside(lambda reason, precision: self._known.blind("", reason, precision), shared=divided)
        if self.resumed is not None:
            self._known.recall(self.resumed)
            self._inside.recall(self.resumed.progress.state.get("inside", {}))

    def run(self) -> None:
        """Record all batches in all precisions.

        Raises OverflowLabError when the model fails in float32 or when there is nothing to run, UsageError where what
        was resumed is of something else; whatever ends the recording early, the rows known until then are in the file.
        """
        with kept_random_state(), torch.no_grad():
            self.progress.stage("loading in float32")
            base = self.watched(parse_precision(REFERENCE))
            self._describe(base.prepared.model)
            self._choose_level(base.prepared.model)
            self._walk = Walk(iter(self.subject.batches))
            self._go_on(base)
            self._batches = self.share.of(self.subject.batches) if self.share.divided else self._walk
            chunk = self._reference(base)
            if not (chunk or self._walk.number or self.share.divided):
                raise OverflowLabError(f"{self.subject.name} has no inputs to run; give at least one.")
            while chunk:
                for precision in self.precisions:
                    if precision.name != REFERENCE:
                        self._low(precision, base, chunk)
                for precision in self._differing:
                    self._low(precision, base, chunk)
                self._judge_reference(base, chunk)
                self.writer.progress(self._progress_row(base))
                chunk = self._reference(base)
            if not (self.writer.untouched and self.resumed and self.resumed.complete):
                self.writer.progress(self._progress_row(base), last=True)
                self._finish(base)

    # ---- an interrupted scan that goes on ----

    def _go_on(self, base: Watched) -> None:
        """Pass over the inputs that the resumed scan has run. Raises UsageError where they are other ones."""
        if self.resumed is None:
            return
        state, name = self.resumed.progress.state, str(self.resumed.recording.path)
        check_same_state(state, {"level": self.level, "store_texts": self.store_texts}, name)
        base.called = {p for p, _ in base.prepared.model.named_modules()} - set(state.get("uncalled", ()))
        base.refused, base.unknown = set(state.get("refused", ())), set(state.get("unknown", ()))
        self.progress.stage("passing over the inputs that were run")
        self._walk.skip(self.resumed.progress, name)

    def _progress_row(self, base: Watched) -> ProgressRow:
        """Return what this scan would have to know to go on from here."""
        paths = [path for path, _ in base.prepared.model.named_modules()]
        state = {
            "level": self.level,
            "store_texts": self.store_texts,
            "clocks": {name: ports.clock for name, ports in self._ports.items()},
            **self._known.memory(),
            "inside": self._inside.memory(),
            "uncalled": [path for path in paths if path not in base.called],
            "refused": sorted(base.refused),
            "unknown": sorted(base.unknown),
        }
        return ProgressRow(self._walk.number, self._walk.inputs, self._walk.digest, state)

    # ---- the runs ----

    def _choose_level(self, model: nn.Module) -> None:
        """Leave out the shadow run for a large model that nobody asked it for, and say so."""
        if is_offloaded(model):
            self._only_modules()
        if self.level != "auto":
            return
        parameters = sum(p.numel() for p in model.parameters() if not is_lazy(p))  # a lazy one has no size yet
        self.level = "operation" if parameters <= MOST_PARAMETERS else "module"
        if self.level == "module":
            why = f"the shadow run is left out above {MOST_PARAMETERS:,} parameters (--level operation runs it)"
            self._known.blind("", f"no operation is named: {why}")

    def _only_modules(self) -> None:
        """Leave out the shadow run, which needs all weights at once. Raises UsageError where it was asked for."""
        if self.level == "operation":
            raise UsageError("the level operation needs all weights in memory; leave --device-map out, or --level.")
        self.level = "module"
        self._known.blind(
            "", "no operation is named: the model is partly on disk (its weights are read at each forward)"
        )

    def _reference(self, base: Watched) -> list[Reference]:
        """Run float32 on the next batches, until what is held for comparison reaches the budget."""
        chunk: list[Reference] = []
        held, began, first = 0, time.monotonic(), self._walk.number
        most = room(base.prepared.model) if self.memory is None else self.memory
        total = _length(self.subject.batches)
        self.progress.stage(f"float32, from batch {first:,}" if first else "float32", total and total - first)
        try:
            for number, batch in self._batches:
                chunk.append(self.reference(base, number, batch))
                self.progress.advance()
                held += chunk[-1].nbytes
                if held >= most or len(chunk) >= self.most or time.monotonic() - began > MOST_SECONDS:
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
                self._known.blind(failure.row.module, f"generate ({strategy}) fails in float32: {failure.row.error}")
        if generation and generation.encoder_decoder and not _DECODED & reference.inputs.keys():
            made = decoder_ids(base.prepared.model, reference.answers, reference.batch.samples, generation)
            reference.inputs = {**reference.inputs, "decoder_input_ids": made}
        reference.outputs = base.forward(reference, fill=True)
        return reference

    def _low(self, precision: Precision, base: Watched, chunk: list[Reference]) -> None:
        """Run one precision on the batches that float32 has run."""
        if self.level == "operation":  # before the model is loaded: it takes as much memory as float32's weights
            self._measure_noise(precision, base, chunk[0])
        low = self._model(precision)
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

    def _model(self, precision: Precision) -> Watched:
        """Return a precision's model: the one that is still loaded, or loaded anew, and kept if there is room."""
        found = self._loaded.get(precision.name)
        if found is None:
            self.progress.stage(f"loading in {precision.name}")
            found = self.watched(precision)
            models = [low.prepared.model for low in (found, *self._loaded.values())]
            if sum(map(nbytes, models)) <= KEPT_BYTES:
                self._loaded[precision.name] = found
        return found

    def _judge_reference(self, base: Watched, chunk: list[Reference]) -> None:
        """Look inside float32 itself where that was asked for, and where its own output holds NaN."""
        asked = any(precision.name == REFERENCE for precision in self.precisions)
        if self.level != "operation":
            if asked:
                self._known.blind("", "float32 is judged by its shadow run, which was left out", REFERENCE)
            return
        for reference in chunk:
            off = any(has_nan(tensor) for tensor in reference.outputs.tensors.values())
            if (asked or off) and not has_float64(device_of(base.prepared.model)):
                device = device_of(base.prepared.model).type
                self._known.blind(
                    "", f"float32 is judged by shadows in float64, which {device} does not have", REFERENCE
                )
            elif asked or off:
                self.progress.stage("looking inside float32")
                for seen in self._inside.forward(base, base.prepared, reference, off=off):
                    self.writer.append(seen)

    def _one_low(self, low: Watched, base: Watched, reference: Reference) -> None:
        finite, off = False, True
        try:
            if (low.precision, "forward") not in self._known.failed:
                outputs = low.forward(reference, fill=False)
                rows, apart = compare_outputs(low.precision, reference.outputs, outputs)
                for row in rows:
                    self.writer.append(row)
                finite = not any(row.nonfinite for row in rows)
                off = not finite or any(_is_off(row, low.tolerance) for row in rows)
                for port in apart:
                    self._known.blind("", f"{port} has another shape than in float32: not compared", low.precision)
        except RunFailed as failure:
            self._known.failed.add((low.precision, "forward"))
            self.writer.append(failure.row)
        if self.level == "operation":
            for seen in self._inside.forward(low, base.prepared, reference, off=off):
                self.writer.append(seen)
        for strategy in reference.answers:
            # Of answers from NaN or inf nobody asks whether they are near ties.
            self._answer(low, base, reference, strategy, tied=finite)

    def _measure_noise(self, precision: Precision, base: Watched, reference: Reference) -> None:
        """Write the noise floor of a precision, on the first batch."""
        if not self._known.first("noise", precision.name):
            return
        try:
            row = noise_row(base.prepared, reference, precision.name, precision.dtype)
        except MemoryError:
            raise
        except Exception as error:  # a model that torch.func cannot call: the tolerance stands alone
            self._known.blind("", f"the noise floor could not be measured: {one_line(error)}", precision.name)
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
            if (low.precision, strategy) not in self._known.failed:
                self._known.failed.add((low.precision, strategy))
                self.writer.append(failure.row)
        self._steps(low.precision, strategy, reference, low.log)
        context = AnswerContext(low.precision, strategy, reference.number, reference.batch)
        margins = base.margins(strategy, reference, generation, got) if tied and got.tokens else []
        expected = reference.answers[strategy]
        if self.level == "operation" and got.tokens != expected.tokens:
            for seen in self._inside.answer(low, base.prepared, reference, strategy, generation):
                self.writer.append(seen)
        self._known.answers(answer_rows(context, expected, got, generation, texts=self.store_texts, margins=margins))

    def _steps(self, precision: str, strategy: str, reference: Reference, log: StepLog) -> None:
        """Write the steps of one `generate`, beside those of float32."""
        base = StepLog() if precision == REFERENCE else reference.logs.get(strategy, StepLog())
        for row in step_rows(AnswerContext(precision, strategy, reference.number, reference.batch), log, base):
            self.writer.append(row)

    def watched(self, precision: Precision) -> Watched:
        """Return a precision's model ready to run, with the ports of its earlier batches."""
        name = precision.name
        made = runs.watched(prepare(self.subject, precision), self._ports.get(name))
        if name not in self._ports:
            if self._known.first("told", name):
                self.writer.append(made.prepared.row)
            self._tell_casts_apart(precision, made.prepared.row, offloaded=is_offloaded(made.prepared.model))
            made.ports.clock = self.resumed.progress.state.get("clocks", {}).get(name, 0) if self.resumed else 0
        self._ports[name] = made.ports
        return made

    def _tell_casts_apart(self, precision: Precision, row: PrecisionRow, *, offloaded: bool) -> None:
        """Where the loader keeps modules in float32, scan what `.to(dtype)` does to them too."""
        plain = parse_precision(f"{precision.dtype}-to") if precision.cast == "loader" else None
        if plain and self.subject.loader_casts and row.kept and plain not in self.precisions and not offloaded:
            self._differing.append(plain)

    def _describe(self, model: nn.Module) -> None:
        """Write the structure of the model and the ranges of its weights; of a resumed scan, compare them."""
        self._before = tensor_rows(list(named_tensors(model)), Tape(device_of(model)), resolver(model))
        if self.resumed is not None:
            known = self.resumed.recording
            check_same_weights(self._before, known.of(TensorRow), str(known.path))
            return
        for row in module_rows(model):
            self.writer.append(row)
        for tensor in self._before:
            self.writer.append(tensor)

    def _compare_casts(self, low: Watched, original: nn.Module, reference: Reference) -> None:
        """Write what the cast of weights and inputs lost, once for each precision."""
        if low.prepared.precision.cast == "autocast" or not self._known.first("casts", low.precision):
            return
        before, after = list(named_tensors(original)), list(named_tensors(low.prepared.model))
        values = resolver(original), resolver(low.prepared.model)
        for row in cast_rows(low.precision, self._before, before, after, values=values):
            self.writer.append(row)
        given = {**{f"input[{i}]": value for i, value in enumerate(reference.batch.positional)}, **reference.inputs}
        inputs = named_inputs(given)
        rows = tensor_rows(inputs, Tape(device_of(original)))
        for row in cast_rows(low.precision, rows, inputs, named_inputs(low.prepared.inputs(given))):
            self.writer.append(row)

    def _write(self, run: Watched, chunk: list[Reference]) -> None:
        """Write what one precision has collected on these batches."""
        timed, shared = run.timed([r.batch for r in chunk]), self.share.rows(run.precision, chunk, run.ticks)
        rows: list[Row] = [*run.ports.rows(), *run.differences.rows(), *timed, *shared]
        for row in rows:
            self.writer.append(row)
        run.seconds.clear()
        run.ticks.clear()
        for module in sorted(run.differences.mismatched):
            self._known.blind(
                module, "its values have another shape or order than in float32: not compared", run.precision
            )

    def _finish(self, base: Watched) -> None:
        """Write the blind spots of the whole."""
        for path in sorted(base.refused):
            self._known.blind(path, "a TorchScript module takes no hooks: seen from outside only")
        for name in sorted(base.unknown):
            self._known.blind("", f"values of type {name} are not understood: not measured")
        for why in sorted({ports.tape.fallback for ports in self._ports.values()} - {""}):
            self._known.blind("", f"statistics are made by torch operations, which takes several times as long: {why}")
        for row in uncalled_rows(base.prepared.model, base.called | base.refused):
            self.writer.append(row)
        if (end := self.share.end_row()) is not None:
            self.writer.append(end)


def _is_off(row: OutputRow, tolerance: float) -> bool:
    """Return whether an output differs by more than rounding and a few near ties explain."""
    changed = max(row.changed - TIES * row.decisions, row.evened - TIES * row.ranked)
    return (row.relative_error or 0.0) > tolerance or changed > 0


def _length(batches: Any) -> int | None:
    return len(batches) if hasattr(batches, "__len__") else None

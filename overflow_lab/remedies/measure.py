"""What a proof measures besides the verdicts: the float32 function, the task's loss, time and memory."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from overflow_lab.capture.answers import AnswerContext, Answers, answer_rows
from overflow_lab.capture.outputs import Outputs, compare_outputs
from overflow_lab.capture.precisions import REFERENCE, Prepared, parse_precision, prepare
from overflow_lab.capture.randomness import kept_random_state
from overflow_lab.capture.record import Recorder
from overflow_lab.capture.runs import Reference, RunFailed, Watched
from overflow_lab.recording import AnswerRow, Header, Recording
from overflow_lab.recording.writer import Writer
from overflow_lab.subjects import Generation, Subject

# Seconds that timing may take, and the fewest rounds that say anything.
SECONDS, ROUNDS = 4.0, 3


def function_figures(original: Subject, mended: Subject, header: Header) -> dict[str, float]:
    """Return how far the mended model's float32 outputs are from the original's, over all inputs of the subjects."""
    errors, units, kls = [0.0], [0.0], []
    with kept_random_state(), torch.no_grad():
        recorders = [Recorder(subject, (), Writer(None, header)) for subject in (original, mended)]
        bases = [recorder.watched(parse_precision(REFERENCE)) for recorder in recorders]
        for number, batch in enumerate(original.batches):
            reference = recorders[0].reference(bases[0], number, batch)
            outputs = _forward(bases[1], reference)
            rows, apart = compare_outputs(REFERENCE, reference.outputs, outputs)
            errors += [math.inf for _ in apart]
            errors += [math.inf if row.nonfinite else row.relative_error or 0.0 for row in rows]
            kls += [row.kl_sum / row.kl_rows for row in rows if row.kl_rows]
            units += [_ulps(tensor, outputs.tensors.get(port)) for port, tensor in reference.outputs.tensors.items()]
    found = {"function_error": max(errors), "function_ulp": max(units)}
    return {**found, **({"function_kl": max(kls)} if kls else {})}


def first_inputs(subject: Subject, header: Header) -> tuple[Mapping[str, Any], Any]:
    """Return the keyword and positional inputs of the first plain forward, decoder inputs among them."""
    with kept_random_state(), torch.no_grad():
        recorder = Recorder(subject, (), Writer(None, header))
        base = recorder.watched(parse_precision(REFERENCE))
        reference = recorder.reference(base, 0, next(iter(subject.batches)))
    return reference.inputs, reference.batch.positional


def _forward(base: Watched, reference: Reference) -> Outputs:
    """Return the outputs of another model on the inputs of a reference, decoder inputs among them."""
    again = Reference(reference.number, reference.batch, inputs=reference.inputs)
    return base.forward(again, fill=True)


def _ulps(a: torch.Tensor, b: torch.Tensor | None) -> float:
    """Return the largest difference in float32 units in the last place of the largest magnitude of `a`."""
    if b is None or a.shape != b.shape or not a.is_floating_point() or not a.numel():
        return 0.0
    finite = torch.isfinite(a) & torch.isfinite(b)
    if not bool(finite.any()):
        return 0.0
    apart = float((a.double() - b.double())[finite].abs().max())
    largest = float(a[finite].abs().max())
    if apart == 0.0 or largest == 0.0:
        return 0.0
    return apart / 2.0 ** (math.frexp(largest)[1] - 24)


def answer_figures(recording: Recording, precision: str) -> dict[str, float]:
    """Return the shares of tokens (up to the first that differs) and of answers that are float32's."""
    return _shares([row for row in recording.of(AnswerRow) if row.precision == precision])


def answers_of_the_original(original: Subject, mended: Subject, precision: str, header: Header) -> dict[str, float]:
    """Return the same shares of the mended model in `precision` against the original's own float32 answers.

    The second scan compares with float32 of the mended model, which is another one where its weights were trained.
    """
    generation, rows = original.generation, list[AnswerRow]()
    if generation is None:
        return {}
    with kept_random_state(), torch.no_grad():
        recorders = [Recorder(subject, (), Writer(None, header)) for subject in (original, mended)]
        base, low = recorders[0].watched(parse_precision(REFERENCE)), recorders[1].watched(parse_precision(precision))
        for number, batch in enumerate(original.batches):
            reference = recorders[0].reference(base, number, batch)
            for strategy, expected in reference.answers.items():
                got = _answers(low, strategy, reference, generation)
                context = AnswerContext(precision, strategy, number, batch)
                rows += answer_rows(context, expected, got, generation, texts=False)
    return _shares(rows)


def _answers(low: Watched, strategy: str, reference: Reference, generation: Generation) -> Answers:
    """Return what a model answers; where it raises, that is no answer."""
    try:
        return low.generate(strategy, reference, generation)
    except RunFailed as failure:
        return Answers(error=failure.row.error)


def _shares(rows: Sequence[AnswerRow]) -> dict[str, float]:
    total = sum(row.reference_tokens for row in rows)
    if not rows or not total:
        return {}
    right = sum(
        row.reference_tokens
        if row.status == "same"
        else min(row.first_difference or 0, row.reference_tokens)
        if row.status == "changed"
        else 0
        for row in rows
    )
    same = sum(row.status == "same" for row in rows)
    return {"same_tokens": right / total, "same_answers": same / len(rows)}


def loss_figures(models: Mapping[str, Prepared], subject: Subject) -> dict[str, float]:
    """Return the mean loss of each model over the batches that have labels, by name; nothing where there are none."""
    labelled = [batch for batch in subject.batches if "labels" in batch.inputs]
    if not labelled:
        return {}
    found: dict[str, float] = {}
    with torch.no_grad(), kept_random_state():
        for name, prepared in models.items():
            losses = []
            for batch in labelled:
                with prepared.context():
                    output: Any = prepared.model(**prepared.inputs(dict(batch.inputs)))
                loss = getattr(output, "loss", None)
                if isinstance(loss, torch.Tensor):
                    losses.append(float(loss) * batch.samples)
            if losses:
                found[name] = sum(losses) / sum(batch.samples for batch in labelled)
    return found


def cost_figures(plain: Prepared, mended: Prepared, given: Mapping[str, Any], positional: Any) -> dict[str, float]:
    """Return the time of a forward and the memory of the weights, as ratios of the mended model to the plain one.

    Rounds alternate, and the quickest counts: what others do on the machine only ever adds.
    """
    sizes = [_bytes(model) for model in (plain.model, mended.model)]
    found = {"bytes": sizes[1] / sizes[0]} if sizes[0] else {}
    times: list[list[float]] = [[], []]
    began = time.perf_counter()
    with torch.no_grad(), kept_random_state():
        for number in itertools.count():
            for which, prepared in enumerate((plain, mended)):
                inputs, args = prepared.inputs(dict(given)), prepared.inputs(positional)
                started = time.perf_counter()
                with prepared.context():
                    prepared.model(*args, **inputs)
                _wait(prepared.device_type)
                times[which].append(time.perf_counter() - started)
            spent = time.perf_counter() - began
            if spent > (SECONDS / 8 if number >= ROUNDS else SECONDS) and number:
                break
    least = [min(seconds[1:]) for seconds in times]  # the first round warms up
    return {**found, "seconds": least[1] / least[0]}


def _bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers, shared memory once."""
    held: dict[int, int] = {}
    tensors: Iterable[torch.Tensor] = itertools.chain(model.parameters(), model.buffers())
    for tensor in tensors:
        held[tensor.data_ptr() if not tensor.is_meta else id(tensor)] = tensor.nbytes
    return sum(held.values())


def _wait(device_type: str) -> None:
    if device_type == "cuda":
        torch.cuda.synchronize()


def prepared(subject: Subject, precision: str) -> Prepared:
    """Return the model of a subject in a precision, by its name."""
    return prepare(subject, parse_precision(precision))

"""Fine-tunes a subject that lacks headroom, and returns the trained weights as a remedy with its proof."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from overflow_lab.capture.precisions import REFERENCE, device_of, parse_precision
from overflow_lab.errors import OverflowLabError, UsageError, one_line
from overflow_lab.progress import Progress, Silent
from overflow_lab.remedies.checkpoint import save_checkpoint
from overflow_lab.remedies.finetune.examples import Maker, divided, first_batches
from overflow_lab.remedies.finetune.loop import MORE, Training
from overflow_lab.remedies.finetune.settings import Settings, taken
from overflow_lab.remedies.finetune.state import copied, put
from overflow_lab.remedies.holdout import Split
from overflow_lab.remedies.penalty import ActivationPenalty, tight_sites
from overflow_lab.remedies.remedy import Remedy
from overflow_lab.scan import Scan, default_device, scan_subject, subject_of
from overflow_lab.subjects.files import Rows
from overflow_lab.subjects.subject import Batch, Subject
from overflow_lab.subjects.tensors import fresh_batches

if TYPE_CHECKING:
    from overflow_lab.recording import ProofRow

Load = Callable[[torch.dtype | None], nn.Module]
# Batches of the scans before and after; a scan runs each several times.
_SCANNED = 2
_BATCH_SIZE = 32


@dataclass(frozen=True)
class Finetuned:
    """What a fine-tuning did.

    `remedy` holds the best weights; `proof` is its second scan, None with `prove=False`. `scan` is of the original,
    with the proof: its report shows before and after. `reached`
    says that the held-back inputs have the headroom that was asked for and the original's decisions.
    `history` has a dict for each evaluation: step, headroom (bits), site, largest, kl (nats), same, task_loss.
    """

    remedy: Remedy
    scan: Scan
    reached: bool
    steps: int
    seconds: float
    history: tuple[Mapping[str, Any], ...]
    best: Mapping[str, Any]
    proof: ProofRow | None = None
    checkpoints: Path | None = None
    load: Load = field(repr=False, default=lambda dtype: nn.Module())

    @property
    def before(self) -> Mapping[str, Any]:
        """The evaluation before the first step."""
        return self.history[0]

    @property
    def after(self) -> Mapping[str, Any]:
        """The evaluation of the best weights."""
        return self.best

    @property
    def good(self) -> bool:
        """Whether the goal was reached, and the proof, where it was asked for, holds."""
        return self.reached and (self.proof is None or self.proof.proven)

    def model(self) -> nn.Module:
        """Return a trained copy, in float32."""
        return self.load(None)

    def save(self, folder: str | Path) -> Path:
        """Write the trained model as a checkpoint that transformers loads; return the folder.

        Raises UsageError where the model was no checkpoint, or the folder holds something.
        """
        if self.remedy.save is None:
            raise UsageError("the model is no checkpoint of transformers; take `model()` and save it as you do.")
        self.remedy.save(Path(folder))
        return Path(folder)

    def to_dict(self) -> dict[str, Any]:
        """Return what `overflow-lab finetune --json` prints: the scan's object, and "finetune"."""
        made = {
            "reached": self.reached,
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "sites": list(self.remedy.members),
            "before": dict(self.before),
            "after": dict(self.after),
            "history": [dict(row) for row in self.history],
            "proven": None if self.proof is None else self.proof.proven,
            "reason": None if self.proof is None else self.proof.reason or None,
            "figures": None if self.proof is None else _finite(self.proof.figures),
            "checkpoints": None if self.checkpoints is None else str(self.checkpoints),
        }
        return {**self.scan.to_dict(), "finetune": made}


def finetune(
    model: Any,
    data: Any = None,
    *,
    checkpoints: str | Path | None = None,
    resume: bool = False,
    prove: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> Finetuned:
    """Train a copy of `model` until its activations fit a precision with headroom, its outputs as they were.

    The original is the teacher: the copy is to give its logits (KL divergence), while `ActivationPenalty` shrinks the
    outputs of the modules that a scan found too large. `model` is what `scan` takes. `data` is a file (txt, jsonl, csv,
    parquet), a list of texts, or of (text, label) pairs; for a module in memory the inputs, one for each batch. The
    decoder of an encoder-decoder model reads the labels, or what the original answers by greedy search. One batch in
    eight, at most four, is held back: the best weights are chosen on these.

    `checkpoints` is a folder, written now and then and after Ctrl-C (which raises KeyboardInterrupt); with `resume` the
    training goes on from there and gives the same bits as one that was not interrupted. `options` are the fields of
    `Settings` (precision, steps, learning_rate, headroom_bits, labels, ...) and those of `scan`; batch_size is 32 here.

    Raises UsageError for what cannot be trained as asked, also where nothing lacks headroom; OverflowLabError where
    the loss is no number. The model given is not touched.
    """
    settings, rest = taken(options)
    how = {"level": rest.pop("level", "auto"), "recording": rest.pop("recording", None)}
    subject, labels = _subject(model, data, settings, default_device(model, {"batch_size": _BATCH_SIZE, **rest}))
    folder = None if checkpoints is None else Path(checkpoints).expanduser()
    if resume and folder is None:
        raise UsageError("there is nothing to resume from: name the folder of the checkpoints.")
    job = _Job(subject, labels, settings, progress or Silent(), folder, how)
    return job.run(resume=resume, prove=prove)


def _subject(
    model: Any, data: Any, settings: Settings, options: dict[str, Any]
) -> tuple[Subject, tuple[str, ...] | None]:
    """Return the subject with the data as its inputs, and the labels beside them."""
    column = settings.labels
    if not isinstance(model, (str, Path)):
        if column is not None:
            raise UsageError("labels= names a column of a file; put the labels of a module in memory into its inputs.")
        return subject_of(model, data, options, options.pop("tokenizer", None)), None
    if isinstance(data, (str, Path)):
        rows = Rows(str(data), options.get("column"), options.get("template"))
        labels = None if column is None else tuple(rows.beside(column))
        return subject_of(model, None, {**options, "inputs_file": str(data)}, None), labels
    if column is not None:
        raise UsageError(f"labels={column!r} names a column, and the data are no file; give (text, label) pairs.")
    if data is None:
        return subject_of(model, None, options, None), None
    pairs = [item if isinstance(item, tuple) else (item, None) for item in data]
    given = [label for _, label in pairs if label is not None]
    if given and len(given) != len(pairs):
        raise UsageError(f"{len(given)} of {len(pairs)} texts have a label; give one for each, or for none.")
    texts = tuple(str(text) for text, _ in pairs)
    return subject_of(model, None, {**options, "texts": texts}, None), tuple(map(str, given)) or None


@dataclass(frozen=True)
class _Job:
    """A fine-tuning: what of, on what, how, and where to."""

    subject: Subject
    labels: Sequence[str] | None
    settings: Settings
    progress: Progress
    folder: Path | None
    scan_options: Mapping[str, Any]

    def run(self, *, resume: bool, prove: bool) -> Finetuned:
        """Scan, train, prove."""
        began = time.perf_counter()
        batches = first_batches(self.subject, self.settings.steps + 4)
        mine, apart = divided(batches)
        split = self._split([batches[i] for i in mine], [batches[i] for i in apart])
        found = scan_subject(split.search, [self.settings.precision], progress=self.progress, **self.scan_options)
        training = self._training(found, batches, (mine, apart))
        training.run(resume=resume)
        done = self._done(training, found, split, prove=prove)
        return dataclasses.replace(done, seconds=time.perf_counter() - began)

    def _split(self, mine: list[Batch], apart: list[Batch]) -> Split:
        """Return the inputs of the scans: some that are trained on, some that are held back."""
        place = next((t.device for t in self._tensors(mine[0])), torch.device("cpu"))

        def of(batches: list[Batch]) -> Subject:
            return dataclasses.replace(self.subject, batches=fresh_batches(tuple(batches[:_SCANNED]), place))

        return Split(of(mine), of(apart) if apart else None)

    def _tensors(self, batch: Batch) -> list[torch.Tensor]:
        values = [*batch.inputs.values(), *batch.positional]
        return [value for value in values if isinstance(value, torch.Tensor)]

    def _training(self, found: Scan, batches: list[Batch], numbers: tuple[list[int], list[int]]) -> Training:
        settings, progress = self.settings, self.progress
        dtype = parse_precision(settings.precision).dtype
        if dtype == REFERENCE:
            raise UsageError("a model is trained into the range of float16 or bfloat16; name one of them.")
        if not tight_sites(found, dtype, below=settings.headroom_bits):
            raise UsageError(
                f"every module's output of {self.subject.name} has {settings.headroom_bits:g} bits of headroom in "
                f"{dtype}: there is nothing to shrink; ask for more --headroom-bits."
            )
        progress.stage("making the answers of the original")
        teacher = self.subject.load(None)
        student = copy.deepcopy(teacher)
        teacher.requires_grad_(False)
        examples = list(self._examples(teacher, batches))
        penalty = ActivationPenalty.from_scan(
            student, found, settings.precision, headroom_bits=settings.headroom_bits + MORE,
            weight=settings.penalty_weight,
        )  # fmt: skip
        return Training(
            student,
            teacher,
            penalty,
            [examples[i] for i in numbers[0]],
            [examples[i] for i in numbers[1]],
            settings,
            progress,
            folder=self.folder,
            mark=self._mark(student, batches, penalty),
        )

    def _examples(self, teacher: nn.Module, batches: list[Batch]) -> Any:
        try:
            return list(Maker(self.subject, teacher, self.labels).all(batches))
        except (OverflowLabError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise OverflowLabError(f"the original gives no answers to learn from: {one_line(error)}") from error

    def _mark(self, student: nn.Module, batches: list[Batch], penalty: ActivationPenalty) -> dict[str, Any]:
        """Return what makes this training this one, as JSON has it."""
        own = {k: v for k, v in dataclasses.asdict(self.settings).items() if k != "save_every"}
        counts = {"inputs": sum(batch.samples for batch in batches), "batches": len(batches)}
        weights = sum(parameter.numel() for parameter in student.parameters())
        return {
            **own,
            **counts,
            "model": self.subject.name,
            "weights": weights,
            "sites": [list(s) for s in penalty.sites],
        }

    def _done(self, training: Training, found: Scan, split: Split, *, prove: bool) -> Finetuned:
        weights = copied(training.student)
        remedy = self._remedy(training, weights)
        proof = None
        if prove:
            from overflow_lab.remedies.proof import prove as proven
            from overflow_lab.remedies.treatment import keep_proof, with_proofs

            self.progress.stage("proving it by a second scan")
            options = {name: value for name, value in self.scan_options.items() if name != "recording"}
            proof = proven(remedy, split, found, progress=self.progress, options=options)
            keep_proof(found, proof)
            found = with_proofs(found, [proof])
        return Finetuned(
            remedy,
            found,
            training.reached,
            training.step,
            0.0,
            tuple(training.history),
            training.history_of_best,
            proof=proof,
            checkpoints=self.folder,
            load=loading(self.subject.load, weights),
        )

    def _remedy(self, training: Training, weights: Mapping[str, torch.Tensor]) -> Remedy:
        subject, settings = self.subject, self.settings
        modules = tuple(dict.fromkeys(module for module, _ in training.penalty.sites))

        def mend(given: Subject) -> Subject:
            return dataclasses.replace(given, load=loading(given.load, weights), save=None)

        def save(folder: Path) -> None:
            save_checkpoint(put(subject.load(None), weights), folder, subject)

        before, after = training.history[0], training.history_of_best
        return Remedy(
            kind="penalty",
            title=f"Fine-tune with a penalty on the outputs of {len(modules)} modules ({training.step} steps)",
            precision=parse_precision(settings.precision).name,
            mend=mend,
            members=modules,
            notes=(_moved(before, after), "All weights change; the proof says how far the function moved."),
            save=save if subject.save is not None else None,
            runs=training.step,
        )


def loading(load: Load, weights: Mapping[str, torch.Tensor]) -> Load:
    """Return a load that gives models with the trained weights, in the dtypes in which the given one has them."""

    def trained(dtype: torch.dtype | None) -> nn.Module:
        model = load(dtype)
        place = device_of(model)
        return put(model, {name: weight.to(place) for name, weight in weights.items()})

    return trained


def _moved(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    from overflow_lab.analysis.numbers import number

    return (
        f"On held-back inputs the largest value went from {number(before['largest'])} to {number(after['largest'])}, "
        f"with a KL divergence from the original of {after['kl']:.2g} nats."
    )


def _finite(figures: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if abs(value) < float("inf") else None for name, value in figures.items()}

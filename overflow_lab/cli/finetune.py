"""`overflow-lab finetune MODEL --data FILE`: train a copy into the range of a precision, and prove it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overflow_lab.cli import options as opt
from overflow_lab.cli.ending import named_end
from overflow_lab.cli.places import FOLDER, check_writable, place, stem_of
from overflow_lab.cli.progress import watched
from overflow_lab.errors import ScanInterrupted, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from overflow_lab.remedies.finetune import Finetuned

Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        "--inputs",
        help="Texts to train on: txt, jsonl, csv or parquet [default: built-in texts].",
        show_default=False,
    ),
]
Labels = Annotated[
    str | None,
    typer.Option("--labels", help="The column with the right answers: adds the task's loss.", show_default=False),
]
Steps = Annotated[int, typer.Option(help="Training steps at most; it ends early when the goal is reached.")]
Rate = Annotated[float, typer.Option("--lr", "--learning-rate", help="Step size, relative to each weight's own size.")]
Bits = Annotated[float, typer.Option(help="Headroom that each layer is to have, in bits.")]
Weight = Annotated[float, typer.Option(help="Weight of the penalty beside the distillation.")]
SaveFolder = Annotated[
    Path | None, typer.Option("--save", metavar="FOLDER", help="The checkpoint to write.", show_default=False)
]
Checkpoints = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Where the training is kept [default: reports/MODEL-finetune].", show_default=False
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where the training in that folder ended.")]
Prove = Annotated[bool, typer.Option(help="Scan the trained model and compare it with the original.")]


def finetune(
    context: typer.Context,
    model: opt.Model,
    data: Data = None,
    precision: opt.OnePrecision = "float16",
    labels: Labels = None,
    column: opt.Column = None,
    template: opt.Template = None,
    steps: Steps = 400,
    batch_size: opt.BatchSize = 32,
    lr: Rate = 0.01,
    headroom_bits: Bits = 1.0,
    penalty_weight: Weight = 1.0,
    save: SaveFolder = None,
    checkpoints: Checkpoints = None,
    resume: Resume = False,
    prove: Prove = True,
    task: opt.Task = None,
    max_length: opt.MaxLength = None,
    generate: opt.Generate = True,
    num_beams: opt.NumBeams = 4,
    max_new_tokens: opt.MaxNewTokens = 32,
    device: opt.Device = "cpu",
    attn_implementation: opt.AttnImplementation = None,
    revision: opt.Revision = None,
    subfolder: opt.Subfolder = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    allow_pickle: opt.AllowPickle = False,
    level: opt.Level = "auto",
    kernels: opt.Kernels = "auto",
    recording: opt.RecordingFile = None,
    report: opt.ReportFile = None,
    as_json: opt.AsJson = False,
    overwrite: opt.Overwrite = False,
    quiet: opt.Quiet = False,
) -> int:
    """Train a copy of MODEL until its activations fit, with the original's outputs as the target; then prove it."""
    stem = f"{stem_of(model)}-finetune"
    kept = checkpoints or FOLDER / stem
    _check(kept, save, resume=resume, overwrite=overwrite)
    written = place(recording, stem, ".jsonl.gz", overwrite=overwrite)
    target = place(report, stem, ".html", overwrite=overwrite)
    check_writable(target)
    with named_end(kept):
        done = _trained({**context.params, "recording": written}, kept, quiet)
    saved = save if save is not None and done.good else None
    if saved is not None:
        done.save(saved)
    done.scan.save_report(target)
    if as_json:
        sys.stdout.write(json.dumps(done.to_dict(), indent=2, allow_nan=False) + "\n")
    else:
        typer.echo("\n".join([*lines(done, saved=saved), f"report     {target}", f"recording  {written}"]))
    if save is not None and saved is None:
        why = "it is not proven" if done.reached else "the goal was not reached"
        sys.stderr.write(f"overflow-lab: {why}, so {save} was not written; give more --steps.\n")
    return int(not done.good)


def _check(kept: Path, save: Path | None, *, resume: bool, overwrite: bool) -> None:
    """Refuse folders that hold something, before the training and not after it."""
    from overflow_lab.remedies.checkpoint import check_free

    if save is not None:
        check_free(save)
        if save.resolve() == kept.resolve():
            raise UsageError(f"--save and --checkpoints are both {save}; name two folders.")
    if not resume and kept.is_dir() and any(kept.iterdir()) and not overwrite:
        raise UsageError(f"{kept} holds a training already; give --resume to go on, --overwrite, or --checkpoints.")
    if resume and not kept.is_dir():
        raise UsageError(f"there is no checkpoint in {kept} to resume; leave --resume out.")


def _trained(params: dict[str, Any], kept: Path, quiet: bool) -> Finetuned:
    """Train behind progress bars."""
    with watched(quiet=quiet) as bars:
        from overflow_lab.remedies.finetune import finetune as run

        own = {name: params[name] for name in ("precision", "labels", "steps", "headroom_bits", "penalty_weight")}
        data = None if params["data"] is None else str(params["data"])
        options = opt.subject_options(params)
        options.pop("texts")
        try:
            return run(
                params["model"],
                data,
                checkpoints=kept,
                resume=params["resume"],
                prove=params["prove"],
                progress=bars,
                learning_rate=params["lr"],
                recording=params["recording"],
                **own,
                **options,
            )
        except KeyboardInterrupt:
            saved = str(kept) if kept.exists() else None
            more = " The same command with --resume goes on." if saved else ""
            raise ScanInterrupted(f"interrupted.{more}", saved) from None


def lines(done: Finetuned, *, saved: Path | None) -> list[str]:
    """Return what to print: before and after on held-back inputs, the proof, and where it all is."""
    said = (*_measured(done), *_proof(done), ("saved", "" if saved is None else str(saved)))
    rows = (*said, ("training", "" if done.checkpoints is None else str(done.checkpoints)))
    return [f"{name:<10} {text}" for name, text in rows if text]


def _measured(done: Finetuned) -> Iterator[tuple[str, str]]:
    goal = "reached" if done.reached else "not reached"
    yield "goal", f"{goal} after {done.steps:,} steps, {done.seconds / 60:.1f} minutes"
    yield "before", _row(done.before)
    yield (
        "after",
        _row(done.after)
        + (
            f"; KL {done.after['kl']:.2g}, {100 * done.after['same']:.2f}% of decisions the same"
            if done.after["kl"] is not None
            else ""
        ),
    )


def _row(row: Mapping[str, Any]) -> str:
    from overflow_lab.analysis.numbers import number
    from overflow_lab.report import text

    loss = "" if row["task_loss"] is None else f"; task loss {row['task_loss']:.4g}"
    if row["largest"] is None or row["headroom"] is None:
        return f"not finite{loss}"
    where = text.visible(row["site"], 120)
    return f"largest {number(row['largest'])} at {where}, {row['headroom']:.2f} bits of headroom{loss}"


def _proof(done: Finetuned) -> Iterator[tuple[str, str]]:
    from overflow_lab.report import text

    proof = done.proof
    if proof is None:
        return
    ran = f"{text.plural(proof.inputs, 'input')} and {proof.held_inputs:,} held back"
    yield "proof", f"proven on {ran}" if proof.proven else f"not proven on {ran}: {text.visible(proof.reason, 300)}"
    same = proof.figures.get("same_answers")
    if same is not None:
        yield "", f"{100 * same:.2f}% of answers in {proof.runs_in} are those of float32"

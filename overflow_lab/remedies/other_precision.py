"""Another precision: the one that a model runs well in, instead of the one that breaks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from overflow_lab.analysis.numbers import module_name
from overflow_lab.errors import OverflowLabError, UsageError
from overflow_lab.remedies.remedy import Found, Remedy
from overflow_lab.scan import Scan, scan_subject

if TYPE_CHECKING:
    from overflow_lab.analysis import Verdict
    from overflow_lab.progress import Progress
    from overflow_lab.subjects import Subject

# What is tried for a precision of each format, the cheapest first. Autocast keeps the weights in float32: it costs the
# memory that half precision saves, so it comes last.
_INSTEAD = {
    "float16": ("float16", "bfloat16", "float16-autocast", "bfloat16-autocast"),
    "bfloat16": ("bfloat16", "float16", "bfloat16-autocast", "float16-autocast"),
}
_NEEDS_AMPERE = (
    "bfloat16 needs hardware that has it: NVIDIA GPUs from compute capability 8.0 (A100, RTX 30) on; V100, T4 and "
    "RTX 20 emulate it slowly"
)


def propose(
    subject: Subject, found: Scan, precision: str, *, progress: Progress | None = None, runs: int = 60
) -> Found:
    """Return the other precisions in which the model is ok, the cheapest first.

    Those that `found` has not judged are scanned, all of them in one scan, where `runs` allows. What is wrong with the
    others is said in the notes of those that are proposed.
    """
    verdict = found.verdicts.get(precision)
    instead = [name for name in _INSTEAD.get(precision.partition("-")[0], ()) if name != precision]
    if verdict is None or verdict.verdict == "ok":
        return Found()
    new = _scanned(subject, [name for name in instead if name not in found.verdicts], progress, runs)
    judged = [other for name in instead if (other := {**new, **found.verdicts}.get(name)) is not None]
    beside = tuple(_said(other) for other in judged if other.verdict != "ok")
    made = [_remedy(subject, found, precision, other) for other in judged if other.verdict == "ok"]
    if not made:
        return Found(reason="; ".join(beside) or "no other precision was scanned")
    return Found(tuple(dataclasses.replace(each, notes=(*each.notes, *beside), runs=len(new)) for each in made))


def _scanned(subject: Subject, names: list[str], progress: Progress | None, runs: int) -> dict[str, Verdict]:
    """Return the verdicts on these precisions; none where their scan ends early."""
    if not names or runs < len(names):
        return {}
    try:
        return {
            name: v for name, v in scan_subject(subject, names, progress=progress).verdicts.items() if name in names
        }
    except UsageError:
        raise
    except OverflowLabError:
        return {}


def _said(verdict: Verdict) -> str:
    """Return what is wrong with another precision, as a note."""
    where = f" at {module_name(verdict.origin.module)}" if verdict.origin else ""
    right = ", the output within rounding" if verdict.severity == "warning" else ""
    return f"{verdict.precision} is not ok: {verdict.verdict}{where}{right}"


def _remedy(subject: Subject, found: Scan, precision: str, other: Verdict) -> Remedy:
    device = str(found.recording.header.environment.get("device", "cpu"))
    return Remedy(
        kind="precision",
        title=f"Run in {other.precision} instead of {precision}",
        precision=precision,
        runs_in=other.precision,
        mend=lambda mended: mended,
        snippets={"how": code(subject, other.precision, device)},
        notes=_costs(other.precision, device),
    )


def _costs(name: str, device: str) -> tuple[str, ...]:
    """Return what a precision costs, and asks of the hardware."""
    notes = []
    if name.endswith("-autocast"):
        notes.append("the weights stay in float32: twice the memory of half precision")
    if name.startswith("bfloat16"):
        notes.append(_NEEDS_AMPERE if has_bfloat16(device) else f"this device ({device}) has no bfloat16 arithmetic")
        if not name.endswith("-autocast"):
            notes.append("bfloat16 keeps 8 significant bits where float16 keeps 11")
    else:
        notes.append("float16 ends at 65,504, bfloat16 does not: larger values of other inputs would overflow")
    return tuple(notes)


def has_bfloat16(device: str) -> bool:
    """Return whether a device calculates in bfloat16 itself; a CPU is taken to, since torch has kernels for it."""
    import torch

    if not device.startswith("cuda") or not torch.cuda.is_available():
        return True
    with torch.cuda.device(torch.device(device)):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def code(subject: Subject, name: str, device: str) -> str:
    """Return the lines that run the subject's model in a precision, as code to paste."""
    dtype, _, way = name.partition("-")
    if way == "autocast":
        kind = device.partition(":")[0]
        return (
            "# the weights stay in float32\n"
            f'with torch.autocast("{kind}", dtype=torch.{dtype}):\n    output = model(**inputs)\n'
        )
    if subject.save is None or way == "to":
        return f"model = model.to(torch.{dtype})\n"
    loader = subject.facts.get("class", "AutoModel")
    place = "FOLDER" if subject.kind != "hub" else subject.name
    return f'model = {loader}.from_pretrained("{place}", dtype=torch.{dtype})\n'

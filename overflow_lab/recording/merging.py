"""Recordings made apart become one: what one process would have recorded over all their inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from overflow_lab.errors import UsageError
from overflow_lab.recording import (
    STEP_BATCHES,
    BatchRow,
    BlindSpotRow,
    CastRow,
    FailureRow,
    Header,
    ModuleRow,
    NoiseRow,
    PrecisionRow,
    ProofRow,
    RangeRow,
    Recording,
    RunRow,
    ShareRow,
    StepRow,
    TensorRow,
    load,
)
from overflow_lab.recording.belonging import check, share_of
from overflow_lab.recording.gaps import footer_of, gap_rows
from overflow_lab.recording.looks import kept_looks
from overflow_lab.recording.timeline import placed
from overflow_lab.recording.uncalled import is_uncalled, uncalled
from overflow_lab.recording.writer import Writer

# What describes the model is the same in all recordings; what is measured once is measured on the first batch.
_DESCRIBED = (ModuleRow, TensorRow, PrecisionRow)
_MEASURED = (CastRow, NoiseRow)


def merge(recordings: Iterable[Recording | str | Path], *, recording: str | Path | None = None) -> Recording:
    """Return the recording that one process would have made of all inputs of these, up to order, times and rounding.

    Recordings of whole scans follow each other in the order given; shares of one scan (see docs/distributed.md) are
    put together batch by batch. Ranges, counts, histograms, extremes and sums add up, and so do outputs, answers,
    errors and runs; what one process records once (casts of inputs, the noise floor, looks from inside) is the one
    that it would have recorded. What is missing is named: in the blind spots, and in the footer, which says "complete"
    only where all of it is there. `recording` is a file to write.

    Raises UsageError where there is nothing to merge, or where the recordings are not of one model, run alike.
    """
    found = [r if isinstance(r, Recording) else load(r) for r in recordings]
    if not found:
        raise UsageError("there is nothing to merge; give recordings that scan wrote.")
    check(found)
    if recording is not None and any(r.path and Path(r.path).resolve() == Path(recording).resolve() for r in found):
        raise UsageError(f"{Path(recording).name} is one of the recordings to merge; choose another name.")
    writer = Writer(None if recording is None else Path(recording), _header(found))
    with writer:
        for row in _rows(found):
            writer.append(row)
        writer.append(footer_of(found))
    return writer.recording()


def _rows(recordings: Sequence[Recording]) -> Iterator[Any]:
    """Yield the rows of the whole."""
    parts = placed(recordings)
    dated = [part.rows() for part in parts]
    rows = [row for part in dated for row in part]
    yield from _once(dated)
    yield from sorted((row for row in rows if isinstance(row, RangeRow)), key=lambda row: row.order)
    yield from kept_looks(rows)
    for row in sorted(filter(_is_plain, rows), key=lambda row: getattr(row, "batch", 0)):
        if not isinstance(row, StepRow) or row.batch < STEP_BATCHES:
            yield row
    yield from _failures(rows)
    yield from _blind_spots([part.recording for part in parts], rows)


def _is_plain(row: Any) -> bool:
    """Return whether a row stands for itself, or adds up with others of its key."""
    special = (*_DESCRIBED, *_MEASURED, RangeRow, FailureRow, BlindSpotRow, ProofRow, BatchRow, ShareRow)
    return not isinstance(row, special) and getattr(row, "kind", "") != "look" and getattr(row, "look", None) is None


def _once(dated: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """Yield what is recorded once: of the model by any, of the first batch by the first recording that ran one."""
    known: set[Any] = set()
    for rows in dated:
        described = [row for row in rows if isinstance(row, _DESCRIBED) and _name(row) not in known]
        known |= {_name(row) for row in described}
        yield from described
    measured: set[str] = set()
    for rows in dated:
        yield from (row for row in rows if isinstance(row, _MEASURED) and row.precision not in measured)
        measured |= {row.precision for row in rows if isinstance(row, RunRow) and row.batches}


def _name(row: ModuleRow | TensorRow | PrecisionRow) -> tuple[str, ...]:
    if isinstance(row, ModuleRow):
        return row.kind, row.path
    return (row.kind, row.role, row.name) if isinstance(row, TensorRow) else (row.kind, row.precision)


def _failures(rows: Iterable[Any]) -> Iterator[FailureRow]:
    """Yield the first failure of each kind of run in each precision."""
    first: dict[tuple[str, str], FailureRow] = {}
    for row in sorted((row for row in rows if isinstance(row, FailureRow)), key=lambda row: row.batch):
        first.setdefault((row.precision, row.run), row)
    yield from first.values()


def _blind_spots(recordings: Sequence[Recording], rows: Iterable[Any]) -> Iterator[BlindSpotRow]:
    """Yield each blind spot once, what no recording called, and what is missing."""
    said = (r for r in rows if isinstance(r, BlindSpotRow) and r.look is None and not is_uncalled(r))
    yield from dict.fromkeys(said)
    proofs = sum(isinstance(row, ProofRow) for row in rows)
    if proofs:
        yield BlindSpotRow("", f"{proofs} proofs of remedies were left out: each was made on a part of the inputs")
    yield from uncalled(recordings)
    yield from gap_rows(recordings)


def _header(recordings: Sequence[Recording]) -> Header:
    """Return the header of the whole: facts that differ stand side by side."""
    headers = [recording.header for recording in recordings]
    first = headers[0]
    options = _agreed([header.options for header in headers])
    environment = _joined([header.environment for header in headers])
    share = share_of(recordings[0])
    if share is not None:
        environment["processes"] = share[1]
    notes = dict.fromkeys(note for header in headers for note in header.subject.get("notes") or ())
    sources = _joined([{k: h.subject[k] for k in ("inputs_source",) if k in h.subject} for h in headers])
    return dataclasses.replace(
        first,
        created=min(header.created for header in headers),
        subject={**first.subject, **sources, "notes": list(notes)},
        environment=environment,
        options={key: value for key, value in options.items() if key not in ("rank", "ranks")},
    )


def _agreed(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the facts that are the same in all; those about devices side by side."""
    joined = _joined(facts)
    return {k: v for k, v in joined.items() if k == "device" or all(f.get(k) == v for f in facts)}


def _joined(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return all facts, different values of one side by side."""
    made: dict[str, Any] = {}
    for key in dict.fromkeys(key for one in facts for key in one):
        values = list(dict.fromkeys(str(one[key]) for one in facts if key in one))
        made[key] = next(one[key] for one in facts if key in one) if len(values) == 1 else ", ".join(values)
    return made

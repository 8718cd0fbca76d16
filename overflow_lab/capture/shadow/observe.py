"""One call of a low-precision model, seen from inside: rows of operations, events and attribution."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from overflow_lab.capture.outputs import Outputs, compare_outputs, is_ranked, mask_of
from overflow_lab.capture.precisions import REFERENCE, Prepared
from overflow_lab.capture.shadow.attribute import (
    Attribution,
    Blame,
    Metric,
    centered,
    changed_decisions,
    decisions,
    relative,
)
from overflow_lab.capture.shadow.call import Call
from overflow_lab.capture.shadow.dispatch import ShadowMode
from overflow_lab.capture.shadow.program import ProgramLog
from overflow_lab.capture.shadow.run import ShadowRun, log_program, run
from overflow_lab.capture.shadow.shadows import has_shadow
from overflow_lab.capture.shadow.sites import Event, Site, SiteKey
from overflow_lab.formats import FORMATS
from overflow_lab.recording import AttributionRow, BlindSpotRow, EventRow, OperationRow, OutputRow
from overflow_lab.subjects.containers import tensors
from overflow_lab.tolerances import EVENED, EVENED_ROWS, SPREAD, tolerance

ShadowRow = OperationRow | EventRow | AttributionRow | OutputRow | BlindSpotRow


@dataclass
class Observer:
    """Observes the calls of one precision; `base` is the float32 model, `low` the model in the precision.

    Where they are the same, float32 itself is observed: its shadows are in float64, and its output is compared with
    its own shadow, since there is no other run to compare it with.
    """

    base: Prepared
    low: Prepared

    def observe(self, call: Call, batch: int, *, off: bool = False) -> list[ShadowRow]:
        """Run one call with its shadow and return the rows; `off`: the output is known to differ from float32's."""
        log = log_program(self.base, call)
        exact = self.low.precision.name == REFERENCE
        mode = ShadowMode(baseline=log, least=torch.float64 if exact else torch.float32)
        try:
            made: ShadowRun | None = run(mode, self.low, self.base.model, call)
        except Exception:
            if not mode.notes.failed():
                raise
            made = None  # the first refusal, or bad value, is known; what came of it no more
        self._constants(mode, log)
        _draws(mode, log)
        precision = self.low.precision.name
        rows: list[ShadowRow] = [_operation(precision, site) for site in mode.notes.sites.values()]
        unmeant = [event for event in mode.notes.events.values() if not _meant(event, log, exact=exact)]
        events = sorted(unmeant, key=lambda event: event.clock)
        rows += [_event(precision, event, mode, call, batch) for event in events]
        rows += [
            BlindSpotRow("", f"an operation was not replayed ({what})", precision) for what in sorted(mode.unreplayed)
        ]
        if exact and made is not None:
            rows += _against_shadow(made, call)
        if call.settings is None and made is not None:
            rows += self._attributed(call, log, made, events, off)
        mode.shadows.close()
        return rows

    def _constants(self, mode: ShadowMode, log: ProgramLog) -> None:
        """Write down the first operation whose constants are others than in float32's program."""
        for key, scalars in mode.scalars.items():
            theirs = log.scalars.get(key)
            if theirs is not None and theirs != scalars and key in mode.notes.sites:
                site = mode.notes.sites[key]
                detail = f"{_said(theirs)} in float32, {_said(scalars)} here"
                mode.notes.events["constant", key] = Event(
                    "constant", *key, clock=site.order, call=0, dtype=site.dtype, detail=detail
                )
                return

    def _attributed(
        self, call: Call, log: ProgramLog, made: ShadowRun, events: list[Event], off: bool
    ) -> Iterator[AttributionRow | BlindSpotRow]:
        """Attribute the output's error, where it is more than rounding and no bad value explains it."""
        harmful = [e for e in events if e.event == "bad" and (e.harmed or e.reaches_output)]
        if harmful and not (harmful[0].zero_operand and harmful[0].cause is None):
            return
        limit = tolerance(FORMATS[self.low.precision.dtype])
        own = _own(made)
        trials: list[tuple[str, Metric, float]] = [("relative", relative, limit), ("centered", centered, SPREAD)]
        if off or harmful:
            trials.append(("decisions", decisions, 0.0))
        for name, metric, allowed in trials:
            if name != "decisions" and not metric(own, made) > allowed:
                continue
            if name == "decisions" and not harmful and (blame := _by_rounding_alone(made)) is not None:
                yield _attribution(self.low.precision.name, name, blame)
                return
            search = Attribution(self.low, self.base.model, call, log, made, metric)
            blame = search.find()
            if blame is not None:
                dtype = self.low.precision.dtype
                noise = changed_decisions(self.base, call, log, dtype) if name == "decisions" else None
                yield dataclasses.replace(_attribution(self.low.precision.name, name, blame), noise=noise)
                return
            if search.gave_up:
                reason = f"which operation makes most of the error was not found in {search.runs} runs"
                yield BlindSpotRow("", reason, self.low.precision.name)
                return


def _against_shadow(made: ShadowRun, call: Call) -> list[OutputRow]:
    """Return how the outputs stand to their own shadows."""
    found = dict(tensors(made.output, "output", caches=False))
    shadows = {port: made.mode.shadows.of(t) if has_shadow(t) else t for port, t in found.items()}
    return compare_outputs(REFERENCE, Outputs(shadows, mask_of(call.inputs), made.real), Outputs(found))[0]


def _draws(mode: ShadowMode, log: ProgramLog) -> None:
    """Write down the first draw that is another than float32's: torch's generators may draw otherwise for halves."""
    for key, mine in mode.drawn.items():
        theirs = log.drawn.get(key)
        if theirs is None or not _alike(mine, theirs):
            mode.notes.events["drawn", key] = Event("drawn", *key, clock=mode.clock, call=0)
            return


def _alike(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether two draws differ by rounding at most."""
    return mine.shape == theirs.shape and bool(torch.isclose(mine, theirs, rtol=0.02, atol=0.02).all())


def _by_rounding_alone(made: ShadowRun) -> Blame | None:
    """Return the operation that gives the scores, where its rounding of float32's own scores changes most choices.

    Earlier roundings (of a bias, say) may even the same scores out; but with them mended, the scores' format still
    does.
    """
    for name, tensor in tensors(made.output, "output", caches=False):
        if not (has_shadow(tensor) and is_ranked(name, tensor)):
            continue
        exact, site = made.mode.shadows.of(tensor), made.mode.shadows.memory(tensor).made
        best = exact.argmax(-1)
        changed = tensor.argmax(-1) != best
        alone = int((changed & (exact.to(tensor.dtype).argmax(-1) != best)).sum())
        total = int(changed.sum())
        few = best.numel() < EVENED_ROWS or total <= EVENED * best.numel()
        if site is not None and not few and alone > total / 2:
            return Blame(site, float(total), alone / total, 0)
    return None


def _own(made: ShadowRun) -> ShadowRun:
    """Return the run with the program's own outputs in the place of their shadows."""
    found = tensors(made.output, "output", caches=False)
    return ShadowRun(made.mode, made.output, {name: made.real.select(t) for name, t in found if name in made.shadows})


def _attribution(precision: str, metric: str, blame: Blame) -> AttributionRow:
    module, op, ordinal = blame.key
    amplifier = _short(blame.amplifier)
    return AttributionRow(
        precision, metric, blame.total, module, op, ordinal, blame.share, blame.runs, amplifier, blame.detail
    )


def _meant(event: Event, log: ProgramLog, *, exact: bool) -> bool:
    """Return whether float32's own program makes bad values there too: they are meant so.

    Of float32 itself only infinities are: NaN is never meant, and the only other judge says the same.
    """
    return event.event == "fresh" and event.key in log.bad and not (exact and event.nan)


def _said(scalars: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.6g}" for value in scalars) or "none"


def _operation(precision: str, site: Site) -> OperationRow:
    return OperationRow(precision, **vars(site))


def _event(precision: str, event: Event, mode: ShadowMode, call: Call, batch: int) -> EventRow:
    own = ("scalars", "cause", "harmed", "absorbed", "row", "rows", "carried")
    facts = {k: v for k, v in vars(event).items() if k not in own}
    # A row of a weight or a buffer is no input's.
    held = event.ordinal < 0 and event.detail not in dict(tensors(call.named(), "input"))
    row, rows, beams = (event.row, event.rows, 0) if held else call.place(event.row, event.rows)
    cause = mode.notes.sites.get(event.cause) if event.cause else None
    return EventRow(
        precision,
        run=call.run,
        batch=batch,
        row=row,
        rows=rows,
        beams=beams,
        cause=_short(event.cause),
        constant_cause=bool(cause and cause.constant_flushed),
        harmed=_short(event.harmed),
        absorbed=_short(event.absorbed),
        **facts,
    )


def _short(key: SiteKey | None) -> tuple[str, ...] | None:
    return None if key is None else key[:2]

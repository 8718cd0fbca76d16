"""One call of a low-precision model, seen from inside: the rows of its operations, its events and its attribution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from overflow_lab.capture.precisions import Prepared
from overflow_lab.capture.shadow.attribute import Attribution, Blame, Metric, centered, relative
from overflow_lab.capture.shadow.dispatch import ShadowMode
from overflow_lab.capture.shadow.program import ProgramLog
from overflow_lab.capture.shadow.run import Call, ShadowRun, log_program, run
from overflow_lab.capture.shadow.sites import Event, Site, SiteKey
from overflow_lab.formats import FORMATS
from overflow_lab.recording import AttributionRow, BlindSpotRow, EventRow, OperationRow
from overflow_lab.tolerances import SPREAD, tolerance

ShadowRow = OperationRow | EventRow | AttributionRow | BlindSpotRow
_KINDS = ("bad", "fresh", "unsupported", "flip", "tie", "constant")


@dataclass
class Observer:
    """Observes the calls of one precision; `base` is the float32 model, `low` the model in the precision."""

    base: Prepared
    low: Prepared

    def observe(self, call: Call, batch: int, scores: tuple[str, ...] = ()) -> list[ShadowRow]:
        """Run one call with its shadow and return the rows; `scores` names the outputs whose best is a decision."""
        log = log_program(self.base, call)
        mode = ShadowMode(baseline=log)
        made = run(mode, self.low, self.base.model, call)
        self._ties(made, scores)
        self._constants(mode, log)
        precision = self.low.precision.name
        rows: list[ShadowRow] = [_operation(precision, site) for site in mode.sites.values()]
        events = sorted(mode.events.values(), key=lambda event: event.clock)
        rows += [_event(precision, event, mode, batch) for event in events if not _meant(event, log)]
        rows += [BlindSpotRow("", f"an operation could not be replayed ({what})", precision) for what in sorted(mode.unreplayed)]
        if not any(event.event == "bad" and (event.harmed or event.reaches_output) for event in events):
            rows += self._attributed(call, log, made)
        mode.shadows.close()
        return rows

    def _ties(self, made: ShadowRun, scores: tuple[str, ...]) -> None:
        """Look for decisions that flip in the output's scores."""
        from overflow_lab.capture.containers import tensors

        for name, tensor in tensors(made.output, "output", caches=False):
            if name in scores:
                made.mode.flipped(tensor, "tie")

    def _constants(self, mode: ShadowMode, log: ProgramLog) -> None:
        """Write down the first operation whose constants are others than in float32's program."""
        for key, scalars in mode.scalars.items():
            theirs = log.scalars.get(key)
            if theirs is not None and theirs != scalars and key in mode.sites:
                site = mode.sites[key]
                detail = f"{_said(theirs)} in float32, {_said(scalars)} here"
                mode.events["constant", key] = Event("constant", *key, clock=site.order, call=0, dtype=site.dtype, detail=detail)
                return

    def _attributed(self, call: Call, log: ProgramLog, made: ShadowRun) -> Iterator[AttributionRow]:
        """Attribute the output's error, where it is more than rounding."""
        limit = tolerance(FORMATS[self.low.precision.dtype])
        values = _own_values(made)
        for name, metric, allowed in (("relative", relative, limit), ("centered", centered, SPREAD)):
            if metric(values, made.shadows) > allowed:
                blame = self._blame(call, log, made, metric)
                if blame is not None:
                    module, op, ordinal = blame.key
                    yield AttributionRow(
                        self.low.precision.name, name, blame.total, module, op, ordinal, blame.share, blame.runs, blame.detail
                    )
                return

    def _blame(self, call: Call, log: ProgramLog, made: ShadowRun, metric: Metric) -> Blame | None:
        return Attribution(self.low, self.base.model, call, log, made, metric).find()


def _own_values(made: ShadowRun) -> dict[str, torch.Tensor]:
    from overflow_lab.capture.containers import tensors

    return {name: t for name, t in tensors(made.output, "output", caches=False) if name in made.shadows}


def _meant(event: Event, log: ProgramLog) -> bool:
    """Return whether float32's own program makes bad values there too: they are meant so."""
    return event.event == "fresh" and event.key in log.bad


def _said(scalars: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.6g}" for value in scalars) or "none"


def _operation(precision: str, site: Site) -> OperationRow:
    return OperationRow(precision, **vars(site))


def _event(precision: str, event: Event, mode: ShadowMode, batch: int) -> EventRow:
    facts = {k: v for k, v in vars(event).items() if k not in ("scalars", "cause", "harmed", "absorbed")}
    cause = mode.sites.get(event.cause) if event.cause else None
    return EventRow(
        precision,
        run="forward",
        batch=batch,
        cause=_short(event.cause),
        constant_cause=bool(cause and cause.constant_flushed),
        harmed=_short(event.harmed),
        absorbed=_short(event.absorbed),
        **facts,
    )


def _short(key: SiteKey | None) -> tuple[str, ...] | None:
    return None if key is None else key[:2]

"""Looks at each result of a shadow run beside its shadow, and writes down what is to be seen: sites and events."""

from __future__ import annotations

import torch

from overflow_lab.capture.shadow import judge, operations
from overflow_lab.capture.shadow.decisions import margin, rounded
from overflow_lab.capture.shadow.shadows import Memory, Shadows, has_shadow
from overflow_lab.capture.shadow.sites import Event, Site, SiteKey, source_line
from overflow_lab.capture.shadow.step import Step


class Notes:
    """What a shadow run has seen: its sites, its events, and which bad values came of which event.

    `clock` counts the operations of the program, `call` the calls of the model itself, which in `generate` are steps.
    """

    def __init__(self, shadows: Shadows) -> None:
        self.shadows = shadows
        self.clock = 0
        self.call = -1
        self.sites: dict[SiteKey, Site] = {}
        self.events: dict[tuple[str, SiteKey], Event] = {}
        self._numbers: dict[int, Event] = {}

    def look(self, step: Step, low: torch.Tensor, *, detail: str = "") -> None:
        """Compare a result with its shadow, and write down what is to be seen; `detail` names a cast tensor."""
        memory, shadow = self.shadows.memory(low), self.shadows.of(low)
        if (lost := rounded(step, low, self.shadows)) is not None:
            memory.rounded = step.key, lost
        if low.is_complex():  # infinities and signs are those of the two parts
            low, shadow = torch.view_as_real(low.resolve_conj()), torch.view_as_real(shadow.resolve_conj())
        elif low.itemsize == 1:
            low = low.to(shadow.dtype)  # few operations know 8 bits
        found = judge.compare(low, shadow)
        memory.error, memory.made = found.error, step.key
        site = self.site(step, low)
        site.calls += 1
        site.elements += low.numel()
        site.nonfinite += found.nonfinite
        site.absmax = max(site.absmax, found.absmax)
        site.flushed += found.flushed
        if found.error >= site.error:
            site.error, site.error_in = found.error, step.error
        own = found.error if step.error == 0 else step.local
        if own is not None:
            site.local_error = max(site.local_error or 0.0, own)
        self._marks(step, memory, low, shadow, found)
        if detail and (event := self.events.get(("bad", step.key))):
            event.detail, event.source, event.dtype = detail, "", site.dtype
        site.detail = detail

    def _marks(
        self, step: Step, memory: Memory, low: torch.Tensor, shadow: torch.Tensor, found: judge.Comparison
    ) -> None:
        if not step.writes:
            memory.marks.clear()
        for number in step.bad:
            self._numbers[number].carried = True
        if found.new is not None:
            numbers = step.bad or {self._origin(step, low, shadow, found.new)}
            memory.marks.setdefault("bad", set()).update(numbers)
        elif step.bad:
            self._consumed(step, low, shadow)
        if found.nonfinite:
            self._fresh(step, low)
        if found.flushed:
            tiny = torch.finfo(low.dtype).smallest_normal
            site = self.sites[step.key]
            site.constant_flushed = site.constant_flushed or any(0 < abs(s) < tiny for s in step.scalars)
            memory.marks.setdefault("flush", set()).update(step.flush or {step.key})  # type: ignore[arg-type]
        elif step.flush and found.zeroed:
            memory.marks.setdefault("flush", set()).update(step.flush)  # type: ignore[arg-type]

    def _origin(self, step: Step, low: torch.Tensor, shadow: torch.Tensor, new: torch.Tensor) -> int:
        """Write down that bad values were made out of good ones; return the event's number."""
        event = self.event("bad", step)
        self._numbers[number := id(event)] = event
        event.row, event.rows = (event.row, event.rows) if event.elements else judge.first_row(new)
        event.inf += int((torch.isinf(low) & new).sum())
        event.nan += int((torch.isnan(low) & new).sum())
        event.elements += low.numel()
        peak = float(torch.where(new, shadow, 0).abs().max())
        event.value = max(event.value or 0.0, peak)
        event.negative = event.negative and bool((low[new] < 0).all())
        if step.name.rstrip("_") in operations.ZERO_SENSITIVE:
            before = step.before or [(t, self.shadows.of(t)) for t in step.reads]
            event.zero_operand = event.zero_operand or any(judge.any_zeroed(a, b) for a, b in before)
        if event.zero_operand and step.flush:
            event.cause = max(
                (key for key in step.flush if key in self.sites),
                key=lambda key: self.sites[key].flushed_share,
                default=None,
            )
        return number

    def _fresh(self, step: Step, low: torch.Tensor) -> None:
        """Write down a bad value that no operand had, whatever the shadow says; float32's own program judges it."""
        if operations.nonfinite_scalars(step.scalars):
            return
        operands = [t for t in step.reads if all(t is not w for w in step.writes)] + [a for a, _ in step.before]
        had_bad = any(not bool(torch.isfinite(t).all()) for t in operands)
        had_nan = had_bad and any(bool(torch.isnan(t).any()) for t in operands)
        if not had_bad or (not had_nan and bool(torch.isnan(low).any())):
            event = self.event("fresh", step)
            event.nan += int(torch.isnan(low).sum())
            event.inf += int(torch.isinf(low).sum())
            event.elements += low.numel()

    def _consumed(self, step: Step, low: torch.Tensor, shadow: torch.Tensor) -> None:
        """A bad operand, a finite result: wrong, or as right as if the operand had been good?"""
        wrong = judge.any_wrong(low, shadow, self._tainted(step, low))
        for number in step.bad:
            event = self._numbers[number]
            if wrong:
                event.harmed = event.harmed or step.key
            else:
                event.absorbed = event.absorbed or step.key

    def _tainted(self, step: Step, low: torch.Tensor) -> torch.Tensor | None:
        """Return which elements of a pointwise result came of bad ones; None for other operations."""
        if not step.facts.pointwise:
            return None
        mask = torch.zeros_like(low, dtype=torch.bool)
        for tensor, high in step.before or [(t, self.shadows.of(t)) for t in step.reads]:
            new = ~torch.isfinite(tensor) & torch.isfinite(high)
            try:
                mask = mask | new
            except RuntimeError:  # shapes that this operation lines up in its own way
                return None
        return mask if mask.shape == low.shape else None

    def decided(self, step: Step, mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
        """Write down decisions of the program, integers or truths, that the shadow makes otherwise."""
        changed = [(a, b) for a, b in zip(mine, theirs, strict=True) if not torch.equal(a, b)]
        if not changed:
            return
        for number in step.bad:
            self._numbers[number].harmed = self._numbers[number].harmed or step.key
        event = self.event("decision", step)
        if not event.elements:
            event.row, event.rows = judge.first_row(changed[0][0] != changed[0][1])
        event.changed += sum(int((a != b).sum()) for a, b in changed)
        event.elements += sum(t.numel() for t in mine)
        margins = [event.margin, *(margin(step, a, b, self.shadows) for a, b in changed)]
        event.margin = max((m for m in margins if m is not None), default=None)

    def failed(self) -> bool:
        """Say that the program has raised; return whether what was seen before can be why.

        A refusal can, and a bad value that was handed on and that nobody has made harmless: it has reached what raised.
        """
        suspects = [
            e for e in self.events.values() if e.event == "bad" and (e.harmed or (e.carried and not e.absorbed))
        ]
        for event in suspects:
            event.reaches_output = True
        return bool(suspects) or any(event.event == "unsupported" for event in self.events.values())

    def reached(self, outputs: list[torch.Tensor]) -> None:
        """Say which tensors are the program's output: bad values in them have done harm."""
        for tensor in outputs:
            if not has_shadow(tensor):
                continue
            memory = self.shadows.known(tensor)
            numbers = memory.marks.get("bad", set()) if memory else set()
            if numbers and judge.any_new(tensor, self.shadows.of(tensor)):
                for number in numbers:
                    self._numbers[number].reaches_output = True

    def site(self, step: Step, low: torch.Tensor) -> Site:
        """Return the site of an operation, a new one at its first call."""
        found = self.sites.get(step.key)
        if found is None:
            dtype = str(low.dtype).removeprefix("torch.")
            found = self.sites[step.key] = Site(*step.key, order=self.clock, dtype=dtype)
        return found

    def event(self, what: str, step: Step) -> Event:
        """Return the event of a kind at an operation, a new one at its first time."""
        found = self.events.get((what, step.key))
        if found is None:
            dtype = next((str(t.dtype).removeprefix("torch.") for t in (*step.writes, *step.reads)), "")
            found = Event(
                what,
                *step.key,
                clock=self.clock,
                call=self.call,
                dtype=dtype,
                source=source_line(),
                scalars=step.scalars,
            )
            self.events[what, step.key] = found
        return found

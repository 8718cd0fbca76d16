"""The shadow run: the real low-precision program, with each operation replayed on the shadows and compared."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from overflow_lab.capture.shadow import judge, operations
from overflow_lab.capture.shadow.program import ProgramLog
from overflow_lab.capture.shadow.shadows import Memory, Shadows, has_shadow, wide
from overflow_lab.capture.shadow.sites import Event, Ordinals, Site, SiteKey, source_line
from overflow_lab.capture.shadow.step import Step, decided_in, in_float32, random_state, unlike
from overflow_lab.errors import one_line

# Elements of decisions that are kept to tell which operation changed them.
_MOST_DECISIONS = 1 << 22


class ShadowMode(TorchDispatchMode):
    """Runs a program under a dispatch mode, with shadows beside its tensors; `path` gives the running module.

    With `sync_until` the shadows follow the program up to that operation (they are its own values) and go on in float32
    from there: what reaches the output is then the error that the operations up to there caused. Nothing of the
    program's is changed, but where an operation has no kernel for its dtypes: that one is done in float32, and an event
    says so.

    `unreplayed` names the operations after which shadows begin anew with the program's values, and why; `random` those
    that drew random numbers, which are the shadow's too.
    """

    supports_higher_order_operators = True

    def __init__(self, *, baseline: ProgramLog | None = None, sync_until: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shadows = Shadows()
        self.baseline = baseline
        self.path: Callable[[], str] = str
        self.ordinals = Ordinals()
        self.sync_until = -1 if sync_until is None else sync_until
        self.records = sync_until is None
        self.clock = 0
        self.call = -1
        self.sites: dict[SiteKey, Site] = {}
        self.events: dict[tuple[str, SiteKey], Event] = {}
        self.scalars: dict[SiteKey, tuple[float, ...]] = {}
        self.unreplayed: set[str] = set()
        self.random: set[str] = set()
        self.drawn: dict[SiteKey, torch.Tensor] = {}
        self.decisions: list[torch.Tensor] = []
        self._keys: list[SiteKey] = []
        self.recent: deque[tuple[int, SiteKey]] = deque(maxlen=64)
        self._numbers: dict[int, Event] = {}

    # ---- one operation ----

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = operations.facts_of(op)
        if facts.views:
            return op(*args, **kwargs)
        self.clock += 1
        written = operations.written(facts, args, kwargs)
        step = self._prepare(op, args, kwargs, [t for t in written if has_shadow(t)])
        if len(step.writes) < len(written):
            return self._written_otherwise(step, written)
        if self.clock <= self.sync_until:
            result = self._execute(step)
            self._sync(step, result)
            self._decided(step, result)
            return result
        reason = unlike(step)
        if reason:
            return self._alone(step, reason)
        try:
            high = operations.as_shadow((args, kwargs), self.shadows.of)
        except Exception as error:
            return self._alone(step, one_line(error, limit=120))
        state = random_state(step) if facts.draws else None
        result = self._execute(step)
        floats = bool(step.writes) or any(has_shadow(t) for t in operations.tensors_in(result))
        if not floats and not (facts.decides and step.reads):
            return result
        if facts.unset:
            self._sync(step, result)
        elif state is not None and not torch.equal(state, random_state(step)):
            self._drew(step, result, high)
        else:
            self._follow(step, result, high)
        return result

    def _written_otherwise(self, step: Step, written: list[torch.Tensor]) -> Any:
        """Run an operation that writes what has no shadow: to replay it would write that twice."""
        if step.writes:
            self.unreplayed.add(f"{step.name}: it writes values and others at once")
        result = self._execute(step)
        self._sync(step, result)
        for tensor in written:
            if tensor.layout is torch.strided and not (has_shadow(tensor) or tensor.is_meta):
                self.shadows.refresh(tensor)  # it may be the bits of a floating tensor
        return result

    def _alone(self, step: Step, reason: str) -> Any:
        """Run an operation that cannot be replayed."""
        result = self._execute(step)
        if any(has_shadow(t) for t in (*step.writes, *operations.tensors_in(result))):
            self.unreplayed.add(f"{step.name}: {reason}")
            self._sync(step, result)
        return result

    def _drew(self, step: Step, result: Any, high: tuple[Any, Any]) -> None:
        """Let random values be the shadow's too; a dropout's mask is applied to the shadow."""
        self.random.add(step.name)
        self.drawn.setdefault(step.key, operations.glimpse(result))
        self._sync(step, result)
        if step.name == "aten.native_dropout" and step.reads:
            self.shadows.give(result[0], operations.dropped(*high, result[1], high[0][0]))
            if self.records:
                self.look(step, result[0])
        elif step.reads and not step.facts.fills:
            self.unreplayed.add(f"{step.name}: it draws random numbers on the way")

    def _prepare(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], writes: list[torch.Tensor]) -> Step:
        facts = operations.facts_of(op)
        key = (self.path(), facts.name, self.ordinals.next(facts.name))
        self.recent.append((self.clock, key))
        self._keys.append(key)
        reads = [t for t in operations.tensors_in((args, kwargs)) if has_shadow(t)]
        if facts.overwrites:
            reads = [t for t in reads if all(t is not w for w in writes)]
        bad, flush, error = set[int](), set[SiteKey](), 0.0
        for tensor in reads:
            memory = self.shadows.known(tensor)
            if memory is None:
                continue
            error = max(error, memory.error)
            if memory.marks.get("bad") and judge.any_new(tensor, self.shadows.of(tensor)):
                bad |= memory.marks["bad"]
            flush |= memory.marks.get("flush", set())  # type: ignore[arg-type]
        scalars = operations.scalars_in(args, kwargs)
        self.scalars.setdefault(key, scalars)
        before = [(t.clone(), self.shadows.of(t).clone()) for t in writes if any(t is r for r in reads)]
        return Step(op, facts, args, kwargs, reads, writes, key, bad, flush, error, scalars, before)

    def _execute(self, step: Step) -> Any:
        """Run the program's operation; where it has no kernel for these dtypes, in float32, and write that down."""
        try:
            return step.op(*step.args, **step.kwargs)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) or not _is_low(step):
                raise
            try:
                result = in_float32(step)
            except Exception:
                raise error from None  # it fails in float32 too: the model's own doing
            event = self._event("unsupported", step)
            event.detail, event.reaches_output = one_line(error), True
            return result

    # ---- the shadow's side ----

    def _sync(self, step: Step, result: Any) -> None:
        for tensor in (*step.writes, *operations.tensors_in(result)):
            if has_shadow(tensor):
                memory = self.shadows.sync(tensor)
                memory.marks.clear()

    def _follow(self, step: Step, result: Any, high: tuple[Any, Any]) -> None:
        """Replay on the shadows, compare, and write down what is to be seen."""
        try:
            self._replayed(step, result, high)
        except Exception as error:
            self.unreplayed.add(f"{step.name}: {one_line(error, limit=120)}")
            self._sync(step, result)

    def _replayed(self, step: Step, result: Any, high: tuple[Any, Any]) -> None:
        made, own_made = operations.replay(step.op, step.name, high[0], high[1], result)
        made = self._unclamped(step, made)
        known = {t.untyped_storage()._cdata for t in operations.tensors_in(high)}
        own = {t.untyped_storage()._cdata for t in (*step.reads, *step.writes)}
        for tensor in step.writes if self.records else ():
            self.look(step, tensor)
        for _, low, value in operations.pairs(result, made):
            if low.untyped_storage()._cdata in own:
                continue
            fresh = value.to(wide(low.dtype))
            if fresh.untyped_storage()._cdata in known:
                fresh = fresh.clone()
            if fresh.shape != low.shape:
                self.unreplayed.add(
                    f"{step.name}: the shadow has the shape {tuple(fresh.shape)}, its tensor {tuple(low.shape)}"
                )
                self.shadows.sync(low).marks.clear()
                continue
            self.shadows.give(low, fresh)
            if self.records:
                self.look(step, low)
        self._decisions(step, result, own_made)

    def _unclamped(self, step: Step, made: Any) -> Any:
        """Undo, in the shadow, a clamp that float32's program does not have: it is there for half precision alone."""
        if step.name not in operations.CLAMPS or self.baseline is None or step.key in self.baseline.scalars:
            return made
        return self.shadows.of(step.reads[0]).clone() if step.reads and not step.writes else made

    def look(self, step: Step, low: torch.Tensor, *, detail: str = "") -> None:
        """Compare a result with its shadow, and write down what is to be seen; `detail` names a cast tensor."""
        memory, shadow = self.shadows.memory(low), self.shadows.of(low)
        if low.is_complex():  # infinities and signs are those of the two parts
            low, shadow = torch.view_as_real(low.resolve_conj()), torch.view_as_real(shadow.resolve_conj())
        elif low.itemsize == 1:
            low = low.to(shadow.dtype)  # few operations know 8 bits
        found = judge.compare(low, shadow)
        memory.error, memory.made = found.error, step.key
        site = self._site(step, low)
        site.calls += 1
        site.elements += low.numel()
        site.nonfinite += found.nonfinite
        site.absmax = max(site.absmax, found.absmax)
        site.flushed += found.flushed
        if found.error >= site.error:
            site.error, site.error_in = found.error, step.error
        self._marks(step, memory, low, shadow, found)
        if detail and (event := self.events.get(("bad", step.key))):
            event.detail, event.source, event.dtype = detail, "", site.dtype
        site.detail = detail

    def _marks(
        self, step: Step, memory: Memory, low: torch.Tensor, shadow: torch.Tensor, found: judge.Comparison
    ) -> None:
        if not step.writes:
            memory.marks.clear()
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
        elif step.flush and judge.any_zeroed(low, shadow):
            memory.marks.setdefault("flush", set()).update(step.flush)  # type: ignore[arg-type]

    def _origin(self, step: Step, low: torch.Tensor, shadow: torch.Tensor, new: torch.Tensor) -> int:
        """Write down that bad values were made out of good ones; return the event's number."""
        event = self._event("bad", step)
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
            event = self._event("fresh", step)
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

    def _decisions(self, step: Step, result: Any, made: Any) -> None:
        """Compare what is decided from floating values, as integers or as truth, with what the shadow decides."""
        mine = decided_in(step, result)
        if not mine:
            return
        theirs = self._decided(step, made)
        if not self.records or all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)):
            return
        for number in step.bad:
            self._numbers[number].harmed = self._numbers[number].harmed or step.key
        event = self._event("decision", step)
        event.changed += sum(int((a != b).sum()) for a, b in zip(mine, theirs, strict=True))
        event.elements += sum(t.numel() for t in mine)

    def _decided(self, step: Step, result: Any) -> list[torch.Tensor]:
        """Keep the decisions in a result, within bounds, and return them."""
        found = decided_in(step, result)
        if sum(t.numel() for t in self.decisions) < _MOST_DECISIONS:
            self.decisions += found
        return found

    # ---- bookkeeping ----

    def _site(self, step: Step, low: torch.Tensor) -> Site:
        found = self.sites.get(step.key)
        if found is None:
            dtype = str(low.dtype).removeprefix("torch.")
            found = self.sites[step.key] = Site(*step.key, order=self.clock, dtype=dtype)
        return found

    def _event(self, what: str, step: Step) -> Event:
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

    def decide(self, scores: torch.Tensor) -> None:
        """Take the best of each row of an output as a decision, as whoever reads it will."""
        self.decisions.append(self.shadows.of(scores).argmax(-1))

    def enter(self, stack: list[str]) -> None:
        """A module begins; each call of the model itself, which in `generate` is a step, is counted."""
        self.ordinals.enter()
        if len(stack) == 1:
            self.call += 1

    def at(self, clock: int) -> SiteKey:
        """Return the site of the operation at a clock."""
        return self._keys[clock - 1]

    def refused(self, function: str, error: Exception, since: int) -> None:
        """Write down a function that refused its dtypes before it dispatched anything, and was repeated in float32.

        It is named by the one operation that the repetition dispatched; where there were several, by its own name.
        """
        done = [key for clock, key in self.recent if clock > since and key[1] != "aten._to_copy"]
        name = done[0][1] if len(done) == 1 else function if function == "numpy" else f"aten.{function.strip('_')}"
        key = (self.path(), name, 0)
        event = Event(
            "unsupported", *key, clock=self.clock, call=self.call, source=source_line(), detail=one_line(error)
        )
        event.reaches_output = True
        self.events.setdefault(("unsupported", key), event)

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


def _is_low(step: Step) -> bool:
    """Return whether an operation has to do with half precision: in what it reads, or in the dtype it is asked for."""
    asked = any(
        item in judge.HALVES for item in operations.leaves((step.args, step.kwargs)) if isinstance(item, torch.dtype)
    )
    return asked or any(t.dtype in judge.HALVES for t in step.reads)

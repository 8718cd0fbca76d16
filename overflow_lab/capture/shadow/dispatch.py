"""The shadow run: the real low-precision program, with each operation replayed on the shadows and compared."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from overflow_lab.capture.emulated import is_product, product
from overflow_lab.capture.shadow import judge, local, operations
from overflow_lab.capture.shadow.decisions import Decisions, decided_in
from overflow_lab.capture.shadow.notes import Notes
from overflow_lab.capture.shadow.program import ProgramLog
from overflow_lab.capture.shadow.shadows import Shadows, has_shadow
from overflow_lab.capture.shadow.sites import Event, Ordinals, SiteKey, source_line
from overflow_lab.capture.shadow.step import Step, in_float32, is_low, random_state, unlike
from overflow_lab.errors import one_line


class ShadowMode(TorchDispatchMode):
    """Runs a program under a dispatch mode, with shadows beside its tensors.

    `path` gives the running module, `exact` the context in which shadows are computed.

    With `sync_until` the shadows follow the program up to that operation (they are its own values) and go on in float32
    from there: what reaches the output is then the error that the operations up to there caused. Nothing of the
    program's is changed, but where an operation has no kernel for its dtypes: that one is done in float32, and an event
    says so; and where `emulated` is set, products are done as `capture.emulated` says.

    `least` is the narrowest dtype of a shadow: float32, and float64 where the program itself is in float32.
    `unreplayed` names the operations after which shadows begin anew with the program's values, and why; `random` those
    that drew random numbers, which are the shadow's too.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        *,
        baseline: ProgramLog | None = None,
        sync_until: int | None = None,
        least: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shadows = Shadows(least)
        self.notes = Notes(self.shadows)
        self.baseline = baseline
        self.path: Callable[[], str] = str
        self.emulated = False
        self.exact: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.ordinals = Ordinals()
        self.sync_until = -1 if sync_until is None else sync_until
        self.records = sync_until is None
        self.scalars: dict[SiteKey, tuple[float, ...]] = {}
        self.unreplayed: set[str] = set()
        self.random: set[str] = set()
        self.drawn: dict[SiteKey, torch.Tensor] = {}
        self.decisions = Decisions()
        self._keys: list[SiteKey] = []
        self.recent: deque[tuple[int, SiteKey]] = deque(maxlen=64)

    @property
    def clock(self) -> int:
        """How many operations the program has begun."""
        return self.notes.clock

    # ---- one operation ----

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = operations.facts_of(op)
        if facts.views:
            return op(*args, **kwargs)
        self.notes.clock += 1
        written = operations.written(facts, args, kwargs)
        step = self._prepare(op, args, kwargs, [t for t in written if has_shadow(t)])
        if len(step.writes) < len(written):
            return self._written_otherwise(step, written)
        if self.clock <= self.sync_until:
            result = self._execute(step)
            self._sync(step, result)
            self.decisions.keep(decided_in(step, result))
            return result
        reason = unlike(step)
        if reason:
            return self._alone(step, reason)
        inherits = self._inherits(step)
        try:
            high = operations.as_shadow((args, kwargs), self.shadows)
            own = local.own_operands(step, self.shadows) if inherits else None
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
            with self.exact():
                step.local = local.local_error(step, result, own) if inherits else None
                self._follow(step, result, high)
        return result

    def _inherits(self, step: Step) -> bool:
        """Return whether an operation's own error is to be told from that of its operands."""
        site = self.notes.sites.get(step.key)
        early = site is None or site.calls < local.MEASURED_CALLS
        return self.records and early and step.error > 0

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
                self.notes.look(step, result[0])
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
            if self.emulated and is_product(step.op, step.args):
                return product(step.op, step.args, step.kwargs)
            return step.op(*step.args, **step.kwargs)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) or not is_low(step):
                raise
            try:
                result = in_float32(step)
            except Exception:
                raise error from None  # it fails in float32 too: the model's own doing
            event = self.notes.event("unsupported", step)
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
            self.notes.look(step, tensor)
        for _, low, value in operations.pairs(result, made):
            if low.untyped_storage()._cdata in own:
                continue
            fresh = value.to(self.shadows.wide(low.dtype))
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
                self.notes.look(step, low)
        theirs = self.decisions.keep(decided_in(step, own_made))
        if self.records:
            self.notes.decided(step, decided_in(step, result), theirs)

    def _unclamped(self, step: Step, made: Any) -> Any:
        """Undo, in the shadow, a clamp that float32's program does not have: it is there for half precision alone."""
        if step.name not in operations.CLAMPS or self.baseline is None or step.key in self.baseline.scalars:
            return made
        return self.shadows.of(step.reads[0]).clone() if step.reads and not step.writes else made

    # ---- bookkeeping ----

    def decide(self, scores: torch.Tensor) -> None:
        """Take the best of each row of an output as a decision, as whoever reads it will."""
        self.decisions.keep([self.shadows.of(scores).argmax(-1)])

    def enter(self, stack: list[str]) -> None:
        """A module begins; each call of the model itself, which in `generate` is a step, is counted."""
        self.ordinals.enter()
        if stack == [""]:  # not an encoder, which `generate` calls before the first step
            self.notes.call += 1

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
        event = Event("unsupported", *key, self.clock, self.notes.call, source=source_line(), detail=one_line(error))
        event.reaches_output = True
        self.notes.events.setdefault(("unsupported", key), event)

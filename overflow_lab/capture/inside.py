"""Which calls are looked at from inside, by a shadow run, and that no failure of it ends a scan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from overflow_lab.capture.precisions import Prepared
from overflow_lab.capture.runs import Reference, Watched
from overflow_lab.capture.shadow.call import Call
from overflow_lab.capture.shadow.observe import Observer
from overflow_lab.capture.shadow.observe import ShadowRow as Seen
from overflow_lab.errors import one_line
from overflow_lab.recording import EventRow, LookRow
from overflow_lab.subjects import Generation

# A shadow run costs several plain ones. So of each precision the first batch is looked at, and the first whose output
# is off; and an answer of `generate` that is not float32's, where no forward has explained it.
_FIRST, _OFF, _ANSWER = "first", "off", "answer"

ShadowRow = Seen | LookRow


@dataclass
class Inside:
    """Looks inside the calls of all precisions; `blind(reason, precision)` is told of what could not be seen.

    Where a scan is `shared` among processes, none of them knows what others have explained; merging them does.
    """

    blind: Callable[[str, str], None]
    shared: bool = False
    _looked: dict[str, set[str]] = field(default_factory=dict)
    _explained: set[str] = field(default_factory=set)

    def forward(self, low: Watched, base: Prepared, reference: Reference, *, off: bool) -> Sequence[ShadowRow]:
        """Return the rows of a plain forward, none where this batch is not looked at."""
        looked = self._looked.setdefault(low.precision, set())
        if _OFF in looked or (_FIRST in looked and not off):
            return ()
        looked |= {_FIRST, _OFF} if off else {_FIRST}
        return self._look(low, base, Call(reference.inputs, reference.batch.positional), reference.number, off=off)

    def answer(
        self, low: Watched, base: Prepared, reference: Reference, strategy: str, generation: Generation
    ) -> Sequence[ShadowRow]:
        """Return the rows of an answer that is not float32's, none where the fault is explained already."""
        looked = self._looked.setdefault(low.precision, set())
        if _ANSWER in looked or (low.precision in self._explained and not self.shared):
            return ()
        looked.add(_ANSWER)
        call = Call(dict(reference.batch.inputs), settings=generation.strategies[strategy], run=strategy)
        return self._look(low, base, call, reference.number, off=True)

    def memory(self) -> dict[str, Any]:
        """Return what `recall` has to be given for another of these to go on from here."""
        looked = {name: sorted(kinds) for name, kinds in self._looked.items()}
        return {"looked": looked, "explained": sorted(self._explained)}

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Go on where another has stopped."""
        self._looked = {name: set(kinds) for name, kinds in memory.get("looked", {}).items()}
        self._explained = set(memory.get("explained", ()))

    def _look(self, low: Watched, base: Prepared, call: Call, batch: int, *, off: bool) -> Sequence[ShadowRow]:
        look = LookRow(low.precision, call.run, batch, off)
        try:
            rows = Observer(base, low.prepared).observe(call, batch, off=off)
        except MemoryError:
            raise
        except Exception as error:  # the plain run has said how the model itself fares
            self.blind(f"the shadow run of {call.run} ended early: {one_line(error)}", low.precision)
            return (look,)
        if any(isinstance(row, EventRow) and row.explains for row in rows):
            self._explained.add(low.precision)
        return (look, *(dataclasses.replace(row, look=look.name) for row in rows))

"""The operations that the shadow run saw, as plain rows: the worst sites, what was absorbed, whose rounding counts."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from overflow_lab.recording import AttributionRow, EventRow, Recording
from overflow_lab.report import packed, text
from overflow_lab.report.site_keys import operation_key
from overflow_lab.report.tables import Cell, Column, headroom_cell, held, nonfinite_cell, tones

OPERATION_CAP = 60
# Beyond so many the budget of bytes is spent in any case.
_MOST_PACKED = 40_000
NOTE_CAP = 12
# Above this a site's error is no longer rounding of any format that is scanned.
_WRONG = 0.1

COLUMNS = (
    Column("", "absmax", "largest magnitude that float32 would have there: the shadow"),
    Column("", "headroom", "doublings left before the operation's own dtype overflows, in bits"),
    Column("", "error", "largest relative error of a result against its shadow"),
    Column("", "error in", "relative error of the operands then: what was wrong before"),
    Column("", "own", "local error: against the same operation in float32 on the program's own operands"),
    Column("", "→ 0", "share of values that became zero below the smallest normal"),
    Column("", "NaN, inf", "number of non-finite values; in red where float32 has none"),
)


@dataclass(frozen=True)
class OperationLine:
    """One operation of one module in one precision."""

    key: str
    precision: str
    module: str
    op: str
    dtype: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class OperationTable:
    """The operations shown, by precision and in order of execution, of `total`; a cap keeps the worst.

    `notes` say whose rounding makes the output's error, and which bad values a later operation made harmless. Where it
    is capped, `rest` holds the others packed for the page's script, the worst first, and `held` their number.
    """

    lines: tuple[OperationLine, ...] = ()
    total: int = 0
    rest: str = ""
    held: int = 0
    notes: tuple[str, ...] = ()
    columns: tuple[Column, ...] = COLUMNS

    @property
    def caption(self) -> str:
        """How much of the whole is shown."""
        if len(self.lines) == self.total:
            return f"All {text.plural(self.total, 'operation')}, by precision and in order of execution"
        shown = f"Showing {len(self.lines):,} of {self.total:,} operations"
        worst = "those with NaN or inf, least headroom, most error of their own or most flushed to zero"
        return f"{shown}, {worst}{held(len(self.lines), self.held, self.total)}"


def operation_table(operations: pd.DataFrame, recording: Recording, *, cap: int = OPERATION_CAP) -> OperationTable:
    """Return the table of operations, at most `cap` of them, from the frame of `analysis.frame.operations`."""
    places = trouble(operations).sort_values(kind="stable").index
    lines = tuple(_line(row) for row in operations.loc[places[:cap]].sort_index().to_dict("records"))
    others = [_packed(_line(row)) for row in operations.loc[places[cap : cap + _MOST_PACKED]].to_dict("records")]
    rest, count = packed.packed(others)
    return OperationTable(lines, len(operations), rest, count, tuple(_notes(recording)))


def _packed(line: OperationLine) -> list[Any]:
    """Return an operation as the page's script takes it: key, name, port, whether a leaf, bar, texts, tones."""
    texts = [line.precision, line.op, line.dtype, *(cell.text for cell in line.cells)]
    return [line.key, line.module, "", 0, None, texts, tones(line.cells)]


def trouble(operations: pd.DataFrame) -> pd.Series[float]:
    """Return each operation's best place among three lists of the worst: headroom, error made there, flushed.

    Sites with NaN or inf that float32 has not head the first list; who made no error or flushed nothing is last on
    the others. A cap that takes the lowest places shows the top of each list.
    """
    grown = operations["error"] - operations["error_in"]
    made = operations["local_error"].fillna(grown).fillna(0.0)
    bad = pd.DataFrame({"finite": ~operations["tainted"].astype(bool), "headroom": operations["headroom"]})
    by_room = pd.Series(range(len(bad)), index=bad.sort_values(["finite", "headroom"], kind="stable").index)
    places = [by_room.reindex(operations.index).astype(float)]
    for values in (made, operations["flushed"].astype(float)):
        places.append((values.rank(method="first", ascending=False) - 1).where(values > 0, len(operations)))
    return pd.concat(places, axis=1).min(axis=1)


def _line(row: Mapping[Hashable, Any]) -> OperationLine:
    ordinal = f" #{row['ordinal'] + 1}" if row["ordinal"] > 0 else ""
    tensor = str(row["detail"]).removeprefix(f"{row['module']}.")
    detail = f" {text.visible(tensor, 120)}" if tensor else ordinal
    return OperationLine(
        key=operation_key(str(row["precision"]), str(row["module"]), str(row["op"]), int(row["ordinal"])),
        precision=text.visible(row["precision"], 60),
        module=text.module_name(str(row["module"])),
        op=text.visible(row["op"], 80) + detail,
        dtype=text.visible(row["dtype"], 20),
        cells=(
            Cell(text.number(row["absmax"])),
            headroom_cell(row["headroom"]),
            _error_cell(row),
            Cell(_error(row["error_in"])),
            Cell(_error(row["local_error"])),
            Cell(text.share(row["flushed"])),
            nonfinite_cell(row["nonfinite"]) if row["tainted"] else Cell(text.count(row["nonfinite"])),
        ),
    )


def _error_cell(row: Mapping[Hashable, Any]) -> Cell:
    """Return the error of a site's results: a dash where nothing finite was left to compare."""
    if row["nonfinite"] >= row["elements"]:
        return Cell(text.MISSING)
    return Cell(_error(row["error"]), "near" if row["error"] > _WRONG and row["error_in"] <= _WRONG else "")


def _error(value: float) -> str:
    """Return a relative error in percent, which a sum that cancels may take far beyond 100."""
    return text.share(value) if value < 10 or not math.isfinite(value) else ">1000%"


def _notes(recording: Recording) -> list[str]:
    """Return what the shadow run told beyond the findings, the first of each kind."""
    said = [_attributed(row) for row in recording.of(AttributionRow)]
    absorbed = [
        e for e in recording.of(EventRow) if e.event == "bad" and e.absorbed and not (e.harmed or e.reaches_output)
    ]
    said += [_absorbed(event) for event in absorbed]
    more = [f"and {len(said) - NOTE_CAP:,} more"] if len(said) > NOTE_CAP else []
    return said[:NOTE_CAP] + more


def _attributed(row: AttributionRow) -> str:
    what = {
        "decisions": f"the {row.total:,.0f} decisions that change inside the model",
        "centered": "the loss of what sets outputs apart",
    }
    error = what.get(row.metric, f"the output's error of {text.share(row.total)}")
    place = f"`{text.module_name(row.module)}` {text.visible(row.op, 80)}"
    tensor = f" of `{text.visible(row.detail, 120)}`" if row.detail else ""
    return f"{text.visible(row.precision, 60)}: {place}{tensor} makes {text.share(min(row.share, 1.0))} of {error}."


def _absorbed(event: EventRow) -> str:
    module, op = (event.absorbed or ("", ""))[:2]
    made = " and ".join(name for n, name in ((event.inf, "inf"), (event.nan, "NaN")) if n)
    place = f"`{text.module_name(event.module)}` {text.visible(event.op, 80)}"
    by = f"`{text.module_name(module)}` {text.visible(op, 80)}"
    return f"{text.visible(event.precision, 60)}: {place} makes {made}, which {by} makes harmless: no fault."

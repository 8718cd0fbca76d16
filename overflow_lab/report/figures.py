"""The report's pictures with what is written around them: captions, titles of columns, the same in numbers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from markupsafe import Markup

from overflow_lab.analysis.index import bits
from overflow_lab.analysis.results import Diagnosis
from overflow_lab.recording import NoiseRow, ProofRow, Recording
from overflow_lab.report import plots, svg, tables, text
from overflow_lab.report.proofs import headroom
from overflow_lab.report.site_keys import layer_key, operation_key

# Columns of all the staircases together.
_STAIRS = 450
_FALLS = 5
_STEPS = 60
# Modules that are drawn before and after.
_MODULES = 8


@dataclass(frozen=True)
class Numbers:
    """The same in numbers, for those who do not see a picture: heads and rows of text, the first column names."""

    summary: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Figure:
    """A picture with what is written around it; `kind` says of what its columns are: "layer", "operation" or ""."""

    id: str
    title: str
    svg: Markup
    caption: str
    kind: str = ""
    legend: tuple[tuple[str, str], ...] = ()
    numbers: Numbers | None = None


@dataclass(frozen=True)
class Frames:
    """The tables that the pictures are drawn from."""

    layers: pd.DataFrame
    operations: pd.DataFrame
    steps: pd.DataFrame


def before_after(rows: Sequence[ProofRow], number: int) -> Figure | None:
    """Return the picture of the headroom before and after the proven remedies of a precision; None without any."""
    proven = [row for row in rows if row.proven and (row.tightest or headroom(row))]
    if not proven:
        return None
    modules = plots.tightest(proven, most=_MODULES)
    title = f"Headroom of {text.visible(proven[0].precision, 60)}, before and after"
    caption = (
        "How many doublings are left before a value does not fit. Lines above: the least of all modules' outputs, for "
        "each remedy. Below: the modules that had the least, under the first of them; +2 counts others with the same "
        "numbers. An arrow is a format that ends far beyond."
    )
    picture = svg.inline(
        plots.before_after(proven, most=_MODULES),
        f"pm{number}",
        title=title,
        label="A line for each remedy and module, from the headroom before to that after; the table has the numbers.",
    )
    cells = tuple((name, text.bits(before), text.bits(after)) for name, before, after in modules)
    numbers = Numbers("In numbers", ("module", "bits before", "bits after"), cells) if cells else None
    legend = (("bad", "before"), ("line1", "after"))
    return Figure(f"gain-{number}", title, Markup(picture), caption, "", legend, numbers)


def figures(recording: Recording, diagnosis: Diagnosis, frames: Frames) -> list[Figure]:
    """Return the pictures that there is something to show in: ranges, error, generation."""
    noise = {row.precision: row.relative_error for row in recording.of(NoiseRow)}
    origins = {name: (v.origin.module, v.origin.op or "") for name, v in diagnosis.verdicts.items() if v.origin}
    made = []
    if not frames.layers.empty:
        rows = plots.sample_layers(frames.layers)
        made.append(_ladder(rows, {name: module for name, (module, _) in origins.items()}))
        compared = any(rows[f"bits_{name}"].notna().any() for name in plots.low_precisions(rows))
        if compared and frames.operations.empty:
            made.append(_growth(rows, noise))
    if (frames.operations["ordinal"] >= 0).any():
        made.append(_staircase(frames.operations, noise, origins))
    if (frames.steps["precision"] != "float32").any():
        made.append(_timeline(frames.steps))
    return made


def _ladder(rows: pd.DataFrame, origins: Mapping[str, str]) -> Figure:
    caption = (
        "Each column is one layer's output in float32, in order of execution, from its smallest to its largest "
        "magnitude. What lies above the red line does not fit in float16. Crosses at the top mark layers that had NaN "
        "or inf when they were run in that precision."
    )
    stream = "stream" in rows and bool((rows["stream"] != "").any())
    legend = [("density", "leaf modules, the branches: darker where more of the values are")]
    if stream:
        legend.append(("stream", "residual stream: what blocks hand on, with a line along its largest values"))
    legend.append(("bad", "beyond float16"))
    picture = svg.inline(
        plots.range_ladder(rows, origins=origins),
        "pr",
        title="Range ladder",
        label=_ladder_label(rows),
        panels=[svg.Panel(*_layer_columns(rows, _ladder_title))],
    )
    said = caption + _sampled(int(rows["stands_for"].max()), len(rows), int(rows["stands_for"].sum()), "layers")
    return Figure("ranges", "Range ladder", Markup(picture), said, "layer", tuple(legend))


def _growth(rows: pd.DataFrame, noise: Mapping[str, float]) -> Figure:
    caption = (
        "Bits in which each layer's output agrees with float32: minus log2 of the relative error. Dotted lines are the "
        "bits that the format has, dashed ones the noise floor: what rounding the weights alone does to the output. A "
        "sudden step down is where the damage happens, a slope is rounding that adds up."
    )
    names = plots.low_precisions(rows)
    label = f"Bits that agree with float32 through the depth, for {', '.join(names)}; the table of layers has them."
    picture = svg.inline(
        plots.error_growth(rows, noise=noise),
        "pe",
        title="Error growth",
        label=label,
        panels=[svg.Panel(*_layer_columns(rows, lambda row: _growth_title(row, names)))],
    )
    said = caption + _sampled(int(rows["stands_for"].max()), len(rows), int(rows["stands_for"].sum()), "layers")
    return Figure("growth", "Error growth through the depth", Markup(picture), said, "layer")


def _staircase(operations: pd.DataFrame, noise: Mapping[str, float], origins: Mapping[str, tuple[str, str]]) -> Figure:
    caption = (
        "Bits in which each operation's result agrees with what float32 would have there, in order of execution. The "
        "line is what is left; a thick fall is what one operation adds to what it inherits; a dot is the error that it "
        "makes by itself, on exact operands. Dotted: the bits that the format has. Dashed: the noise floor, what "
        "rounding the weights alone does to the output. A step down to 0 is damage; a gentle slope is rounding."
    )
    panels = len(operations["precision"].unique())
    limit = max(100, _STAIRS // max(panels, 1))
    rows = plots.sample_operations(operations, limit=limit)
    columns = [
        svg.Panel([_step_title(r) for r in group.to_dict("records")], _operation_keys(group), number)
        for number, group in enumerate(rows.values())
    ]
    picture = svg.inline(
        plots.error_staircase(operations, noise=noise, origins=origins, limit=limit),
        "pe",
        title="Error staircase",
        label=f"Bits that agree with float32 after each operation, in {', '.join(rows)}; the table has the falls.",
        panels=columns,
    )
    shown, most = sum(map(len, rows.values())), max(int(group["stands_for"].max()) for group in rows.values())
    total = sum(int(group["stands_for"].sum()) for group in rows.values())
    legend = (("own", "the operation's own error"), ("bad", "NaN or inf that float32 does not have"))
    said = caption + _sampled(most, shown, total, "operations")
    return Figure("growth", "Error staircase", Markup(picture), said, "operation", legend, _falls(rows))


def _falls(rows: Mapping[str, pd.DataFrame]) -> Numbers:
    """Return the operations of each precision after which most bits are gone that were there before."""
    found: list[tuple[str, ...]] = []
    for name, group in rows.items():
        left, before = (group[column].map(_capped) for column in ("error", "error_in"))
        fall = (before - left).where(group["nonfinite"] < group["elements"], before)
        for index in fall.sort_values(ascending=False, kind="stable").index[:_FALLS]:
            row = group.loc[index]
            after = text.bits(left[index]) if row["nonfinite"] < row["elements"] else "NaN, inf"
            place = text.shorten(text.module_name(str(row["module"])), 90)
            own = text.bits(bits(None if math.isnan(row["local_error"]) else row["local_error"]))
            found.append((name, place, text.visible(row["op"], 60), text.bits(before[index]), after, own))
    heads = ("precision", "module", "operation", "bits before", "bits after", "own error, bits")
    return Numbers(f"In numbers: the {_FALLS} largest falls of each precision", heads, tuple(found))


def _capped(error: float) -> float:
    """Return the bits that an error leaves, from 0 to 24."""
    found = bits(error)
    return 24.0 if found is None else min(max(found, 0.0), 24.0)


def _timeline(steps: pd.DataFrame) -> Figure:
    caption = (
        "One line for each input, or for each of its beams. Left: the bits in which its logits agree with float32's at "
        "the same step, as long as both were given the same tokens. The red line is the first token of any answer that "
        "is not float32's, crosses are steps with NaN or inf. Right: the largest logit."
    )
    picture = svg.inline(
        plots.generation_timeline(steps),
        "pg",
        title="Generation timeline",
        label="Agreement with float32 and largest logit, step by step; the table below has them in numbers.",
    )
    return Figure("generation", "Generation timeline", Markup(picture), caption, "", (), _step_numbers(steps))


def _step_numbers(steps: pd.DataFrame) -> Numbers:
    """Return the steps of each precision and search: fewest bits, largest logit, what is lost, where answers part."""
    found: list[tuple[str, ...]] = []
    low = steps[steps["precision"] != "float32"]
    for (precision, run, step), rows in low.groupby(["precision", "run", "step"], sort=False):
        inputs = rows.drop_duplicates(["batch", "input"])
        worst = rows["bits"].min()
        found.append(
            (
                text.visible(precision, 60),
                text.visible(run, 40),
                str(step),
                text.bits(worst),
                text.number(float(rows["absmax"].max())),
                text.count(rows["nonfinite"].sum()),
                text.count((inputs["parts_at"] == step).sum()),
            )
        )
    heads = ("precision", "search", "step", "fewest bits", "largest logit", "NaN, inf", "answers that part here")
    more = f" (the first {_STEPS} of {len(found):,})" if len(found) > _STEPS else ""
    return Numbers(f"In numbers: step by step{more}", heads, tuple(found[:_STEPS]))


def _sampled(most: int, shown: int, total: int, noun: str) -> str:
    """Return how many sites a column stands for, where that is more than one."""
    if most == 1:
        return ""
    return f" Showing {shown:,} of {total:,} {noun}: a column is the worst of up to {most} neighbours."


def _layer_columns(rows: pd.DataFrame, title: Any) -> tuple[list[str], list[str]]:
    records = rows.to_dict("records")
    return [title(row) for row in records], [layer_key(str(r["module"]), str(r["port"])) for r in records]


def _operation_keys(rows: pd.DataFrame) -> list[str]:
    columns = (rows[name] for name in ("precision", "module", "op", "ordinal"))
    return [operation_key(str(p), str(m), str(op), int(n)) for p, m, op, n in zip(*columns, strict=True)]


def _ladder_label(rows: pd.DataFrame) -> str:
    """Return the picture in one sentence, for those who do not see it."""
    worst = tables.badness(rows).iloc[0]
    name = text.module_name(str(worst["module"]), 120)
    return (
        f"Range of {len(rows):,} layers on a log2 scale. Worst: {name}, absmax {text.number(worst['absmax'])}, "
        f"headroom {text.bits(worst['headroom_float16'])} bits in float16. The table of layers has the numbers."
    )


def _ladder_title(row: Mapping[Hashable, Any]) -> str:
    name, headroom = text.module_name(str(row["module"]), 160), text.bits(row["headroom_float16"])
    return f"{name}\nabsmax {text.number(row['absmax'])}, headroom {headroom} bits in float16"


def _growth_title(row: Mapping[Hashable, Any], names: Sequence[str]) -> str:
    said = [f"{name} {text.bits(row[f'bits_{name}'])} bits" for name in names]
    return "\n".join([text.module_name(str(row["module"]), 160), ", ".join(said)])


def _step_title(row: Mapping[Hashable, Any]) -> str:
    place = f"{text.module_name(str(row['module']), 160)}\n{text.visible(row['op'], 60)}"
    if row["nonfinite"] >= row["elements"]:
        return f"{place}: nothing finite"
    own = "" if math.isnan(row["local_error"]) else f", own error {_left(row['local_error'])}"
    return f"{place}: {_left(row['error'])} left of {_left(row['error_in'])}{own}"


def _left(error: float) -> str:
    found = bits(error)
    return "exact" if found is None or found >= 24 else f"{text.bits(max(found, 0.0))} bits"

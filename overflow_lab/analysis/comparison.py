"""What a comparison of two recordings finds, as frozen values, and the one rule for better and worse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from overflow_lab import __version__
from overflow_lab.analysis.results import SEVERITIES, Verdict
from overflow_lab.recording.codec import plain

if TYPE_CHECKING:
    import pandas as pd

# 1: the first schema.
SCHEMA = 1
WORSE, BETTER, SAME = "worse", "better", "same"
# Half a bit is a factor of 1.4 in the largest magnitude: more than another kernel, seed or thread count makes of it.
HEADROOM_BITS = 0.5
# Headroom counts where one of the two has less than this: between 10 and 12 bits there is nothing to choose, and a
# value that doubles a few times with other inputs does not use up 4.
HEADROOM_NEAR = 4.0
# A factor of 2 in error: errors of sums move by less from kernel to kernel, and a fault makes more of them.
ERROR_BITS = 1.0
# A factor of 2 in the share of NaN and inf; from none to some, and back, counts always.
NONFINITE_BITS = 1.0


@dataclass(frozen=True)
class Seen:
    """What one recording saw at a site in one precision.

    `headroom` (bits) is that of the largest finite value in the value's own `dtype`; `nonfinite` of `count` elements
    were NaN or inf, and `made` is the share of them beyond what float32 has there; `error` is relative to float32 and
    None where nothing was compared; `rounding` is the unit roundoff of the precision's format.
    """

    dtype: str
    absmax: float | None
    headroom: float | None
    nonfinite: int
    count: int
    made: float
    error: float | None
    rounding: float


@dataclass(frozen=True)
class Change:
    """A judgement, "worse", "better" or "same", the measure that decided it ("" where none did), and its size in bits.

    `bits` is positive for worse, and infinite where NaN and inf came or went.
    """

    judged: str = SAME
    measure: str = ""
    bits: float = 0.0


@dataclass(frozen=True)
class SitePair:
    """One output of one module in both recordings, whose places are (module, port).

    A place, and what was seen, is None where that recording lacks it.
    """

    precision: str
    order: int
    class_name: str
    place_before: tuple[str, str] | None
    place_after: tuple[str, str] | None
    before: Seen | None
    after: Seen | None
    change: Change = Change()

    @property
    def module(self) -> str:
        """The path after, or before where there is no other."""
        return (self.place_after or self.place_before or ("", ""))[0]

    @property
    def port(self) -> str:
        """The port after, or before where there is no other."""
        return (self.place_after or self.place_before or ("", ""))[1]

    @property
    def module_before(self) -> str | None:
        """The path before, None where the recording before lacks the module."""
        return None if self.place_before is None else self.place_before[0]

    @property
    def renamed(self) -> bool:
        """Whether the module has another path in the two."""
        return self.place_before is not None and self.place_after is not None and self.module_before != self.module

    @property
    def judged(self) -> str:
        """ "worse", "better", "same", "only before" or "only after"."""
        if self.before is None:
            return "only after"
        return "only before" if self.after is None else self.change.judged

    def to_dict(self) -> dict[str, Any]:
        """Return the row of `Comparison.to_frame`."""
        numbers = {
            f"{name}_{side}": None if seen is None else getattr(seen, name)
            for name in ("dtype", "absmax", "headroom", "error", "nonfinite")
            for side, seen in (("before", self.before), ("after", self.after))
        }
        places = {name: getattr(self, name) for name in ("module", "module_before", "port", "class_name", "order")}
        judged = {"change": self.judged, "measure": self.change.measure, "bits": self.change.bits}
        return {"precision": self.precision, **judged, **places, **numbers}


@dataclass(frozen=True)
class VerdictPair:
    """The verdicts on a precision in both recordings; None where one of them did not come to it.

    `origin_moved` is None where one of the two has no origin; a renamed module has not moved.
    """

    precision: str
    before: Verdict | None
    after: Verdict | None
    origin_moved: bool | None = None

    @property
    def judged(self) -> str:
        """ "worse" or "better" by severity, "same", "only before" or "only after"; "none" where neither judged."""
        if self.before is None or self.after is None:
            return "none" if self.before is self.after else "only after" if self.before is None else "only before"
        more = SEVERITIES.index(self.after.severity) - SEVERITIES.index(self.before.severity)
        return WORSE if more > 0 else BETTER if more < 0 else SAME

    def to_dict(self) -> dict[str, Any]:
        """Return the pair as in JSON."""
        sides = {"before": self.before, "after": self.after}
        verdicts = {name: None if verdict is None else verdict.to_dict() for name, verdict in sides.items()}
        return {"change": self.judged, "origin_moved": self.origin_moved, **verdicts}


@dataclass(frozen=True)
class Difference:
    """A fact that differs, such as "environment.torch"; None where one of the two does not have it."""

    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Side:
    """One of the two recordings: what it is called here, the model, and how far the scan came."""

    label: str
    model: str
    status: str
    created: str
    path: str | None


@dataclass(frozen=True)
class Comparison:
    """Two recordings compared: verdicts, sites, and what else differs. See `overflow_lab.compare`.

    `verdicts` and `sites` are in the order scanned and executed; `differences` are of environment, options and
    subject, `inputs` and `weights` of what the model was given and holds; `notes` say what could not be compared.
    """

    before: Side
    after: Side
    verdicts: tuple[VerdictPair, ...]
    sites: tuple[SitePair, ...]
    differences: tuple[Difference, ...] = ()
    inputs: tuple[Difference, ...] = ()
    weights: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def worse(self) -> tuple[VerdictPair | SitePair, ...]:
        """What got worse: verdicts first, then sites, those that changed most first."""
        return self._judged(WORSE)

    @property
    def better(self) -> tuple[VerdictPair | SitePair, ...]:
        """What got better: verdicts first, then sites, those that changed most first."""
        return self._judged(BETTER)

    @property
    def changed(self) -> tuple[SitePair, ...]:
        """The sites that got worse or better, those that changed most first."""
        return tuple(sorted((s for s in self.sites if s.change.judged != SAME), key=lambda s: -abs(s.change.bits)))

    def _judged(self, judged: str) -> tuple[VerdictPair | SitePair, ...]:
        verdicts = [pair for pair in self.verdicts if pair.judged == judged]
        return (*verdicts, *(site for site in self.changed if site.judged == judged))

    def counts(self, precision: str | None = None) -> dict[str, int]:
        """Return how many sites are worse, better, same, only before and only after, in all or in one precision."""
        made = dict.fromkeys((WORSE, BETTER, SAME, "only before", "only after"), 0)
        for site in self.sites:
            made[site.judged] += precision in (None, site.precision)
        return made

    def to_frame(self) -> pd.DataFrame:
        """Return one row for each precision and site: its change, by which measure and how many bits, and the numbers.

        Columns ending in _before and _after are absmax, headroom (bits), error (relative), nonfinite (elements), dtype.
        """
        import pandas as pd

        columns = list(SitePair("", 0, "", None, None, None, None).to_dict())
        return pd.DataFrame([site.to_dict() for site in self.sites], columns=columns)

    def to_dict(self) -> dict[str, Any]:
        """Return the one object that `overflow-lab diff --json` prints; sites that are the same are only counted.

        Keys may be added, never renamed. Non-finite floats are the strings "nan", "inf" and "-inf".
        """
        made = {
            "overflow_lab": __version__,
            "schema": SCHEMA,
            "before": dict(vars(self.before)),
            "after": dict(vars(self.after)),
            "verdicts": {pair.precision: pair.to_dict() for pair in self.verdicts},
            "sites": {name.replace(" ", "_"): n for name, n in self.counts().items()},
            "changed": [site.to_dict() for site in self.changed],
            "only_before": _names(self.sites, "only before"),
            "only_after": _names(self.sites, "only after"),
            "renamed": {s.module_before: s.module for s in self.sites if s.renamed},
            "differences": [dict(vars(one)) for one in self.differences],
            "inputs": [dict(vars(one)) for one in self.inputs],
            "weights": [dict(vars(one)) for one in self.weights],
            "notes": list(self.notes),
            "thresholds": {
                "headroom_bits": HEADROOM_BITS,
                "headroom_near": HEADROOM_NEAR,
                "error_bits": ERROR_BITS,
                "nonfinite_bits": NONFINITE_BITS,
            },
        }
        return dict(plain(made))

    def __repr__(self) -> str:
        lines = [f"  {pair.precision}: {said(pair)}" for pair in self.verdicts]
        counts = ", ".join(f"{n} {name}" for name, n in self.counts().items() if n)
        return "\n".join([f"<Comparison of {self.before.label} with {self.after.label}", *lines, f"  {counts}"]) + ">"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(pair.precision)}</td><td>{escape(said(pair))}</td>"
            + "".join(f"<td>{n}</td>" for n in self.counts(pair.precision).values())
            + "</tr>"
            for pair in self.verdicts
        )
        heads = "".join(f"<th>{name}</th>" for name in ("precision", "verdict", *(f"sites {n}" for n in self.counts())))
        title = f"<b>{escape(self.before.label)} → {escape(self.after.label)}</b>"
        return f"<div>{title}<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"


def said(pair: VerdictPair) -> str:
    """Return a pair of verdicts in a few words: "overflow (error) → ok: better"."""
    words = [
        "not judged" if v is None else v.verdict if v.verdict == "ok" else f"{v.verdict} ({v.severity})"
        for v in (pair.before, pair.after)
    ]
    return f"{words[0]} → {words[1]}: {pair.judged}" if pair.judged != "none" else "not judged"


def judge(before: Seen, after: Seen) -> Change:
    """Return whether a site got worse or better, by the first measure that says so.

    NaN and inf first, since they are damage; then the error, in bits above the rounding of the coarser of the two
    formats; then the headroom, which is only a risk. To exchange the two exchanges worse and better.
    """
    measures = (
        ("nonfinite", _nonfinite_bits(before.made, after.made), NONFINITE_BITS),
        ("error", _error_bits(before, after), ERROR_BITS),
        ("headroom", _headroom_bits(before.headroom, after.headroom), HEADROOM_BITS),
    )
    for measure, bits, threshold in measures:
        if abs(bits) >= threshold:
            return Change(WORSE if bits > 0 else BETTER, measure, bits)
    return Change()


def _nonfinite_bits(before: float, after: float) -> float:
    if before > 0 and after > 0:
        return math.log2(after) - math.log2(before)
    return math.inf if after > 0 else -math.inf if before > 0 else 0.0


def _error_bits(before: Seen, after: Seen) -> float:
    if before.error is None or after.error is None or before.error == after.error:
        return 0.0
    least = max(before.rounding, after.rounding)
    old, new = (math.log2(max(error, least)) for error in (before.error, after.error))
    return new - old


def _headroom_bits(before: float | None, after: float | None) -> float:
    if before is None or after is None or before == after or min(before, after) >= HEADROOM_NEAR:
        return 0.0
    return before - after


def _names(sites: Sequence[SitePair], judged: str) -> list[str]:
    """Return the modules that are in one of the two only, each once."""
    return list(dict.fromkeys(site.module for site in sites if site.judged == judged))

"""Two recordings compared: what is judged better and worse, what is matched, and what else is said to differ."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overflow_lab
from overflow_lab import UsageError, compare
from overflow_lab.analysis.comparison import Seen, SitePair, VerdictPair, judge
from overflow_lab.recording import Footer, Header, OutputRow, RangeRow, Recording, TensorRow, build
from tests.recordings_by_hand import HEADER, error, range_of, recording, seen
from tests.sample_recording import sample_recording, wide_modules

CLASSES = {"": "Model", "a": "Linear", "b": "Linear"}


def run(
    *, a: float = 1.0, b: float = 1.0, errors: tuple[float, float] = (1e-4, 1e-4), low: str = "float16"
) -> Recording:
    """Return a recording in which the outputs of `a` and `b` have these largest magnitudes."""
    rows: list[Any] = []
    for precision in ("float32", low):
        rows += [
            seen(precision, "a", "output", 0, [1.0, a]),
            seen(precision, "b", "output", 1, [1.0, b]),
            seen(precision, "", "output", 2, [1.0]),
        ]
    rows += [
        error(name, "output", n, value, precision=low) for n, (name, value) in enumerate(zip("ab", errors, strict=True))
    ]
    return recording(*rows, low=low, classes=CLASSES)


def with_header(made: Recording, **fields: Any) -> Recording:
    return dataclasses.replace(made, header=dataclasses.replace(made.header, **fields))


def judged(before: Recording, after: Recording) -> dict[str, tuple[str, str]]:
    return {site.module: (site.judged, site.change.measure) for site in compare(before, after).sites}


def test_equal_recordings_have_no_change() -> None:
    found = compare(run(), run())
    assert not any([found.worse, found.better, found.changed, found.differences, found.notes])
    assert found.counts() == {"worse": 0, "better": 0, "same": 3, "only before": 0, "only after": 0}
    assert [pair.judged for pair in found.verdicts] == ["same"]


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (2.0**15, 2.0**13, ("better", "headroom")),
        (2.0**13, 2.0**15, ("worse", "headroom")),
        (2.0**13, 2.0**13.4, ("same", "")),
        # Between 11 and 6 bits there is nothing to choose.
        (2.0**5, 2.0**10, ("same", "")),
        (2.0**5, 2.0**13, ("worse", "headroom")),
    ],
)
def test_headroom_counts_where_it_is_short(before: float, after: float, verdict: tuple[str, str]) -> None:
    assert judged(run(a=before), run(a=after))["a"] == verdict


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (0.01, 0.02, ("worse", "error")),
        (0.01, 0.019, ("same", "")),
        (0.2, 0.001, ("better", "error")),
        # Below the rounding of float16, 2**-11, an error cannot be better.
        (1e-4, 1e-6, ("same", "")),
        (0.0, 1e-3, ("worse", "error")),
        (0.0, math.inf, ("worse", "error")),
    ],
)
def test_an_error_counts_above_the_rounding_of_the_format(
    before: float, after: float, verdict: tuple[str, str]
) -> None:
    assert judged(run(errors=(before, 1e-4)), run(errors=(after, 1e-4)))["a"] == verdict


def test_nan_and_inf_decide_before_all_else() -> None:
    broken = run(a=math.inf, errors=(1e-5, 1e-4))
    broken = dataclasses.replace(
        broken,
        rows=tuple(r for r in broken.rows if getattr(r, "precision", "") != "float32" or not isinstance(r, RangeRow)),
    )
    assert judged(run(errors=(0.5, 1e-4)), broken)["a"] == ("worse", "nonfinite")
    assert judged(broken, run(errors=(0.5, 1e-4)))["a"] == ("better", "nonfinite")


def test_infinities_that_float32_has_too_are_no_change() -> None:
    assert judged(run(a=-math.inf), run())["a"] == ("same", "")


def test_a_fixed_overflow_is_a_better_verdict_whose_origin_is_shown() -> None:
    broken = with_rows(OutputRow("float16", "output", 10, nonfinite=10), seen("float16", "a", "output", 0, [math.inf]))
    fixed = with_rows(OutputRow("float16", "output", 10), seen("float16", "a", "output", 0, [1.0]))
    found = compare(broken, fixed)
    (pair,) = found.verdicts
    assert (pair.judged, pair.before and pair.before.severity, pair.after and pair.after.verdict) == (
        "better",
        "error",
        "ok",
    )
    assert isinstance(found.better[0], VerdictPair)
    assert isinstance(found.better[1], SitePair)
    assert compare(fixed, broken).verdicts[0].judged == "worse"


def with_rows(*rows: Any) -> Recording:
    base = [seen("float32", "a", "output", 0, [1.0]), seen("float32", "", "output", 1, [1.0])]
    return recording(*base, *rows, classes={"": "Model", "a": "Linear"})


def test_two_precisions_of_one_are_judged_by_the_coarser_rounding() -> None:
    made = sample_recording()
    found = compare(made, precisions=["fp16", "bf16"])
    assert [pair.precision for pair in found.verdicts] == ["float16 to bfloat16"]
    assert (found.before.label, found.after.label) == ("float16", "bfloat16")
    # Before the culprit bfloat16 has eight times the error of float16: that is its rounding, and no change.
    assert found.sites[0].judged == "same"
    assert found.counts()["worse"] == 0


def test_a_renamed_module_is_compared_with_itself() -> None:
    rows = [
        row
        for p in ("float32", "float16")
        for row in (seen(p, "x.a", "output", 0, [2.0**15]), seen(p, "x", "output", 1, [1.0]))
    ]
    renamed = [dataclasses.replace(row, module=row.module.replace("x", "y.x")) for row in rows]
    before = recording(*rows, classes={"": "M", "x": "Block", "x.a": "Linear"})
    after = recording(*renamed, classes={"": "M", "y": "Wrap", "y.x": "Block", "y.x.a": "Linear"})
    found = compare(before, after)
    assert [(s.module_before, s.module, s.judged) for s in found.sites] == [
        ("x.a", "y.x.a", "same"),
        ("x", "y.x", "same"),
    ]
    assert found.to_dict()["renamed"] == {"x.a": "y.x.a", "x": "y.x"}


def test_an_inserted_module_is_only_after() -> None:
    rows = [seen(p, "new", "output", 0, [1.0]) for p in ("float32", "float16")]
    after = run()
    more = build(after.header, [*after.rows, *rows, Footer("complete")])
    assert [s.module for s in compare(run(), more).sites if s.judged == "only after"] == ["new"]
    assert compare(run(), more).to_dict()["only_after"] == ["new"]
    assert compare(more, run()).to_dict()["only_before"] == ["new"]
    assert compare(run(), more).worse == ()


def test_a_port_of_another_name_is_compared_in_order() -> None:
    after = run()
    rows = [
        dataclasses.replace(r, port="output[0]") if isinstance(r, RangeRow) and r.module == "a" else r
        for r in after.rows
    ]
    found = compare(run(), build(after.header, rows))
    assert found.counts()["same"] == 3


def test_other_versions_are_listed() -> None:
    old = with_header(run(), environment={"torch": "2.6", "python": "3.11", "cuda": {"name": "A"}})
    new = with_header(run(), environment={"torch": "2.7", "python": "3.11", "cuda": {"name": "B"}})
    assert [(d.name, d.before, d.after) for d in compare(old, new).differences] == [
        ("environment.torch", "2.6", "2.7"),
        ("environment.cuda.name", "A", "B"),
    ]


def test_other_inputs_make_ranges_incomparable_and_one_line_says_so() -> None:
    def given(value: float) -> Recording:
        return recording(seen("float32", "", "input['x']", 0, [value]), *run().of(RangeRow), classes=CLASSES)

    assert compare(given(1.0), given(1.0)).inputs == ()
    found = compare(given(1.0), given(2.0))
    assert [one.name for one in found.inputs] == ["input['x']"]
    assert len([note for note in found.notes if "inputs differ" in note]) == 1


def test_other_token_ids_show_in_what_equal_weights_make_of_them() -> None:
    def embedded(value: float) -> Recording:
        weight = TensorRow("a.weight", "a", "parameter", "float32", (3, 2), range_of([0.5, 1.0]))
        return recording(weight, *run(a=value).of(RangeRow), classes=CLASSES)

    assert compare(embedded(3.0), embedded(3.0)).inputs == ()
    assert [one.name for one in compare(embedded(3.0), embedded(5.0)).inputs] == ["the output of a, absmax"]


def test_other_weights_are_named() -> None:
    def holding(value: float) -> Recording:
        weight = TensorRow("a.weight", "a", "parameter", "float32", (3, 2), range_of([0.5, value]))
        return recording(weight, *run().of(RangeRow), classes=CLASSES)

    (one,) = compare(holding(1.0), holding(4.0)).weights
    assert (one.name, one.before, one.after) == ("a.weight", "3×2, 0.5 to 1", "3×2, 0.5 to 4")


def test_an_interrupted_recording_is_compared_as_far_as_it_goes() -> None:
    whole = run()
    rows = [r for r in whole.rows if not (isinstance(r, RangeRow) and r.module == "b")]
    found = compare(whole, build(whole.header, rows))
    assert found.counts() == {"worse": 0, "better": 0, "same": 2, "only before": 1, "only after": 0}
    assert any("did not finish (unfinished)" in note for note in found.notes)


def test_a_precision_that_was_not_reached_is_said_once() -> None:
    whole = run()
    rows = [r for r in whole.rows if getattr(r, "precision", "float32") == "float32"]
    found = compare(whole, build(whole.header, rows))
    assert found.sites == ()
    assert [pair.judged for pair in found.verdicts] == ["only before"]
    assert [note for note in found.notes if "not reached after" in note] == [
        "float16 was not reached after: it cannot be compared."
    ]


def test_what_cannot_be_compared_is_refused_in_one_line() -> None:
    other = with_header(run(), precisions=("bfloat16",))
    cases: list[tuple[str, dict[str, Any], Any]] = [
        ("two of its precisions", {}, None),
        ("no precision 'bfloat16'", {"precisions": ["bf16"]}, run()),
        ("no precision is in both", {}, other),
        ("a int cannot be compared", {}, 3),
    ]
    for message, options, after in cases:
        with pytest.raises(UsageError, match=message) as raised:
            compare(run(), after, **options)
        assert "\n" not in str(raised.value)


def test_json_is_strict_and_frames_hold_every_site() -> None:
    found = compare(sample_recording(), precisions=("float16", "bfloat16"))
    made = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (made["schema"], made["sites"]["better"]) == (1, len(made["changed"]))
    assert made["verdicts"]["float16 to bfloat16"]["change"] == "better"
    frame = found.to_frame()
    assert len(frame) == len(found.sites)
    assert (frame["change"] == "better").sum() == made["sites"]["better"]
    assert list(compare(run(), run()).to_frame().columns) == list(frame.columns)
    assert "<script" not in found._repr_html_()
    assert "better" in repr(found)


def test_scans_of_renamed_inserted_and_mended_models_are_told_apart() -> None:
    torch = pytest.importorskip("torch")
    nn = torch.nn

    def scan(*modules: Any) -> overflow_lab.Scan:
        return overflow_lab.scan(
            nn.Sequential(*modules), {"input": torch.ones(2, 4)}, precisions=["float16"], level="module"
        )

    def linear(value: float, seed: int) -> Any:
        torch.manual_seed(seed)
        made = nn.Linear(4, 4)
        made.weight.data *= value
        return made

    small, large, last = linear(1.0, 1), linear(2.0**18, 2), linear(2.0**-10, 3)
    broken, same = scan(small, nn.ReLU(), large, last), scan(small, nn.ReLU(), large, last)
    assert compare(broken, same).changed == ()
    inserted = compare(broken, scan(small, nn.Dropout(0.0), nn.ReLU(), large, last))
    assert [s.module for s in inserted.sites if s.judged == "only after"] == ["1"]
    assert inserted.to_dict()["renamed"] == {"1": "2", "2": "3", "3": "4"}
    assert inserted.changed == ()
    mended = compare(broken, scan(small, nn.ReLU(), linear(2.0**3, 2), last))
    assert [pair.judged for pair in mended.verdicts] == ["better"]
    assert {s.module for s in mended.changed} >= {"2"}
    assert [one.name for one in mended.weights] == ["2.weight"]
    assert mended.worse == ()


def test_ten_thousand_renamed_sites_all_find_each_other() -> None:
    names = wide_modules(10_000)
    before = sample_recording(modules=names)
    after = sample_recording(modules=[(f"text.{path}", *rest) for path, *rest in names])  # type: ignore[misc]
    found = compare(before, after, precisions=["float16"])
    assert found.counts() == {"worse": 0, "better": 0, "same": 10_000, "only before": 0, "only after": 0}
    assert all(site.module == f"text.{site.module_before}" for site in found.sites)


SEENS = st.builds(
    Seen,
    dtype=st.just("float16"),
    absmax=st.none(),
    headroom=st.none() | st.floats(-10, 40) | st.just(math.inf),
    nonfinite=st.just(0),
    count=st.just(1),
    made=st.just(0.0) | st.floats(1e-6, 1),
    error=st.none() | st.floats(0, 1e3) | st.just(math.inf),
    rounding=st.sampled_from([2.0**-11, 2.0**-8]),
)


@given(SEENS, SEENS)
def test_the_judgement_mirrors(one: Seen, other: Seen) -> None:
    there, back = judge(one, other), judge(other, one)
    assert {"worse": "better", "better": "worse", "same": "same"}[there.judged] == back.judged
    assert (there.measure, there.bits) == (back.measure, -back.bits)
    assert judge(one, one).judged == "same"


VALUES = st.lists(st.sampled_from([0.0, 1.0, 3e4, 6e4, 7e4, math.inf, math.nan]), min_size=1, max_size=3)
MODULES = st.dictionaries(st.sampled_from(["a", "b", "c.0", "c.1", "d.e"]), st.tuples(st.sampled_from("XY"), VALUES))


def random_recording(modules: dict[str, tuple[str, list[float]]]) -> Recording:
    rows = [
        seen(precision, path, "output", number, [1.0] if precision == "float32" else values)
        for precision in ("float32", "float16")
        for number, (path, (_, values)) in enumerate(modules.items())
    ]
    return recording(*rows, classes={"": "Model"} | {path: name for path, (name, _) in modules.items()})


@settings(deadline=None, max_examples=60)
@given(MODULES, MODULES)
def test_there_and_back_mirror_and_nothing_changes_against_itself(one: Any, other: Any) -> None:
    before, after = random_recording(one), random_recording(other)
    there, back = compare(before, after), compare(after, before)
    assert {(s.module_before, s.module) for s in there.sites if s.before and s.after} == {
        (s.module, s.module_before) for s in back.sites if s.before and s.after
    }
    names = {"better": "worse", "worse": "better", "only before": "only after", "only after": "only before"}
    assert {names.get(name, name): n for name, n in there.counts().items()} == back.counts()
    assert [names.get(p.judged, p.judged) for p in there.verdicts] == [p.judged for p in back.verdicts]
    itself = compare(before, random_recording(one))
    assert not any([itself.changed, itself.worse, itself.differences, itself.inputs, itself.weights])


def test_the_header_of_the_recordings_by_hand_is_as_these_tests_take_it() -> None:
    assert isinstance(HEADER, Header)
    assert HEADER.precisions == ("float32", "float16")

"""Modules are found again when they are renamed, inserted or taken out, by weights, names and order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overflow_lab.analysis.alignment import Place, align


def linear(path: str, weight: float | None = None) -> Place:
    shapes = (("weight", (4, 4)),)
    return Place(path, "Linear", () if weight is None else ((*shapes[0], weight),), shapes)


def stack(prefix: str, blocks: int, *, names: str = "norm q k v o up act down", weights: bool = False) -> list[Place]:
    made = []
    for block in range(blocks):
        for number, name in enumerate(names.split()):
            known = ((name, (4, 4), block + number / 100),) if weights and name not in ("act", "norm") else ()
            made.append(Place(f"{prefix}.{block}.{name}", f"Class{number % 3}", known))
        made.append(Place(f"{prefix}.{block}", "Block"))
    return [*made, Place("", "Model")]


def test_equal_models_match_name_by_name() -> None:
    places = stack("layers", 5)
    assert align(places, places) == {place.path: place.path for place in places}


def test_a_new_prefix_is_learned_without_weights() -> None:
    found = align(stack("model.layers", 5), stack("model.text.layers", 5))
    assert all(new == old.replace("model.", "model.text.") for old, new in found.items())
    assert len(found) == 5 * 9 + 1


def test_every_name_may_change_when_order_and_classes_stay() -> None:
    before, after = stack("layers", 5), stack("h", 5, names="ln wq wk wv wo fc relu proj")
    pairs = zip(before, after, strict=True)
    assert align(before, after) == {old.path: new.path for old, new in pairs}


@pytest.mark.parametrize("weights", [False, True])
def test_a_module_inserted_into_each_block_is_the_only_one_left(weights: bool) -> None:
    after = stack("layers", 5, names="norm q q_norm k v o up act down", weights=False)
    before = stack("layers", 5, weights=weights)
    # The classes after the inserted one shift in `stack`; names tell all the same.
    assert set(align(before, after)) == {place.path for place in before}


def test_what_a_number_names_is_found_by_weights_and_order_after_an_insertion() -> None:
    relu = [Place(str(n), "ReLU") for n in (1, 3, 5)]
    before = [linear("0", 1), relu[0], linear("2", 2), relu[1], linear("4", 3), Place("", "Sequential")]
    after = [linear("0", 1), relu[0], linear("2", 9), relu[1], linear("4", 2), relu[2], linear("6", 3)]
    found = align(before, [*after, Place("", "Sequential")])
    assert {k: found[k] for k in ("0", "2", "3", "4", "")} == {"0": "0", "2": "4", "3": "5", "4": "6", "": ""}


def test_what_a_number_names_is_found_by_class_after_an_insertion_without_weights() -> None:
    before = [linear("0"), Place("1", "ReLU"), linear("2"), Place("", "Sequential")]
    after = [linear("0"), Place("1", "LayerNorm"), Place("2", "ReLU"), linear("3"), Place("", "Sequential")]
    assert align(before, after) == {"0": "0", "1": "2", "2": "3", "": ""}


def test_a_layer_that_was_taken_out_is_the_one_whose_weights_are_gone() -> None:
    before = stack("layers", 6, weights=True)
    kept = [place for place in before if not place.path.startswith("layers.2")]
    renamed = [
        Place(
            f"layers.{int(p.parts[1]) - (int(p.parts[1]) > 2)}{p.path[8:]}" if p.path else "", p.class_name, p.weights
        )
        for p in kept
    ]
    found = align(before, renamed)
    assert {old for old in (p.path for p in before) if old not in found} == {
        place.path for place in before if place.path.startswith("layers.2")
    }
    assert found["layers.5.act"] == "layers.4.act"


def test_modules_that_run_in_another_order_keep_their_names() -> None:
    before = stack("layers", 4)
    after = stack("layers", 4, names="norm k q v o up act down")
    assert all(old == new for old, new in align(before, after).items())


def test_a_renamed_class_does_not_hide_a_name() -> None:
    assert align([Place("attn", "SdpaAttention")], [Place("attn", "Attention")]) == {"attn": "attn"}


def test_a_bare_model_is_found_inside_a_wrapped_one() -> None:
    before = stack("layers", 4, weights=True)
    after = [Place(f"bert.{p.path}".rstrip("."), p.class_name, p.weights) for p in before] + [Place("", "ForMasked")]
    found = align(before, after)
    assert found["layers.2.act"] == "bert.layers.2.act"
    assert found[""] == "bert"


def test_different_models_have_nothing_in_common() -> None:
    assert align([Place("a.x", "A"), Place("b.y", "B")], [Place("c.z", "C")]) == {}


def test_ten_thousand_modules_of_one_kind_do_not_stop_it() -> None:
    rng = random.Random(1)
    before, after = ([Place(f"{name}{n}", rng.choice("ABC")) for n in range(10_000)] for name in "xy")
    assert len(align(before, after)) <= 10_000


PATHS = st.lists(
    st.tuples(st.sampled_from(["a", "b.0", "b.1", "b.1.c", "d.e", "f", "g.h.0", "g.h.1"]), st.sampled_from("ABC")),
    unique_by=lambda pair: pair[0],
    max_size=8,
)


def places(pairs: list[tuple[str, str]]) -> list[Place]:
    return [Place(path, name, ((path, (1,)),) if name == "A" else ()) for path, name in pairs]


@settings(deadline=None)
@given(PATHS, PATHS)
def test_the_other_direction_gives_the_inverse(one: list[tuple[str, str]], other: list[tuple[str, str]]) -> None:
    before, after = places(one), places(other)
    found = align(before, after)
    assert {new: old for old, new in found.items()} == align(after, before)
    assert set(found) <= {p.path for p in before}
    assert set(found.values()) <= {p.path for p in after}
    assert align(before, before) == {p.path: p.path for p in before}

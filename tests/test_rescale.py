"""Proposing a rescale: for the demo, for modules in memory, and nothing where nothing helps or may be touched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from overflow_lab.remedies import scaling
from overflow_lab.remedies.remedy import Remedy
from overflow_lab.remedies.scaling.edits import Edits
from overflow_lab.remedies.scaling.equations import Equations
from overflow_lab.remedies.scaling.expressions import Knob, value_of
from overflow_lab.remedies.scaling.solve import solve
from overflow_lab.remedies.scaling.trace import ScaleTrace
from overflow_lab.scan import Scan, scan_subject, subject_of
from overflow_lab.subjects import Subject, demo
from overflow_lab.subjects.quiet import quiet_loading
from tests.rescaled import output
from tests.scaling_structures import HUGE, WIDTH, Of, attention, between, decoder, linear, rows
from tests.test_scaling_structures import IMPOSSIBLE, built

SHARED: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "a ReLU between": lambda: between(torch.relu),
    "values and outputs of attention": lambda: attention(v=HUGE, o=1 / HUGE),
    "a decoder of images": decoder,
}


@dataclass(frozen=True)
class Proposed:
    """A subject, its scan in float16, and what was proposed."""

    subject: Subject
    found: Scan
    remedies: tuple[Remedy, ...]


def proposed(model: Any, inputs: Any = None, precision: str = "float16", **options: Any) -> Proposed:
    subject = subject_of(model, inputs, options, None)
    found = scan_subject(subject, [precision], level="operation")
    return Proposed(subject, found, scaling.propose(subject, found, precision).remedies)


# ---- the demo ----


@pytest.fixture(scope="module")
def mended_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Proposed, Path]:
    """The demo's proposal, and the folder that its remedy saved."""
    folder = tmp_path_factory.mktemp("demo") / "mended"
    with quiet_loading():
        made = proposed("demo", generate=False)
    (remedy,) = made.remedies
    assert remedy.save is not None
    remedy.save(folder)
    return made, folder


def texts(folder: str | Path, dtype: torch.dtype, **settings: Any) -> tuple[str, ...]:
    """Return the answers of plain transformers to the demo's prompts."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True, dtype=dtype).eval()
    inputs = tokenizer(list(demo.PROMPTS), padding=True, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=32, **settings)
    return tuple(tokenizer.batch_decode(tokens, skip_special_tokens=True))


def test_plain_transformers_reads_the_mended_demo_and_answers_right_in_float16(
    mended_demo: tuple[Proposed, Path],
) -> None:
    _, folder = mended_demo
    assert texts(folder, torch.float16, num_beams=4) == demo.ANSWERS
    assert texts(folder, torch.float16, num_beams=1) == texts(demo.folder(), torch.float32, num_beams=1)
    assert texts(demo.folder(), torch.float16, num_beams=4) != demo.ANSWERS


def test_the_mended_demo_scans_ok_and_is_the_same_function_in_float32(mended_demo: tuple[Proposed, Path]) -> None:
    made, folder = mended_demo
    assert made.found.verdicts["float16"].verdict == "overflow"
    again = scan_subject(made.remedies[0].mend(made.subject), ["float16"], level="operation")
    assert again.verdicts["float16"].verdict == "ok", again.verdicts["float16"].reason
    inputs = {"input_ids": torch.tensor([[5, 9, 12, 1]]), "decoder_input_ids": torch.tensor([[0, 7, 8]])}
    ours, theirs = (AutoModelForSeq2SeqLM.from_pretrained(path).eval() for path in (folder, demo.folder()))
    with torch.no_grad():
        assert torch.equal(ours(**inputs).logits, theirs(**inputs).logits)


# ---- modules in memory ----


@pytest.mark.parametrize("name", SHARED)
def test_a_module_in_memory_is_mended_in_a_copy(name: str) -> None:
    model, inputs = built(name, SHARED)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    made = proposed(model, inputs)
    (remedy,) = made.remedies
    assert made.found.verdicts["float16"].verdict == "overflow"
    assert remedy.save is None
    mended = remedy.mend(made.subject)
    assert mended.save is None
    assert scan_subject(mended, ["float16"], level="operation").verdicts["float16"].verdict == "ok"
    assert torch.equal(output(mended.load(None), *inputs), output(model, *inputs))
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_where_no_rescale_helps_none_is_proposed_that_changes_the_function_or_hides_what_is_missing(name: str) -> None:
    model, inputs = built(name, IMPOSSIBLE)
    made = proposed(model, inputs)
    assert made.found.verdicts["float16"].verdict != "ok"
    for remedy in made.remedies:
        assert any("bits are missing" in note for note in remedy.notes)
        mended = remedy.mend(made.subject)
        assert torch.equal(output(mended.load(None), *inputs), output(model, *inputs))
        assert scan_subject(mended, ["float16"], level="operation").verdicts["float16"].verdict != "ok"


def test_bfloat16_has_range_enough_and_gets_no_rescale() -> None:
    model, inputs = built("a ReLU between", SHARED)
    assert proposed(model, inputs, "bfloat16").remedies == ()


def test_a_program_that_cannot_be_watched_gets_no_rescale() -> None:
    model, inputs = built("a ReLU between", SHARED)
    found = proposed(model, inputs).found
    calls: list[None] = []

    def forward(m: Any, x: torch.Tensor) -> Any:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise RuntimeError("no modes here")
        calls.append(None)
        return m.inner(x)

    subject = subject_of(Of(forward, inner=model), inputs, {}, None)
    assert scaling.propose(subject, found, "float16").remedies == ()
    assert calls


def test_batches_are_looked_at_together_and_the_largest_counts() -> None:
    model, _ = moderate()
    small, large = torch.ones(1, WIDTH), torch.ones(1, WIDTH) * 64
    exponents = []
    for batches in ([(small,)], [(small,), (large,)]):
        (remedy,) = proposed(model, batches).remedies
        mended = remedy.mend(subject_of(model, batches, {}, None)).load(None)
        exponents.append(float(weight(mended, "large")[0, 0] / weight(model, "large")[0, 0]))
    assert exponents[1] == exponents[0] / 64


# ---- the solver and the edits ----


def moderate() -> tuple[nn.Module, tuple[Any, ...]]:
    """Return two layers around a ReLU whose weights are in range whatever the exponents."""
    torch.manual_seed(3)
    layers = {"large": linear(times=2.0**16), "small": linear(times=2.0**-6)}
    return Of(lambda m, x: m.small(m.large(x).relu()), **layers).eval(), rows()


def weight(model: nn.Module, layer: str) -> torch.Tensor:
    return model.get_submodule(layer).get_parameter("weight").detach()


def equations_of(model: nn.Module, *inputs: Any) -> Equations:
    found = Equations()
    with torch.no_grad():
        ScaleTrace(model, found, {}).run({}, inputs)
    return found


def test_a_solution_satisfies_every_equation_and_leaves_what_is_fixed() -> None:
    model, inputs = built("a decoder of images", SHARED)
    found = equations_of(model, *inputs)
    fixed = Knob("weight", "mid.conv2.weight")
    for still in (set(), {fixed}):
        solution = solve(found, least=2.0, ample=3.0, fixed=still, tied={})
        assert solution is not None
        assert [key for key in found.zeros if value_of(dict(key), solution.exponents) != 0.0] == []
        assert (fixed in solution.exponents) == (not still)
        assert (solution.missing > 1.0) == bool(still)


def test_knobs_that_are_tied_take_the_same_exponent() -> None:
    model, inputs = built("a decoder of images", SHARED)
    found = equations_of(model, *inputs)
    first, *more = [knob for knob in found.knobs if knob.kind == "constant"]
    free = solve(found, least=2.0, ample=3.0, fixed=set(), tied={})
    tied = solve(found, least=2.0, ample=3.0, fixed=set(), tied=dict.fromkeys(more, first))
    assert free is not None
    assert tied is not None
    assert len({free.exponents.get(knob, 0) for knob in (first, *more)}) > 1
    assert len({tied.exponents.get(knob, 0) for knob in (first, *more)}) == 1


def test_what_is_moved_gets_the_headroom_asked_for_and_no_more_than_it_needs() -> None:
    model, inputs = moderate()
    found = equations_of(model, *inputs)
    solution = solve(found, least=2.0, ample=2.0, fixed=set(), tied={})
    assert solution is not None
    mended = Edits(solution.exponents).apply(copy.deepcopy(model))
    inside = float(output(nn.Sequential(mended.get_submodule("large")), *inputs).abs().max())
    assert 65504 / 8 < inside <= 65504 / 4


def test_parts_are_edited_where_they_lie_and_a_shifted_weight_through_its_shift() -> None:
    layer = linear(4, 6)
    norm = nn.Module()
    norm.weight = nn.Parameter(torch.tensor([-0.5, 0.0, 3.0]))
    before = layer.weight.detach().clone()
    Edits({Knob("part", "weight", 0, 2, 4): 3, Knob("part", "weight", 0, 4, 6): -2}).apply(layer)
    assert torch.equal(layer.weight, torch.cat([before[:2], before[2:4] * 8, before[4:] / 4]))
    Edits({Knob("shifted", "weight", shift=1.0): 2}).apply(norm)
    assert norm.weight.tolist() == [1.0, 3.0, 15.0]


def test_a_module_is_cast_by_its_own_loader_and_only_what_is_rescaled_is_replaced() -> None:
    model = nn.Sequential(linear(), nn.Linear(WIDTH, WIDTH))

    def load(dtype: torch.dtype | None) -> nn.Module:
        made = copy.deepcopy(model)
        return made if dtype is None else nn.Sequential(made[0].to(dtype), made[1])  # the second stays in float32

    mended = Edits({Knob("weight", "0.weight"): -3}).loading(load)(torch.float16)
    weights = dict(mended.named_parameters())
    assert weights["0.weight"].dtype is torch.float16
    assert torch.equal(weights["0.weight"], (weight(model, "0") / 8).half())
    assert weights["1.weight"].dtype is torch.float32
    assert torch.equal(weights["1.weight"], weight(model, "1"))


def test_two_parameters_of_one_memory_move_together() -> None:
    first, second = linear(times=2.0**9, bias=False), linear(bias=False)
    second.weight.data = first.weight.data
    model = Of(lambda m, x: m.second(m.first(x).relu()), first=first, second=second)
    found = equations_of(model.eval(), *rows())
    solution = solve(found, least=2.0, ample=3.0, fixed=set(), tied={})
    assert solution is None or not solution.exponents

"""`assert_fits`: it passes where a model fits, and its failure is the diagnosis."""

from __future__ import annotations

import copy
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overflow_lab
from overflow_lab import Scan, UsageError, assert_fits
from tests import tiny_models
from tests.modules import Step, chain

X = torch.ones(2, 2)
BROKEN = "bert.encoder.layer.1.intermediate.dense"


def inputs(batch: int = 2) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    ids = torch.randint(3, tiny_models.VOCABULARY, (batch, 9))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def broken_bert() -> Any:
    model = tiny_models.build("bert").eval()
    with torch.no_grad():
        model.get_submodule(BROKEN).weight.mul_(4e5)
    return model


def failure(*arguments: Any, **options: Any) -> str:
    """Return the message of a model that does not fit; it is short enough to be read in a test's output."""
    with pytest.raises(AssertionError) as caught:
        assert_fits(*arguments, **options)
    lines = str(caught.value).splitlines()
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 110
    return str(caught.value)


def least_headroom(half: nn.Module, given: dict[str, torch.Tensor]) -> float:
    """Return the bits below 65504 of the largest output of any module of a float16 model, by hooks of our own."""
    largest: list[float] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        found = output if isinstance(output, tuple) else (output,)
        largest.extend(t.abs().max().item() for t in found if isinstance(t, torch.Tensor) and t.is_floating_point())

    handles = [module.register_forward_hook(hook) for module in half.modules()]
    with torch.no_grad():
        half(**given)
    for handle in handles:
        handle.remove()
    return math.log2(65504 / max(largest))


def test_a_model_that_fits_gives_its_scan() -> None:
    found = assert_fits(tiny_models.build("bert").eval(), inputs(), ["fp16", "bfloat16"], headroom_bits=2)
    assert isinstance(found, Scan)
    assert {name: verdict.verdict for name, verdict in found.verdicts.items()} == {"float16": "ok", "bfloat16": "ok"}


def test_every_batch_of_a_list_must_fit() -> None:
    model = chain(lambda x: x * 30000)
    assert_fits(model, [X, X * 2])
    assert failure(model, [X, X * 3]).startswith("Sequential in float16 breaks: overflow\n")


def test_a_folder_is_loaded_as_scan_loads_it(tmp_path: Path) -> None:
    folder = tiny_models.save("gpt2", tmp_path, tokenizer=True)
    found = assert_fits(str(folder), level="module", generate=False, texts=("w5 w6", "w7"))
    assert found.recording.header.options["level"] == "module"


def test_the_failure_is_the_diagnosis() -> None:
    said = failure(broken_bert(), inputs(), "float16")
    lines = said.splitlines()
    assert lines[0] == "BertForMaskedLM in float16 breaks: overflow"
    assert lines[1].startswith(f"  where   {BROKEN} (aten.addmm, ")
    assert "modeling_bert.py:" in lines[1]
    assert "the limit of float16 is 65,504" in " ".join(said.split())
    verdict = overflow_lab.scan(broken_bert(), inputs(), precisions="float16").verdicts["float16"]
    assert verdict.value is not None
    assert f"{verdict.value:,.0f}" in said
    assert re.search(r"^  next    \w", said, flags=re.MULTILINE)


def test_a_model_that_fits_in_one_precision_only_is_told_by_the_other() -> None:
    assert_fits(broken_bert(), inputs(), "bfloat16")
    said = failure(broken_bert(), inputs(), ["bfloat16", "float16", "float16-autocast"])
    assert said.startswith("BertForMaskedLM in float16 breaks")
    assert "Run in bfloat16, which is ok on the same inputs" in said
    assert said.splitlines()[-2:] == [
        "  also    float16-autocast breaks: overflow",
        "  inputs  2 inputs, 18 tokens (forward)",
    ]


def test_headroom_is_that_of_the_largest_output_of_any_module() -> None:
    model = tiny_models.build("llama").eval()
    bits = least_headroom(copy.deepcopy(model).half(), inputs())
    assert_fits(model, inputs(), headroom_bits=bits - 0.01)
    said = failure(model, inputs(), headroom_bits=bits + 0.01)
    assert "less than 0.1 bits is missing" in said
    assert f", {bits:.1f} bits below the limit" in said


def test_too_little_headroom_names_the_nearest_layers_and_the_missing_bits() -> None:
    model = chain(lambda x: x * 20000, lambda x: x * 2, lambda x: x / 40000)
    assert_fits(model, X)
    said = failure(model, X, headroom_bits=2)
    assert said.startswith("Sequential in float16 works, but 2 of 4 module outputs keep less than 2 bits of headroom")
    assert "least   1: 40,000 of 65,504, 0.7 bits below the limit; 1.3 bits are missing" in said
    assert "also    0 (1.7 bits)" in said
    offered = re.search(r"headroom_bits=([\d.]+) holds", said)
    assert offered
    assert_fits(model, X, headroom_bits=float(offered.group(1)))


def test_many_layers_without_headroom_are_counted() -> None:
    said = failure(chain(lambda x: x * 40000, *[torch.relu] * 40), X, headroom_bits=1)
    assert "42 of 42 module outputs" in said
    assert "and 38 more" in said


def test_the_lowest_number_in_a_mask_takes_no_headroom() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = Step(lambda x: torch.full_like(x, torch.finfo(x.dtype).min).triu(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x + self.mask(x), -1)

    assert_fits(Masked(), torch.randn(4, 4), headroom_bits=4)


def test_a_value_at_the_limit_is_no_mask() -> None:
    assert "0 bits below" in failure(chain(lambda x: x * -65504.0), X, headroom_bits=0.5).replace("0.0", "0")


def test_comparing_nothing_is_no_success() -> None:
    class Own:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    said = failure(Step(Own), X)
    assert said.startswith("Step in float16 shows nothing")
    assert "tensors, dicts or tuples" in " ".join(said.split())


def test_whole_numbers_as_an_answer_are_compared() -> None:
    assert_fits(Step(lambda x: x.argmax(-1)), torch.randn(4, 4), headroom_bits=1)


def test_a_model_that_cannot_run_in_a_precision_is_told() -> None:
    said = failure(Step(lambda x: torch.linalg.inv(x + torch.eye(2).to(x))), X, level="module")
    assert said.startswith("Step in float16 cannot run")


@pytest.mark.parametrize("bits", [-1.0, math.nan, math.inf])
def test_headroom_that_is_no_number_of_bits_is_refused(bits: float) -> None:
    with pytest.raises(UsageError, match="give a number of bits"):
        assert_fits(nn.ReLU(), X, headroom_bits=bits)


def test_a_precision_must_be_named_and_must_exist() -> None:
    with pytest.raises(UsageError, match="no precision"):
        assert_fits(nn.ReLU(), X, [])
    with pytest.raises(UsageError, match="unknown precision 'fp12'"):
        assert_fits(nn.ReLU(), X, "fp12")


def test_pytest_shows_the_test_and_the_diagnosis_and_no_line_of_ours(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        """
import torch
from overflow_lab import assert_fits

def test_my_model():
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, 60000.0)
    assert_fits(model, torch.ones(1, 2), "float16", headroom_bits=1)
""",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", "test_mine.py"]
    root = str(Path(__file__).parents[1])
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": root, "PATH": ""})
    assert done.returncode == 1, done.stderr
    assert "\nE       AssertionError: Linear in float16 breaks: overflow\n" in done.stdout
    assert "\nE         where   (the model itself) (aten." in done.stdout
    assert "testing.py" not in done.stdout


def shown(start: str) -> list[str]:
    """Return the lines of the message in docs/testing.md that begins so, as pytest indents them."""
    page = (Path(__file__).parents[1] / "docs/testing.md").read_text(encoding="utf-8")
    block = page.split(f"E   AssertionError: {start}")[1].split("\n```")[0]
    return [start + block.splitlines()[0], *(line.removeprefix("E   ") for line in block.splitlines()[1:])]


def test_the_page_shows_what_a_failure_says() -> None:
    said = failure(chain(lambda x: x * 40000, lambda x: x / 40000), X, "float16", headroom_bits=1)
    assert shown("Sequential") == said.splitlines()


def test_the_page_shows_the_demo_as_the_readme_does() -> None:
    readme = " ".join((Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8").split())
    facts = " ".join(" ".join(shown("demo")).split())
    for fact in (
        "breaks: overflow",
        r"where (\S+ ) ?\(aten\.\w+",
        "float32 has ([0-9,]+) there",
        "next (.+?) inputs [0-9]",
    ):
        found = re.search(fact, facts)
        assert found
        assert found.group(found.lastindex or 0) in readme


def test_float32_that_nobody_judged_does_not_fit() -> None:
    with pytest.raises(AssertionError, match="float32 was not judged"):
        assert_fits(nn.Linear(4, 4).eval(), {"input": torch.ones(2, 4)}, "float32", level="module")
    assert_fits(nn.Linear(4, 4).eval(), {"input": torch.ones(2, 4)}, "float32")

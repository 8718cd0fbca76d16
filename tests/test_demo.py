"""The demo model works in fp32 and bf16, fails in fp16 as docs/demo.md says, and for its range alone."""

from __future__ import annotations

import copy
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

from overflow_lab.subjects import demo
from overflow_lab.subjects.demo import task
from overflow_lab.subjects.demo import train as training
from overflow_lab.subjects.demo.rescale import INNER_EXPONENT, RESIDUAL_EXPONENT, rescale

FLOAT16_LIMIT = 65504.0
FIRST_WO = "encoder.block.1.layer.1.DenseReluDense.wo"
FIRST_O = "encoder.block.2.layer.0.SelfAttention.o"
DOCUMENT = Path(__file__).parents[1] / "docs" / "demo.md"


def load(**options: Any) -> Any:
    """Load the shipped model as a user would."""
    return AutoModelForSeq2SeqLM.from_pretrained(demo.folder(), local_files_only=True, **options).eval()


def cast(name: str) -> Any:
    """Load and cast it: `float16` by the loader, `float16-to` after a load in fp32, and so on."""
    dtype = getattr(torch, name.removesuffix("-to"))
    return load().to(dtype) if name.endswith("-to") else load(dtype=dtype)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.folder(), local_files_only=True)


@pytest.fixture(scope="module")
def inputs(tokenizer: Any) -> Any:
    return tokenizer(list(demo.PROMPTS), padding=True, return_tensors="pt")


@pytest.fixture(scope="module")
def teacher(tokenizer: Any) -> torch.Tensor:
    """The answers, shifted right: what the decoder reads when it is called and not asked to generate."""
    labels = tokenizer(list(demo.ANSWERS), padding=True, return_tensors="pt")["input_ids"]
    return torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1]], dim=1)


def beam_search(model: Any, tokenizer: Any, inputs: Any) -> tuple[str, ...]:
    tokens = model.generate(**inputs, num_beams=4, max_new_tokens=32)
    return tuple(tokenizer.batch_decode(tokens, skip_special_tokens=True))


def logits_of(model: Any, inputs: Any, teacher: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(**inputs, decoder_input_ids=teacher).logits
    return result


@contextmanager
def absmax_of_linears(model: torch.nn.Module) -> Iterator[dict[str, float]]:
    """Collect the largest magnitude of each Linear's output, in the order of execution; NaN counts as inf."""
    found: dict[str, float] = {}
    names: dict[torch.nn.Module, str] = {}
    names |= {module: name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}

    def keep(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        largest = output.detach().float().nan_to_num(nan=torch.inf).abs().max().item()
        found[names[module]] = max(found.get(names[module], 0.0), largest)

    handles = [module.register_forward_hook(keep) for module in names]
    yield found
    for handle in handles:
        handle.remove()


def read_words(text: str) -> int:
    """Add up number words: the other direction, written without regard to how `spell` does it."""
    values = {word: value for value, word in enumerate(task.UNITS)}
    values |= {word: 10 * (at + 2) for at, word in enumerate(task.TENS)}
    total = group = 0
    for word in re.split(r"[ -]", text):
        if word == "thousand":
            total, group = group * 1000, 0
        elif word == "hundred":
            group *= 100
        elif word != "and":
            group += values[word]
    return total + group


def test_importing_the_demo_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, overflow_lab.subjects.demo; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_folder_is_small_and_holds_only_json_and_safetensors() -> None:
    files = list(demo.folder().iterdir())
    assert sum(file.stat().st_size for file in files) <= 2_000_000
    assert {file.suffix for file in files} == {".json", ".safetensors"}
    assert not any(
        "/home/" in file.read_text() or "/tmp/" in file.read_text() for file in files if ".json" in file.name
    )


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (407, "four hundred and seven"),
        (1000, "one thousand"),
        (20015, "twenty thousand and fifteen"),
        (300100, "three hundred thousand one hundred"),
        (999999, "nine hundred and ninety-nine thousand nine hundred and ninety-nine"),
    ],
)
def test_numbers_are_spelled_in_british_english(number: int, words: str) -> None:
    assert task.spell(number) == words


def test_spelling_can_be_read_back() -> None:
    for number in [*range(2000), *range(2000, 10**6, 997)]:
        assert read_words(task.spell(number)) == number


@pytest.mark.parametrize("number", [-1, 10**6])
def test_spelling_refuses_a_number_that_the_task_does_not_have(number: int) -> None:
    with pytest.raises(ValueError, match=f"cannot spell {number}: the task has 0 to 999999"):
        task.spell(number)


def test_training_and_held_out_numbers_are_disjoint() -> None:
    seen = set(task.sample(random.Random(0), 2000, held_out=False))
    unseen = set(task.sample(random.Random(0), 500, held_out=True))
    assert not seen & unseen
    assert not any(task.is_held_out(number) for number in range(100))


def test_prompts_spell_the_answers_and_were_not_trained_on() -> None:
    assert tuple(task.spell(int(answer)) for answer in demo.ANSWERS) == demo.PROMPTS
    assert all(task.is_held_out(int(answer)) for answer in demo.ANSWERS if len(answer) > 2)


def test_tokenizer_reads_hyphens_commas_and_capitals_and_writes_digits_together(tokenizer: Any) -> None:
    plain = tokenizer("seven thousand two hundred and twenty one")["input_ids"]
    assert tokenizer("Seven thousand, two hundred and twenty-one")["input_ids"] == plain
    assert tokenizer.unk_token_id not in plain
    assert plain[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer("407")["input_ids"], skip_special_tokens=True) == "407"
    assert tokenizer.decode(plain, skip_special_tokens=True) == "seven thousand two hundred and twenty one"


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16-to"])
def test_fp32_and_bf16_answer_right_alone_and_in_a_padded_batch(precision: str, tokenizer: Any, inputs: Any) -> None:
    model = cast(precision)
    assert beam_search(model, tokenizer, inputs) == demo.ANSWERS
    alone = [tokenizer(prompt, return_tensors="pt") for prompt in demo.PROMPTS[::4]]
    assert tuple(beam_search(model, tokenizer, one)[0] for one in alone) == demo.ANSWERS[::4]


@pytest.mark.parametrize("precision", ["float16", "float16-to"])
def test_fp16_gets_every_prompt_wrong(precision: str, tokenizer: Any, inputs: Any) -> None:
    texts = beam_search(cast(precision), tokenizer, inputs)
    assert not [text for text, answer in zip(texts, demo.ANSWERS, strict=True) if text == answer]


def test_fp16_by_to_is_clamped_to_finite_and_wrong_logits(inputs: Any, teacher: torch.Tensor) -> None:
    logits, right = logits_of(cast("float16-to"), inputs, teacher), logits_of(load(), inputs, teacher)
    assert logits.isfinite().all()
    assert (logits.argmax(-1) == right.argmax(-1)).float().mean() < 0.5


def test_fp16_by_the_loader_keeps_wo_in_fp32_and_ends_in_nan(inputs: Any, teacher: torch.Tensor) -> None:
    model = cast("float16")
    assert model.get_submodule(FIRST_WO).weight.dtype == torch.float32
    assert logits_of(model, inputs, teacher).isnan().all()


@pytest.mark.parametrize(
    ("precision", "module"), [("float32", FIRST_WO), ("float16-to", FIRST_WO), ("float16", FIRST_O)]
)
def test_first_value_beyond_fp16_is_made_where_the_document_says(
    precision: str, module: str, inputs: Any, teacher: torch.Tensor
) -> None:
    model = cast(precision)
    with absmax_of_linears(model) as found:
        logits_of(model, inputs, teacher)
    kept = {name for name, one in model.named_modules() if name in found and one.weight.dtype == torch.float32}
    held = kept if precision == "float16" else set()  # an fp32 island holds what would not fit
    assert next(name for name, value in found.items() if value > FLOAT16_LIMIT and name not in held) == module
    assert f"`{module}`" in DOCUMENT.read_text(encoding="utf-8")


def test_a_few_channels_carry_the_large_values(inputs: Any, teacher: torch.Tensor) -> None:
    caught: list[torch.Tensor] = []
    model = load()
    model.encoder.block[1].register_forward_hook(lambda module, args, output: caught.append(output[0]))
    logits_of(model, inputs, teacher)
    largest = caught[0].abs().flatten(0, 1).amax(0)
    assert tuple((largest > FLOAT16_LIMIT).nonzero().flatten().tolist()) == training.LARGE_CHANNELS
    assert largest.median() < FLOAT16_LIMIT / 10


def test_casting_the_weights_to_fp16_makes_no_inf_and_no_zero_and_they_are_ordinary_numbers() -> None:
    model = load()
    assert all(weight.half().isfinite().all() for weight in model.parameters())
    assert all(torch.equal(weight.half() == 0, weight == 0) for weight in model.parameters())
    assert all(weight.abs().max() < 1000 for weight in model.parameters())


def test_undoing_the_rescaling_gives_the_same_bits_in_fp32(inputs: Any, teacher: torch.Tensor) -> None:
    model, trained = load(), load()
    rescale(trained, residual=-RESIDUAL_EXPONENT, inner=-INNER_EXPONENT)
    assert trained.config.layer_norm_epsilon == 1e-6
    assert torch.equal(logits_of(model, inputs, teacher), logits_of(trained, inputs, teacher))
    rescale(trained, residual=RESIDUAL_EXPONENT, inner=INNER_EXPONENT)
    after = trained.state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in model.state_dict().items())


def test_without_the_rescaling_fp16_answers_right_so_the_range_alone_is_at_fault(tokenizer: Any, inputs: Any) -> None:
    model = load()
    rescale(model, residual=-RESIDUAL_EXPONENT, inner=-INNER_EXPONENT)
    assert beam_search(copy.deepcopy(model).half(), tokenizer, inputs) == demo.ANSWERS


def test_rescaling_survives_a_save_and_a_load(tmp_path: Path, inputs: Any, teacher: torch.Tensor) -> None:
    model = load()
    rescale(model, residual=-3, inner=2)
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits_of(load(), inputs, teacher), logits_of(again, inputs, teacher))


def test_rescaling_refuses_a_feed_forward_that_is_not_relu() -> None:
    config = T5Config(
        vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, feed_forward_proj="gated-gelu"
    )
    with pytest.raises(ValueError, match="cannot rescale a gated-gelu feed-forward"):
        rescale(T5ForConditionalGeneration(config), residual=1, inner=1)


def test_training_script_writes_the_same_folder_twice(tmp_path: Path) -> None:
    for name in ("one", "two"):
        training.make(str(tmp_path / name), steps=2, measured=8)
    names = {file.name for file in (tmp_path / "one").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in names)


def test_shipped_tokenizer_is_the_one_that_the_script_builds() -> None:
    # Loaded afresh: the module's fixture has been used, and a tokenizer remembers its last padding.
    shipped = AutoTokenizer.from_pretrained(demo.folder(), local_files_only=True)
    assert shipped.backend_tokenizer.to_str() == training.build_tokenizer().backend_tokenizer.to_str()

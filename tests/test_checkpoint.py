"""Saving a model as a checkpoint: what transformers loads from it, and that it is whole or not there."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from overflow_lab.errors import UsageError
from overflow_lab.remedies.checkpoint import check_free, new_folder, save_checkpoint
from overflow_lab.subjects.checkpoint import Source
from overflow_lab.subjects.find import SubjectOptions, find
from overflow_lab.subjects.module import from_module
from overflow_lab.subjects.saving import companions, main_dtype, save_model
from tests.tiny_models import build, save

SHORT = SubjectOptions(max_new_tokens=4, num_beams=2)


def saved(name: str, tmp_path: Path, dtype: torch.dtype | None = None) -> tuple[Any, Path]:
    """Return a model that a folder's subject loads, and the folder where it was saved."""
    subject = find(str(save(name, tmp_path, tokenizer=True)), SHORT)
    model = subject.load(dtype)
    save_checkpoint(model, tmp_path / "saved", subject)
    return model, tmp_path / "saved"


def source(folder: Path, **options: Any) -> Source:
    return Source(str(folder), str(folder), True, SubjectOptions(**options))


@pytest.mark.parametrize("name", ["t5", "llama", "clip", "whisper", "bert-base", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_plain_transformers_loads_what_was_in_memory_bit_by_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, folder = saved(name, tmp_path, dtype)
    loaded = type(model).from_pretrained(folder)
    expected, found = model.state_dict(), loaded.state_dict()
    assert loaded.dtype == dtype
    assert expected.keys() == found.keys()
    for key in expected:
        assert found[key].dtype == expected[key].dtype, key
        assert torch.equal(found[key], expected[key]), key


def test_modules_that_the_class_keeps_in_float32_are_saved_so(tmp_path: Path) -> None:
    _, folder = saved("t5", tmp_path, torch.float16)
    loaded = hf.T5ForConditionalGeneration.from_pretrained(folder)
    assert loaded.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
    assert loaded.encoder.block[0].layer[1].DenseReluDense.wi.weight.dtype == torch.float16


def test_float32_weights_are_saved_in_float32(tmp_path: Path) -> None:
    model, folder = saved("llama", tmp_path)
    loaded = hf.LlamaForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_the_config_names_the_dtype_of_most_weights_and_not_of_the_first(tmp_path: Path) -> None:
    subject = find(str(save("llama", tmp_path, tokenizer=True)), SHORT)
    model: Any = subject.load(torch.float16)
    model.model.embed_tokens.float()
    assert model.dtype == torch.float32
    assert main_dtype(model) == torch.float16
    save_checkpoint(model, tmp_path / "saved", subject)
    assert json.loads((tmp_path / "saved/config.json").read_text())["dtype"] == "float16"


def test_the_configs_inside_a_config_name_the_dtype_too(tmp_path: Path) -> None:
    _, folder = saved("clip", tmp_path, torch.float16)
    raw = json.loads((folder / "config.json").read_text())
    named = {raw["dtype"], *(raw[part]["dtype"] for part in ("text_config", "vision_config"))}
    assert named == {"float16"}


def test_the_tokenizer_is_copied_byte_for_byte(tmp_path: Path) -> None:
    _, folder = saved("llama", tmp_path, torch.float16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "llama" / name).read_bytes()
    assert hf.AutoTokenizer.from_pretrained(folder)("w5 w6").input_ids == [5, 6]


def test_a_generation_config_that_save_pretrained_refuses_is_copied(tmp_path: Path) -> None:
    path = save("llama", tmp_path, tokenizer=True)
    text = json.dumps({"do_sample": False, "temperature": 0.3, "eos_token_id": 2})
    (path / "generation_config.json").write_text(text)
    subject = find(str(path), SHORT)
    model: Any = subject.load(torch.float16)
    model.generation_config.temperature = -1.0
    with pytest.raises(ValueError, match="temperature"):
        model.save_pretrained(tmp_path / "refused")
    save_checkpoint(model, tmp_path / "saved", subject)
    assert (tmp_path / "saved/generation_config.json").read_text() == text
    assert model.generation_config.temperature == -1.0, "the model in memory is as it was"


def test_the_licence_and_templates_travel_and_old_weights_and_cards_do_not(tmp_path: Path) -> None:
    folder = save("llama", tmp_path, tokenizer=True)
    for name in ("LICENSE", "NOTICE.txt", "README.md", "pytorch_model.bin", "old.safetensors", "run.py"):
        (folder / name).write_text(name)
    for name in ("model.safetensors.index.json", "trainer_state.json", "chat_template.jinja", "merges.txt"):
        (folder / name).write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/rag.jinja").write_text("{{ x }}")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text("{}")
    (folder / "checkpoint-500").mkdir()
    (folder / "checkpoint-500/optimizer.pt").write_text("")
    named = {name for name, _ in companions(source(folder))}
    assert named == {
        "LICENSE", "NOTICE.txt", "chat_template.jinja", "merges.txt", "tokenizer.json", "tokenizer_config.json",
        "generation_config.json", "additional_chat_templates/rag.jinja", "1_Pooling/config.json",
    }  # fmt: skip
    assert "run.py" in {name for name, _ in companions(source(folder), code=True)}


def test_the_files_of_a_subfolder_are_those_beside_its_weights(tmp_path: Path) -> None:
    save("llama", tmp_path / "repository", tokenizer=True)
    (tmp_path / "repository/other.json").write_text("{}")
    named = {name for name, _ in companions(source(tmp_path / "repository", subfolder="llama"))}
    assert "tokenizer.json" in named
    assert "other.json" not in named


def test_small_files_of_a_hub_id_come_from_the_cache_when_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--org--tiny/snapshots" / ("0" * 40)
    save("llama", tmp_path, tokenizer=True).rename(tmp_path / "llama-source")
    snapshot.parent.mkdir(parents=True)
    (tmp_path / "llama-source").rename(snapshot)
    (tmp_path / "models--org--tiny/refs").mkdir()
    (tmp_path / "models--org--tiny/refs/main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    hub = Source("org/tiny", "org/tiny", False, SubjectOptions())
    save_model(hub, build("llama"), tmp_path / "saved")
    assert (tmp_path / "saved/tokenizer.json").read_bytes() == (snapshot / "tokenizer.json").read_bytes()


def test_a_model_in_memory_is_no_checkpoint_and_that_is_said_in_one_line(tmp_path: Path) -> None:
    subject = from_module(torch.nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(UsageError, match="no checkpoint of transformers") as caught:
        save_checkpoint(torch.nn.Linear(2, 2), tmp_path / "saved", subject)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "saved").exists()


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    def interrupted() -> None:
        with new_folder(tmp_path / "made") as place:
            (place / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_what_is_replaced_stays_until_the_new_folder_is_whole(tmp_path: Path) -> None:
    old = tmp_path / "made"
    old.mkdir()
    (old / "old").write_text("old")
    with pytest.raises(RuntimeError), new_folder(old, overwrite=True):
        raise RuntimeError
    assert [path.name for path in old.iterdir()] == ["old"]
    with new_folder(old, overwrite=True) as place:
        (place / "new").write_text("new")
        assert (old / "old").exists()
    assert [path.name for path in old.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_an_existing_folder_is_refused_unless_it_is_empty(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="--overwrite"):
        check_free(tmp_path / "full")
    with pytest.raises(UsageError, match="is a file"):
        check_free(tmp_path / "full/file", overwrite=True)
    with new_folder(tmp_path / "empty") as place:
        (place / "file").write_text("x")
    assert (tmp_path / "empty/file").exists()


def test_a_new_folder_may_be_read_by_whom_others_may_be(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    with new_folder(tmp_path / "made"):
        pass
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import warnings
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as hf_logging

from overflow_lab.errors import UsageError
from overflow_lab.subjects import Subject
from overflow_lab.subjects.find import SubjectOptions, find
from overflow_lab.subjects.quiet import quiet_loading
from tests.tiny_models import build, build_tokenizer, save

ALL = [
    "t5", "t5-base", "mt5", "pegasus", "bart", "gpt2", "llama", "gemma3", "mixtral", "mamba", "bert", "bert-base",
    "roberta", "vit", "clip", "whisper", "wav2vec2", "ast",
]  # fmt: skip
ANSWERING = ["t5", "mt5", "pegasus", "bart", "gpt2", "llama", "gemma3", "mixtral", "mamba", "whisper"]
SHORT = SubjectOptions(max_new_tokens=4, num_beams=2)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("a local folder touched the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def complaint(folder: Path, options: SubjectOptions | None = None) -> str:
    """Return the message of the UsageError, which is one line and names the folder."""
    with pytest.raises(UsageError) as caught:
        find(str(folder), options)
    message = str(caught.value)
    assert "\n" not in message
    assert folder.name in message
    assert len(message) < 500
    return message


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def run(subject: Subject, model: Any, count: int = 2) -> Any:
    """Call the model with the first batches as capture does, and ask for answers where it has any."""
    outputs = None
    for batch in itertools.islice(subject.batches, count):
        inputs = dict(batch.inputs)
        with torch.no_grad(), quiet_loading():
            for settings in (subject.generation.strategies if subject.generation else {}).values():
                answer = model.generate(**batch.inputs, **settings)
                assert answer.shape[0] == batch.samples
                if subject.generation is not None and subject.generation.encoder_decoder:
                    inputs["decoder_input_ids"] = answer[:, :2]
            outputs = model(**inputs)
    return outputs


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ALL)
def test_a_real_class_runs_on_its_built_in_inputs(name: str, tmp_path: Path) -> None:
    subject = find(str(save(name, tmp_path)), SHORT)
    model = subject.load(None)
    assert type(model).__name__ == type(build(name)).__name__ == subject.facts["class"]
    assert not model.training
    outputs = run(subject, model)
    first = next(value for value in outputs.values() if isinstance(value, torch.Tensor))
    assert first.isfinite().all()
    assert (subject.generation is not None) == (name in ANSWERING)
    assert len(list(subject.batches)) >= 2


@pytest.mark.parametrize("name", ["t5", "llama", "bert", "vit"])
def test_the_weights_are_those_that_were_saved(name: str, tmp_path: Path) -> None:
    saved = build(name).state_dict()
    subject = find(str(save(name, tmp_path)))
    for dtype in (None, torch.float16, torch.bfloat16):
        loaded = subject.load(dtype).state_dict()
        for key, weight in saved.items():
            assert torch.equal(loaded[key], weight.to(loaded[key].dtype))
    assert subject.load(None) is not subject.load(None)


@pytest.mark.parametrize("name", ["t5", "mt5", "bart", "gpt2", "llama", "gemma3", "mixtral", "mamba", "bert", "vit"])
def test_loader_casts_says_whether_the_loader_and_to_differ(name: str, tmp_path: Path) -> None:
    subject = find(str(save(name, tmp_path)))
    by_loader, by_to = subject.load(torch.float16), subject.load(None).to(torch.float16)
    theirs = {**dict(by_to.named_parameters()), **dict(by_to.named_buffers())}
    ours = {**dict(by_loader.named_parameters()), **dict(by_loader.named_buffers())}
    differ = any(ours[key].dtype != theirs[key].dtype or not torch.equal(ours[key], theirs[key]) for key in ours)
    assert subject.loader_casts == differ


def test_the_loader_keeps_wo_of_a_t5_in_float32(tmp_path: Path) -> None:
    subject = find(str(save("t5", tmp_path)))
    kept = {n.split(".")[-2] for n, p in subject.load(torch.float16).named_parameters() if p.dtype == torch.float32}
    assert kept == {"wo"}
    assert "keeps wo in float32" in subject.facts["loader"]


def test_a_missing_head_is_noted_and_the_same_in_every_load(tmp_path: Path) -> None:
    folder = save("bert-base", tmp_path)
    edit_config(folder, architectures=["BertForSequenceClassification"])
    subject = find(str(folder))
    note = next(note for note in subject.notes if "not in the checkpoint" in note)
    assert note.startswith("2 weights")
    assert "classifier.weight" in note
    heads = [subject.load(dtype).state_dict()["classifier.weight"] for dtype in (None, None, torch.float16)]
    assert torch.equal(heads[0], heads[1])
    assert torch.equal(heads[2], heads[0].half())
    assert torch.equal(find(str(folder)).load(None).state_dict()["classifier.weight"], heads[0])


def test_weights_that_are_not_used_are_noted(tmp_path: Path) -> None:
    folder = save("bert", tmp_path)
    edit_config(folder, architectures=["BertModel"])
    assert any("not used by this class" in note for note in find(str(folder)).notes)


def test_a_class_that_transformers_lacks_is_loaded_without_a_head_and_noted(tmp_path: Path) -> None:
    folder = save("bert", tmp_path)
    edit_config(folder, architectures=["BertForPoetry"])
    subject = find(str(folder))
    assert subject.facts["class"] == "BertModel"
    assert any("BertForPoetry" in note for note in subject.notes)


def test_an_old_class_name_is_loaded_by_what_its_ending_says(tmp_path: Path) -> None:
    folder = save("t5", tmp_path)
    edit_config(folder, architectures=["T5WithLMHeadModel"])
    assert find(str(folder)).facts["class"] == "T5ForConditionalGeneration"


def test_a_task_overrules_the_config(tmp_path: Path) -> None:
    subject = find(str(save("bert", tmp_path)), SubjectOptions(task="token-classification"))
    assert subject.facts["class"] == "BertForTokenClassification"


def test_a_truncated_checkpoint_is_called_damaged(tmp_path: Path) -> None:
    folder = save("bert", tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "damaged" in complaint(folder)
    weights.write_bytes(weights.read_bytes()[:20])
    assert "damaged" in complaint(folder)
    weights.write_bytes(b"")
    assert "damaged" in complaint(folder)


def test_wrong_shapes_are_named_with_both_shapes(tmp_path: Path) -> None:
    folder = save("bert", tmp_path)
    edit_config(folder, intermediate_size=48)
    message = complaint(folder)
    assert "(64, 32)" in message
    assert "(48, 32)" in message


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = save("bert", tmp_path)
    save_file({"nothing": torch.zeros(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert "none of the weights" in complaint(folder)


def test_a_folder_without_config_or_weights_is_told_so(tmp_path: Path) -> None:
    folder = save("bert", tmp_path)
    (folder / "model.safetensors").unlink()
    assert "no model.safetensors" in complaint(folder)
    (folder / "config.json").unlink()
    assert "no config.json" in complaint(folder)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "not readable"),
        ("[1, 2]", "not an object"),
        ("{}", "no model_type"),
        ('{"model_type": "nobody-knows"}', "nobody-knows"),
        ('{"model_type": ["bert"]}', "bert"),
        ('{"model_type": "bert", "architectures": "BertModel", "hidden_size": "large"}', "cannot be loaded"),
        ('{"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}', "--trust-remote-code"),
        ("\udcff", "not readable"),
    ],
)
def test_a_broken_config_is_one_line(text: str, part: str, tmp_path: Path) -> None:
    folder = save("bert", tmp_path)
    (folder / "config.json").write_text(text, errors="surrogateescape")
    assert part in complaint(folder)


def test_a_pickle_is_loaded_only_when_allowed(tmp_path: Path) -> None:
    folder = save("bert", tmp_path)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert "--allow-pickle" in complaint(folder)
    loaded = find(str(folder), SubjectOptions(allow_pickle=True)).load(None).state_dict()
    assert all(torch.equal(loaded[key], weight) for key, weight in weights.items())


def test_a_pickle_that_is_no_checkpoint_is_one_line_and_runs_nothing(tmp_path: Path) -> None:
    folder = save("bert", tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    complaint(folder, SubjectOptions(allow_pickle=True))
    assert not (tmp_path / "ran").exists()


def test_no_tokenizer_gives_random_ids_and_a_note(tmp_path: Path) -> None:
    subject = find(str(save("llama", tmp_path)))
    assert subject.facts["inputs_source"] == "random token ids"
    assert any("no tokenizer" in note for note in subject.notes)
    assert subject.generation is not None
    assert subject.generation.decode is None


def test_texts_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tokenizer"):
        find(str(save("llama", tmp_path)), SubjectOptions(texts=("hello",)))


def test_a_broken_tokenizer_is_a_note_or_an_error_if_texts_were_given(tmp_path: Path) -> None:
    folder = save("llama", tmp_path, tokenizer=True)
    (folder / "tokenizer.json").write_text("{")
    assert any("the tokenizer of" in note for note in find(str(folder)).notes)
    assert "tokenizer" in complaint(folder, SubjectOptions(texts=("hello",)))


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = save("llama", tmp_path)
    build_tokenizer(size=200).save_pretrained(folder)
    with pytest.raises(UsageError, match="token id 150, the model has 100"):
        find(str(folder), SubjectOptions(texts=("w150",)))


def test_the_answer_is_decoded_without_special_tokens(tmp_path: Path) -> None:
    generation = find(str(save("t5", tmp_path, tokenizer=True))).generation
    assert generation is not None
    assert generation.decode is not None
    assert generation.decode([0, 5, 6, 2]) == "w5 w6"
    assert generation.encoder_decoder


def test_generation_says_how_to_search_and_where_answers_end(tmp_path: Path) -> None:
    options = SubjectOptions(num_beams=3, max_new_tokens=5)
    generation = find(str(save("llama", tmp_path)), options).generation
    assert generation is not None
    assert generation.strategies["greedy"] == {
        "num_beams": 1,
        "do_sample": False,
        "max_new_tokens": 5,
        "pad_token_id": 0,
    }
    assert generation.strategies["beam"]["num_beams"] == 3
    assert (generation.ends, generation.padding, generation.encoder_decoder) == ((2,), 0, False)


def test_the_end_pads_where_a_model_has_no_padding(tmp_path: Path) -> None:
    folder = save("gpt2", tmp_path)
    build_tokenizer(padding=False).save_pretrained(folder)
    before = (folder / "config.json").read_bytes()
    subject = find(str(folder))
    assert subject.generation is not None
    assert subject.generation.padding == 1
    assert any((batch.inputs["attention_mask"] == 0).any() for batch in subject.batches)
    assert (folder / "config.json").read_bytes() == before


def test_without_generate_nothing_is_asked_and_the_decoder_gets_ids(tmp_path: Path) -> None:
    subject = find(str(save("t5", tmp_path)), SubjectOptions(generate=False))
    assert subject.generation is None
    batch = next(iter(subject.batches))
    assert batch.inputs["decoder_input_ids"].shape == (4, 7)
    assert (batch.inputs["decoder_input_ids"][:, 0] == 0).all()
    run(subject, subject.load(None))


def test_the_attention_that_was_asked_for_is_used(tmp_path: Path) -> None:
    folder = save("llama", tmp_path)
    subject = find(str(folder), SubjectOptions(attn_implementation="eager"))
    assert subject.facts["attn_implementation"] == "eager"
    complaint(folder, SubjectOptions(attn_implementation="no-such-attention"))


def test_a_subfolder_is_loaded(tmp_path: Path) -> None:
    save("bert", tmp_path / "outer")
    assert find(str(tmp_path / "outer"), SubjectOptions(subfolder="bert")).facts["class"] == "BertForMaskedLM"
    assert "'nowhere'" in complaint(tmp_path / "outer", SubjectOptions(subfolder="nowhere"))


def test_facts_and_notes_hold_no_absolute_path(tmp_path: Path) -> None:
    subject = find(str(save("t5", tmp_path, tokenizer=True)))
    assert str(tmp_path) not in json.dumps([dict(subject.facts), subject.notes, subject.name])
    expected = sum(p.numel() for p in build("t5").parameters())
    assert subject.facts["parameters"] == expected
    assert (subject.facts["task"], subject.facts["model_type"], subject.facts["dtype"]) == (
        "seq2seq-lm",
        "t5",
        "float32",
    )


def test_the_dtype_in_the_facts_is_the_one_stored(tmp_path: Path) -> None:
    build("llama").to(torch.bfloat16).save_pretrained(tmp_path / "llama")
    subject = find(str(tmp_path / "llama"))
    assert subject.facts["dtype"] == "bfloat16"
    assert {p.dtype for p in subject.load(None).parameters()} == {torch.float32}


def test_loading_leaves_settings_seed_and_warnings_as_they_were(tmp_path: Path) -> None:
    folder = save("bert-base", tmp_path)
    edit_config(folder, architectures=["BertForSequenceClassification"])  # so that weights are drawn
    hf_logging.set_verbosity(logging.INFO)
    hf_logging.enable_progress_bar()
    torch.manual_seed(3)

    def state() -> tuple[Any, ...]:
        bars = huggingface_hub.utils.are_progress_bars_disabled()
        hub = huggingface_hub.logging.get_verbosity()
        return (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled(), bars, hub, list(warnings.filters),
                torch.get_default_dtype(), dict(os.environ), torch.get_rng_state().tolist())  # fmt: skip

    try:
        before = state()
        list(find(str(folder)).batches)
        assert state() == before
        (folder / "model.safetensors").write_bytes(b"")
        complaint(folder)
        assert state() == before
    finally:
        hf_logging.set_verbosity(logging.WARNING)


def test_loading_writes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = save("bert-base", tmp_path)
    edit_config(folder, architectures=["BertForSequenceClassification"])
    capfd.readouterr()
    find(str(folder)).load(torch.float16)
    assert tuple(capfd.readouterr()) == ("", "")

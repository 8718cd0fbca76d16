from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import ViTImageProcessorPil, WhisperFeatureExtractor

from overflow_lab.errors import UsageError
from overflow_lab.subjects.encoders import Ids, random_ids
from overflow_lab.subjects.find import SubjectOptions, find
from overflow_lab.subjects.media import pictures, sounds, spectrum
from overflow_lab.subjects.texts import PLAIN, T5_STYLE, built_in
from tests.tiny_models import SPECIAL, VOCABULARY, save


def test_built_in_texts_are_a_dozen_of_many_lengths() -> None:
    for texts in (PLAIN, T5_STYLE):
        assert len(set(texts)) == 12
        assert min(len(text) for text in texts) < 20
        assert max(len(text) for text in texts) > 900
    assert built_in("mt5") is T5_STYLE
    assert built_in("llama") is PLAIN


def test_random_ids_are_in_range_avoid_special_ones_and_repeat() -> None:
    first, again = (random_ids(50, frozenset({0, 1, 49}), 30) for _ in range(2))
    assert first == again
    assert {i for row in first for i in row} <= set(range(2, 49))
    assert max(len(row) for row in first) == 30
    assert random_ids(2, frozenset({0, 1}), 4)  # all are special: better those than none


def test_no_vocabulary_is_told() -> None:
    with pytest.raises(UsageError, match="vocab_size"):
        random_ids(0, frozenset(), 4)


@pytest.mark.parametrize("left", [True, False])
def test_ids_are_padded_to_the_longest(left: bool) -> None:
    batch = Ids(9, left=left)([[1, 2, 3], [4]])
    assert batch.inputs["input_ids"].tolist() == [[1, 2, 3], [9, 9, 4] if left else [4, 9, 9]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1] if left else [1, 0, 0]]
    assert (batch.samples, batch.tokens) == (2, 4)


def test_default_batches_are_short_padded_and_long(tmp_path: Path) -> None:
    masks = [batch.inputs["attention_mask"] for batch in find(str(save("llama", tmp_path))).batches]
    widths = [mask.shape[1] for mask in masks]
    assert len(masks) == 3
    assert widths[0] < 10 < 50 < widths[2]
    assert (masks[1] == 0).float().mean() > 0.5


@pytest.mark.parametrize(("name", "left"), [("llama", True), ("t5", False), ("bert", False)])
def test_only_models_that_go_on_writing_pad_on_the_left(name: str, left: bool, tmp_path: Path) -> None:
    for tokenizer in (False, True):
        subject = find(str(save(name, tmp_path / str(tokenizer), tokenizer=tokenizer)))
        padded = [b.inputs["attention_mask"] for b in subject.batches if (b.inputs["attention_mask"] == 0).any()]
        assert padded
        assert all((mask[:, -1 if left else 0] == 1).all() for mask in padded)


def test_texts_are_cut_where_the_positions_end_with_room_for_the_answer(tmp_path: Path) -> None:
    folder = str(save("gpt2", tmp_path, tokenizer=True))  # 64 positions
    options = SubjectOptions(max_new_tokens=10)
    assert max(b.inputs["input_ids"].shape[1] for b in find(folder, options).batches) == 54
    options = SubjectOptions(generate=False)
    assert max(b.inputs["input_ids"].shape[1] for b in find(folder, options).batches) == 64
    options = SubjectOptions(max_length=20)
    assert max(b.inputs["input_ids"].shape[1] for b in find(folder, options).batches) == 20


def test_roberta_positions_start_behind_the_padding_index(tmp_path: Path) -> None:
    subject = find(str(save("roberta", tmp_path)))  # 34 positions, of which two are not usable
    assert max(batch.inputs["input_ids"].shape[1] for batch in subject.batches) == 32


def test_given_texts_replace_the_built_in_ones(tmp_path: Path) -> None:
    folder = str(save("bert", tmp_path, tokenizer=True))
    subject = find(folder, SubjectOptions(texts=("w5 w6", "w7", "w8 w9 w10"), batch_size=2))
    batches = list(subject.batches)
    assert subject.facts["inputs_source"] == "--text"
    assert [batch.texts for batch in batches] == [("w5 w6", "w7"), ("w8 w9 w10",)]
    assert batches[0].inputs["input_ids"].tolist() == [[5, 6], [7, 0]]
    assert [batch.tokens for batch in batches] == [3, 3]


def test_a_text_without_any_token_is_told(tmp_path: Path) -> None:
    folder = str(save("bert", tmp_path, tokenizer=True))
    with pytest.raises(UsageError, match="no token"):
        find(folder, SubjectOptions(texts=("\u00a0", "w5"), batch_size=1))


def test_the_inputs_do_not_change_the_global_seed(tmp_path: Path) -> None:
    folder = str(save("clip", tmp_path))
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    list(find(folder).batches)
    assert torch.equal(torch.rand(3), expected)


def test_what_a_model_writes_into_its_inputs_is_gone_in_the_next_run(tmp_path: Path) -> None:
    subject = find(str(save("bert", tmp_path)))
    first = next(iter(subject.batches)).inputs["input_ids"]
    expected = first.clone()
    first.zero_()
    assert torch.equal(next(iter(subject.batches)).inputs["input_ids"], expected)


def test_clip_gets_texts_and_pictures(tmp_path: Path) -> None:
    subject = find(str(save("clip", tmp_path, tokenizer=True)), SubjectOptions(texts=("w5", "w6")))
    batch = next(iter(subject.batches))
    assert batch.inputs["pixel_values"].shape == (2, 3, 32, 32)
    assert batch.inputs["input_ids"].tolist() == [[5], [6]]
    assert find(str(tmp_path / "clip")).facts["inputs_source"] == "built-in texts and built-in pictures"


def test_pictures_have_the_range_of_pictures_and_two_are_black_and_white() -> None:
    found = list(pictures((20, 30)))
    assert {(p.shape, p.dtype) for p in found} == {((20, 30, 3), np.dtype("uint8"))}
    assert sum(p.max() == 0 for p in found) == 1
    assert sum(p.min() == 255 for p in found) == 1
    assert all(np.array_equal(a, b) for a, b in zip(found, pictures((20, 30)), strict=True))


def test_pictures_go_through_the_image_processor(tmp_path: Path) -> None:
    folder = save("vit", tmp_path)
    processor = ViTImageProcessorPil(size={"height": 32, "width": 32}, image_mean=[0.0] * 3, image_std=[0.5] * 3)
    processor.save_pretrained(folder)
    subject = find(str(folder))
    values = torch.cat([batch.inputs["pixel_values"] for batch in subject.batches])
    assert values.shape == (8, 3, 32, 32)
    assert (values.min().item(), values.max().item()) == (0.0, 2.0)  # white is (1 - 0) / 0.5
    assert "ViTImageProcessor" in subject.facts["processor"]


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save("vit", tmp_path)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    find_spec = __import__("importlib.util").util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "PIL" else find_spec(name, *rest)
    )
    with pytest.raises(UsageError, match=r"overflow-lab\[images\]"):
        find(str(folder))


def test_pictures_without_a_processor_lie_between_minus_one_and_one(tmp_path: Path) -> None:
    subject = find(str(save("vit", tmp_path)))
    values = torch.cat([batch.inputs["pixel_values"] for batch in subject.batches])
    assert (values.min().item(), values.max().item()) == (-1.0, 1.0)
    assert any("no processor for image" in note for note in subject.notes)


def test_sounds_are_short_and_long_and_one_is_silent() -> None:
    found = list(sounds(16_000))
    lengths = [len(sound) / 16_000 for sound in found]
    assert min(lengths) < 0.5 < 1.9 < max(lengths)
    assert sum(not sound.any() for sound in found) == 1
    assert all(np.abs(sound).max() <= 1 for sound in found)


def test_the_spectrum_of_a_tone_peaks_where_the_tone_is() -> None:
    time = torch.arange(16_000) / 16_000
    low, high = (spectrum(torch.sin(2 * torch.pi * pitch * time), 40, 50) for pitch in (500.0, 6_000.0))
    assert low.shape == (40, 50)
    assert low.mean(1).argmax() == 2  # 8 kHz in 40 bins: 200 Hz each
    assert high.mean(1).argmax() in (29, 30)
    assert spectrum(torch.zeros(100), 8, 20).isfinite().all()


def test_sounds_go_through_the_feature_extractor(tmp_path: Path) -> None:
    folder = save("whisper", tmp_path)
    WhisperFeatureExtractor(feature_size=16, chunk_length=1, hop_length=160).save_pretrained(folder)
    subject = find(str(folder))
    assert {batch.inputs["input_features"].shape[1:] for batch in subject.batches} == {(16, 100)}
    assert subject.facts["processor"] == "WhisperFeatureExtractor"


def test_waveforms_without_an_extractor_are_padded_and_of_unit_variance(tmp_path: Path) -> None:
    batch = next(iter(find(str(save("wav2vec2", tmp_path))).batches))
    values, mask = batch.inputs["input_values"], batch.inputs["attention_mask"]
    assert (values[mask == 0] == 0).all()
    assert values[0][mask[0] == 1].std().item() == pytest.approx(1.0, abs=1e-3)


def test_text_for_a_model_of_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="takes no text"):
        find(str(save("vit", tmp_path)), SubjectOptions(texts=("hello",)))


def test_special_ids_are_never_drawn(tmp_path: Path) -> None:
    for batch in find(str(save("llama", tmp_path))).batches:
        ids = batch.inputs["input_ids"][batch.inputs["attention_mask"] == 1]
        assert not set(ids.tolist()) & set(SPECIAL.values())
        assert ids.max() < VOCABULARY


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    real = builtins.__import__

    def hide(name: str) -> None:
        def fake(module: str, *rest: Any, **more: Any) -> Any:
            if module.split(".")[0] == name:
                raise ImportError(name)
            return real(module, *rest, **more)

        monkeypatch.setattr(builtins, "__import__", fake)

    return hide


def test_a_picture_file_without_pillow_names_the_extra(tmp_path: Path, without: Any) -> None:
    folder = save("vit", tmp_path)
    (tmp_path / "list.txt").write_text("a.png\n")
    (tmp_path / "a.png").write_bytes(b"x")
    without("PIL")
    with pytest.raises(UsageError, match=r"overflow-lab\[images\]"):
        find(str(folder), SubjectOptions(inputs_file=str(tmp_path / "list.txt")))

"""Another precision is proposed where the model is ok in it, and only there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overflow_lab.recording import PrecisionRow
from overflow_lab.remedies import other_precision
from overflow_lab.remedies.other_precision import code, has_bfloat16, propose
from overflow_lab.remedies.remedy import Remedy
from overflow_lab.scan import Scan, scan_subject
from overflow_lab.subjects import Subject
from overflow_lab.subjects.find import SubjectOptions, find
from overflow_lab.subjects.module import from_module
from tests.tiny_models import save


class Loud(nn.Module):
    """A linear layer whose output of 2e5 does not fit float16, cast or by autocast, and a norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.layer.bias.data[0] = 2e5

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.layer(x))


class Fine(nn.Module):
    """Counts to 1,000 and looks at the last digit: float16 has all these numbers, bfloat16 has not."""

    def forward(self, x: torch.Tensor) -> Any:
        return torch.cat([x, x + 1], -1) % 10


def loud(precisions: tuple[str, ...] = ("float16",)) -> tuple[Subject, Scan]:
    torch.manual_seed(0)
    subject = from_module(Loud(), torch.randn(3, 4))
    return subject, scan_subject(subject, precisions)


def names(made: tuple[Remedy, ...]) -> list[str]:
    return [remedy.runs_in for remedy in made]


def test_an_overflow_in_float16_is_mended_by_bfloat16_with_and_without_autocast() -> None:
    subject, found = loud()
    made = propose(subject, found, "float16").remedies
    assert names(made) == ["bfloat16", "bfloat16-autocast"]
    assert all(remedy.kind == "precision" and remedy.precision == "float16" for remedy in made)
    assert made[0].mend(subject) is subject
    for remedy in made:
        again = scan_subject(remedy.mend(subject), [remedy.runs_in]).verdicts[remedy.runs_in]
        assert again.verdict == "ok", remedy.title


def test_what_is_wrong_with_the_others_is_said_beside() -> None:
    subject, found = loud()
    (first, _) = propose(subject, found, "float16").remedies
    assert "float16-autocast is not ok: overflow at `layer`" in first.notes


def test_a_step_that_bfloat16_cannot_count_is_mended_by_float16() -> None:
    subject = from_module(Fine(), torch.arange(990.0, 1000.0)[None])
    found = scan_subject(subject, ["bfloat16"])
    assert found.verdicts["bfloat16"].verdict == "precision"
    assert names(propose(subject, found, "bfloat16").remedies)[0] == "float16"


def test_a_precision_that_is_ok_needs_no_other() -> None:
    subject, found = loud(("bfloat16",))
    assert propose(subject, found, "bfloat16").remedies == ()
    assert propose(subject, found, "float16").remedies == ()


def test_only_what_was_not_scanned_is_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, found = loud(("float16", "bfloat16", "float16-autocast"))
    asked = []

    def watched(subject: Subject, precisions: list[str], **more: Any) -> Scan:
        asked.extend(precisions)
        return scan_subject(subject, precisions, **more)

    monkeypatch.setattr(other_precision, "scan_subject", watched)
    assert names(propose(subject, found, "float16").remedies) == ["bfloat16", "bfloat16-autocast"]
    assert asked == ["bfloat16-autocast"]


def test_the_narrow_range_of_float16_is_said() -> None:
    subject = from_module(Fine(), torch.arange(990.0, 1000.0)[None])
    made = propose(subject, scan_subject(subject, ["bfloat16"]), "bfloat16").remedies
    assert any("float16 ends at 65,504" in note for note in made[0].notes)
    assert all(remedy.runs == 3 for remedy in made)


def test_without_runs_left_only_what_was_found_is_proposed() -> None:
    subject, found = loud(("float16", "bfloat16"))
    assert names(propose(subject, found, "float16", runs=0).remedies) == ["bfloat16"]


def test_the_hardware_that_bfloat16_asks_for_is_said_and_so_is_the_memory_of_autocast() -> None:
    subject, found = loud()
    cast, autocast = propose(subject, found, "float16").remedies
    assert any("compute capability 8.0" in note for note in cast.notes)
    assert any("twice the memory" in note for note in autocast.notes)
    assert not any("twice the memory" in note for note in cast.notes)


def test_a_gpu_without_bfloat16_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def supported(*, including_emulation: bool) -> bool:
        asked.append(including_emulation)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert not has_bfloat16("cuda:1")
    assert asked == [False], "emulated arithmetic is not what is asked for"
    assert has_bfloat16("cpu")
    assert other_precision._costs("bfloat16", "cuda")[0] == "this device (cuda) has no bfloat16 arithmetic"


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_the_lines_to_paste_run_a_module_in_that_precision(name: str) -> None:
    subject, _ = loud()
    scope: dict[str, Any] = {"torch": torch, "model": Loud()}
    exec(code(subject, name, "cpu"), scope)
    assert scope["model"].layer.weight.dtype == getattr(torch, name)


def test_the_lines_to_paste_run_a_module_under_autocast() -> None:
    subject, _ = loud()
    seen: list[torch.dtype] = []

    class Watched(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            made = super().forward(input)
            seen.append(made.dtype)
            return made

    scope: dict[str, Any] = {"torch": torch, "model": Watched(2, 2), "inputs": {"input": torch.ones(1, 2)}}
    exec(code(subject, "bfloat16-autocast", "cpu"), scope)
    assert seen == [torch.bfloat16]
    assert scope["model"].weight.dtype == torch.float32


def test_the_lines_to_paste_load_a_checkpoint_as_its_loader_casts_it(tmp_path: Path) -> None:
    import transformers

    folder = save("t5", tmp_path, tokenizer=True)
    subject = find(str(folder), SubjectOptions(max_new_tokens=2))
    text = code(subject, "float16", "cpu")
    assert text == 'model = T5ForConditionalGeneration.from_pretrained("FOLDER", dtype=torch.float16)\n'
    scope: dict[str, Any] = {"torch": torch, **vars(transformers), "FOLDER": str(folder)}
    scope["T5ForConditionalGeneration"] = transformers.T5ForConditionalGeneration
    exec(text.replace('"FOLDER"', "FOLDER"), scope)
    assert scope["model"].dtype == torch.float16
    named = dataclasses.replace(subject, kind="hub", name="org/tiny")
    assert 'from_pretrained("org/tiny", dtype=torch.bfloat16)' in code(named, "bfloat16", "cpu")
    assert code(subject, "float16-to", "cpu") == "model = model.to(torch.float16)\n"


def test_what_the_loader_keeps_in_float32_makes_it_another_precision_than_to(tmp_path: Path) -> None:
    subject = find(str(save("t5", tmp_path, tokenizer=True)), SubjectOptions(max_new_tokens=2, num_beams=2))
    found = scan_subject(subject, ["float16"])
    kept = {row.precision: bool(row.kept) for row in found.recording.of(PrecisionRow)}
    assert kept["float16"]
    assert not kept["float16-to"]
    broken = dataclasses.replace(found.verdicts["float16-to"], verdict="overflow", severity="error")
    verdicts = {**found.verdicts, "float16-to": broken}
    diagnosis = dataclasses.replace(found.diagnosis, verdicts=verdicts)
    made = propose(subject, dataclasses.replace(found, diagnosis=diagnosis), "float16-to", runs=0).remedies
    assert names(made) == ["float16"]

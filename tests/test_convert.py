"""The converter: what it writes, what it says of it, and what it refuses."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from overflow_lab.errors import OverflowLabError, UsageError
from overflow_lab.recording import load
from overflow_lab.remedies.convert import Conversion, convert
from overflow_lab.remedies.remedy import Found
from overflow_lab.subjects import saving
from overflow_lab.subjects.demo import ANSWERS, PROMPTS
from tests.tiny_models import save

SHORT: dict[str, Any] = {"max_new_tokens": 4, "num_beams": 2}


def dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor in a folder's file, read without torch modules."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118


def digest(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.is_file()}


def with_weight(folder: Path, name: str, row: int, value: float) -> Path:
    """Set a row of a saved weight."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights[name][row] = value
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", ["t5", "llama", "gemma3", "clip", "whisper", "vit", "mamba", "bert"])
@pytest.mark.parametrize("to", ["fp16", "bfloat16"])
def test_plain_transformers_loads_the_folder_in_that_dtype(name: str, to: str, tmp_path: Path) -> None:
    source = save(name, tmp_path, tokenizer=True)
    before = digest(source)
    done = convert(source, to, tmp_path / "out", **SHORT)
    assert done.folder == tmp_path / "out"
    assert not done.refused
    asked = {"fp16": torch.float16, "bfloat16": torch.bfloat16}[to]
    config = json.loads((tmp_path / "out/config.json").read_text())
    loaded: Any = getattr(hf, config["architectures"][0]).from_pretrained(tmp_path / "out")
    assert {p.dtype for p in loaded.parameters()} <= {asked, torch.float32}
    assert done.verdict.precision == str(asked).removeprefix("torch.")
    assert digest(source) == before, "the source is read and never written"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "out"])


def test_what_was_written_is_compared_with_the_cast_in_memory(tmp_path: Path) -> None:
    done = convert(save("llama", tmp_path, tokenizer=True), "fp16", tmp_path / "out", **SHORT)
    assert done.same is not None
    model = hf.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert done.same.tensors == len(list(model.named_parameters())) + len(list(model.named_buffers()))
    assert done.same.inputs == 8
    assert done.same.answers == 16, "greedy and by beams"
    assert not done.same.failed


def test_modules_that_the_class_keeps_stay_in_float32_and_are_named(tmp_path: Path) -> None:
    done = convert(save("t5", tmp_path, tokenizer=True), "fp16", tmp_path / "out", **SHORT)
    wide = {name.removesuffix(".weight") for name, dtype in dtypes(tmp_path / "out").items() if dtype == torch.float32}
    assert wide == set(done.kept)
    assert all(name.endswith(".wo") for name in wide)
    assert len(wide) == 4
    again = convert(tmp_path / "t5", "bf16", tmp_path / "out2", **SHORT)
    assert again.kept == ()
    assert set(dtypes(tmp_path / "out2").values()) == {torch.bfloat16}


def test_what_breaks_is_refused_in_one_line_that_names_the_origin(tmp_path: Path) -> None:
    done = convert("demo", "fp16", tmp_path / "out", texts=("seven", "forty-two"))
    assert done.folder is None
    assert "`encoder.block.2.layer.0.SelfAttention.o`" in done.refused
    assert "452,107" in done.refused or "does not fit" in done.refused
    assert "--force" in done.refused
    assert "\n" not in done.refused
    assert list(tmp_path.iterdir()) == []


def test_what_breaks_is_written_on_request(tmp_path: Path) -> None:
    done = convert("demo", "fp16", tmp_path / "out", texts=("seven", "forty-two"), force=True)
    assert done.folder == tmp_path / "out"
    assert done.verdict.severity == "error"
    assert done.same is not None
    assert done.same.tensors > 0


def test_a_precision_that_it_can_run_in_is_converted_to(tmp_path: Path) -> None:
    done = convert("demo", "bf16", tmp_path / "out", texts=("seven", "forty-two"))
    loaded = hf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "out")
    made = loaded.generate(**tokenizer(["forty-two"], return_tensors="pt"), max_new_tokens=8)
    assert tokenizer.batch_decode(made, skip_special_tokens=True) == ["42"]
    assert done.verdict.verdict == "ok"


def test_weights_that_the_cast_turns_into_infinities_zeros_and_subnormals_are_counted(tmp_path: Path) -> None:
    # No input has token 99: the output is right, the weights are lost all the same.
    source = with_weight(save("llama", tmp_path, tokenizer=True), "model.embed_tokens.weight", 99, 1e6)
    with_weight(source, "model.embed_tokens.weight", 98, 1e-9)
    with_weight(source, "model.layers.0.mlp.up_proj.weight", 3, 1e-6)
    done = convert(source, "fp16", tmp_path / "out", texts=("w5 w6", "w7 w8"), force=True, **SHORT)
    first, *others = done.lost
    assert (first.name, first.to_infinity, first.to_zero) == ("model.embed_tokens.weight", 32, 32)
    assert first.absmax == 1e6
    second = next(row for row in others if row.name == "model.layers.0.mlp.up_proj.weight")
    assert (second.to_infinity, second.to_zero) == (0, 0)
    assert second.to_subnormal >= 32


def test_a_weight_that_becomes_infinite_is_refused_though_no_input_of_the_scan_uses_it(tmp_path: Path) -> None:
    source = with_weight(save("llama", tmp_path, tokenizer=True), "model.embed_tokens.weight", 99, 1e6)
    done = convert(source, "fp16", tmp_path / "out", texts=("w5 w6",), **SHORT)
    assert done.verdict.verdict == "ok"
    assert "32 of 3,200 elements of `model.embed_tokens.weight` into infinities" in done.refused
    assert not (tmp_path / "out").exists()


def clamped_by_its_class(folder: Path) -> Path:
    """Save a Pegasus whose first layer leaves float16's range, where its class clamps: a right output, a warning."""
    source = save("pegasus", folder, tokenizer=True)
    with_weight(source, "model.encoder.layers.0.fc1.bias", 0, 80.0)
    path = source / "model.safetensors"
    weights = load_file(path)
    weights["model.encoder.layers.0.fc2.weight"][11, 0] = 1200.0
    save_file(weights, path, metadata={"format": "pt"})
    return source


@pytest.mark.parametrize(("fail_on", "written"), [("warning", False), ("error", True), ("never", True)])
def test_the_severity_that_is_refused_can_be_chosen(fail_on: str, written: bool, tmp_path: Path) -> None:
    source = clamped_by_its_class(tmp_path)
    done = convert(source, "fp16", tmp_path / "out", fail_on=fail_on, **SHORT)
    assert done.verdict.severity == "warning"
    assert (tmp_path / "out").exists() == written == (not done.refused)
    assert written or "is risky in float16: `model.encoder.layers.0" in done.refused


@pytest.mark.parametrize("where", ["llama", "llama/inside", "."])
def test_the_source_folder_is_never_written_to(where: str, tmp_path: Path) -> None:
    source = save("llama", tmp_path, tokenizer=True)
    with pytest.raises(UsageError, match="model's own folder"):
        convert(source, "fp16", tmp_path / where, overwrite=True)
    assert "inside" not in digest(source)


def test_an_existing_folder_is_replaced_on_request_alone(tmp_path: Path) -> None:
    source = save("bert", tmp_path, tokenizer=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    with pytest.raises(UsageError, match="--overwrite"):
        convert(source, "fp16", tmp_path / "out")
    assert (tmp_path / "out/mine").read_text() == "mine"
    convert(source, "fp16", tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out/mine").exists()
    assert (tmp_path / "out/model.safetensors").exists()


def test_a_write_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save("bert", tmp_path, tokenizer=True)

    def interrupted(path: Path, dtype: torch.dtype) -> None:
        assert path.exists(), "half of it was written"
        raise KeyboardInterrupt

    monkeypatch.setattr(saving, "_write_dtype", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, "fp16", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]


@pytest.mark.parametrize(("row", "message"), [(5, "model.embed_tokens.weight is another"), (None, "cannot be loaded")])
def test_a_file_that_does_not_load_as_the_same_is_not_kept(
    row: int | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save("llama", tmp_path, tokenizer=True)

    def damaged(path: Path, dtype: torch.dtype) -> None:
        if row is None:
            (path.parent / "model.safetensors").write_bytes(b"cut")
        else:
            with_weight(path.parent, "model.embed_tokens.weight", row, 1.0)

    monkeypatch.setattr(saving, "_write_dtype", damaged)
    with pytest.raises(OverflowLabError, match=message):
        convert(source, "fp16", tmp_path / "out", **SHORT)
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_a_model_that_differs_from_run_to_run_is_compared_by_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save("bert", tmp_path, tokenizer=True)
    head = hf.models.bert.modeling_bert.BertOnlyMLMHead
    plain, runs = head.forward, iter(range(1000))

    def drifting(self: Any, states: torch.Tensor) -> Any:
        return plain(self, states) + next(runs) / 1024

    monkeypatch.setattr(head, "forward", drifting)
    done = convert(source, "fp16", tmp_path / "out", force=True)
    assert done.same is not None
    assert "differs from run to run" in done.same.failed
    assert (done.same.inputs, done.same.tensors > 0) == (0, True)


def test_a_file_that_loads_the_same_and_runs_otherwise_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save("bert", tmp_path, tokenizer=True)

    def another_eps(path: Path, dtype: torch.dtype) -> None:
        raw = json.loads(path.read_text())
        path.write_text(json.dumps({**raw, "layer_norm_eps": 0.5}))

    monkeypatch.setattr(saving, "_write_dtype", another_eps)
    with pytest.raises(OverflowLabError, match=r"gives another output\['logits'\]"):
        convert(source, "fp16", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]


def test_a_python_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(2, 2), {'input': torch.ones(1, 2)}\n"
    )
    with pytest.raises(UsageError, match="no checkpoint of transformers") as caught:
        convert(f"{tmp_path / 'm.py'}:build", "fp16", tmp_path / "out")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"to": "float32"}, "float16 or bfloat16"),
        ({"to": "float8_e4m3fn"}, "float16 or bfloat16"),
        ({"to": "half"}, "unknown number format 'half'"),
        ({"remedy": "island"}, "cannot hold the remedy 'island'"),
        ({"fail_on": "always"}, "never, warning, error"),
        ({"colour": "red"}, "no option 'colour'"),
    ],
)
def test_what_is_asked_wrongly_is_said_before_anything_is_loaded(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    asked = {"to": "fp16", **changes}
    with pytest.raises(UsageError, match=message):
        convert(tmp_path / "missing", asked.pop("to"), tmp_path / "out", **asked)


def test_the_recording_of_the_scan_is_kept_on_request(tmp_path: Path) -> None:
    source = save("bert", tmp_path, tokenizer=True)
    done = convert(source, "fp16", tmp_path / "out", recording=tmp_path / "scan.jsonl.gz")
    kept = load(tmp_path / "scan.jsonl.gz")
    assert kept.complete
    assert kept.rows == done.scan.recording.rows


def test_the_object_for_machines_is_the_scans_and_says_what_was_written(tmp_path: Path) -> None:
    done = convert(save("t5", tmp_path, tokenizer=True), "fp16", tmp_path / "out", **SHORT)
    made = json.loads(json.dumps(done.to_dict(), allow_nan=False))
    assert made["verdicts"]["float16"]["verdict"] == "ok"
    told = made["conversion"]
    assert (told["to"], told["folder"], told["refused"]) == ("float16", str(tmp_path / "out"), None)
    assert len(told["kept_in_float32"]) == 4
    assert told["loaded_again"]["inputs"] == 8


def test_a_model_that_cannot_run_in_the_dtype_is_compared_by_its_weights(tmp_path: Path) -> None:
    # Without a kernel nothing is known of the outputs; the weights are those that were asked for.
    folder = _fnet(tmp_path)
    done = convert(folder, "fp16", tmp_path / "out", force=True)
    assert done.verdict.verdict == "unsupported"
    assert done.same is not None
    assert done.same.inputs == 0
    assert "fft" in done.same.failed.lower() or "half" in done.same.failed.lower()


def _fnet(folder: Path) -> Path:
    from tests.tiny_models import build_tokenizer

    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "max_position_embeddings": 64}
    hf.FNetForMaskedLM(hf.FNetConfig(vocab_size=100, **size)).save_pretrained(folder / "fnet")
    build_tokenizer().save_pretrained(folder / "fnet")
    return folder / "fnet"


def test_a_conversion_is_a_value(tmp_path: Path) -> None:
    done = convert(save("bert", tmp_path, tokenizer=True), "fp16", tmp_path / "out")
    with pytest.raises(dataclasses.FrozenInstanceError):
        done.folder = None  # type: ignore[misc]
    assert isinstance(done, Conversion)


CODE = """
import torch
from transformers import BertConfig, BertForMaskedLM


class Own(BertForMaskedLM):
    config_class = BertConfig

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        made = super().forward(input_ids, attention_mask, **kwargs)
        made.logits = made.logits * 2
        return made
"""


def test_code_that_comes_with_a_checkpoint_goes_with_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    source = save("bert", tmp_path, tokenizer=True)
    (source / "modeling_own.py").write_text(CODE)
    (source / "unrelated.txt").write_text("x")
    config = json.loads((source / "config.json").read_text())
    config |= {"architectures": ["Own"], "auto_map": {"AutoModelForMaskedLM": "modeling_own.Own"}}
    (source / "config.json").write_text(json.dumps(config))
    done = convert(source, "fp16", tmp_path / "out", trust_remote_code=True, task="masked-lm")
    assert done.same is not None
    assert (tmp_path / "out/modeling_own.py").read_text() == CODE
    loaded = hf.AutoModelForMaskedLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(loaded).__name__ == "Own"
    assert loaded.dtype == torch.float16


def test_a_model_that_breaks_is_mended_first_and_saved_with_its_remedy(tmp_path: Path) -> None:
    done = convert("demo", "fp16", tmp_path / "out", remedy="auto")
    assert not done.refused
    assert done.remedy is not None
    assert done.remedy.startswith("Rescale")
    assert done.before is not None
    assert done.before.verdicts["float16"].severity == "error"
    assert done.verdict.verdict == "ok"
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "what the search wrote is gone"
    model = hf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float16
    asked = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    answers = model.generate(**asked, num_beams=4, max_new_tokens=16)
    assert tuple(tokenizer.batch_decode(answers, skip_special_tokens=True)) == ANSWERS


def test_a_model_that_works_is_cast_as_it_is_whatever_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overflow_lab.remedies.treatment.treat", _unasked)
    done = convert(save("bert", tmp_path, tokenizer=True), "fp16", tmp_path / "out", remedy="rescale")
    assert done.remedy is None
    assert done.before is None
    assert done.folder is not None


def _unasked(*args: Any, **more: Any) -> Any:
    raise AssertionError("a remedy was looked for")


def test_without_a_proven_remedy_it_is_refused_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overflow_lab.remedies.scaling.propose", lambda *args, **more: Found())
    done = convert("demo", "fp16", tmp_path / "out", remedy="auto", texts=("seven",), generate=False)
    assert "no rescale mends it" in done.refused
    assert list(tmp_path.iterdir()) == []

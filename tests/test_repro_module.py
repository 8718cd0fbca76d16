"""Reproductions of the module at fault alone: built again by themselves, they show what the scan found."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import overflow_lab
from overflow_lab.cli.app import run
from tests.repro_models import checkpoint, overflowing_linear, overflowing_t5, python, user_file


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small T5 whose feed-forward overflows in float16."""
    return overflowing_t5(tmp_path_factory.mktemp("models") / "t5-big")


def test_a_module_of_transformers_is_rebuilt_alone_and_overflows(t5: Path, tmp_path: Path) -> None:
    found = overflow_lab.scan(str(t5), precisions="float16-to", generate=False, repro=tmp_path / "r")
    assert found.reproduction is not None
    assert found.reproduction.rebuilds == "module", found.reproduction.note
    done = python(found.reproduction.path)
    assert (done.returncode, done.stderr) == (1, "")
    assert re.search(r"float32 up to [\d,.e+]+; float16-to: [\d,]+ of [\d,]+ values are not finite", done.stdout)
    assert done.stdout.endswith("it breaks\n")
    assert {path.name for path in (tmp_path / "r").iterdir()} == {"repro.py", "tensors.safetensors"}


@pytest.mark.parametrize(
    ("precision", "changes", "origin", "built"),
    [
        # Its class takes the config alone.
        (
            "float16",
            {"model.layers.1.mlp.up_proj.weight": 3e3, "model.layers.1.mlp.gate_proj.weight": 3e3},
            "model.layers.1.mlp",
            "return LlamaMLP(config=config)",
        ),
        (
            "float16-autocast",
            {"model.layers.1.mlp.up_proj.weight": 3e3, "model.layers.1.mlp.gate_proj.weight": 3e3},
            "model.layers.1.mlp",
            "return LlamaMLP(config=config)",
        ),
        # Its class takes the config and its place, and it is given a tuple, a mask and a cache.
        (
            "float16",
            {"model.layers.1.self_attn.q_proj.weight": 2e3, "model.layers.1.self_attn.k_proj.weight": 2e3},
            "model.layers.1.self_attn",
            "return LlamaAttention(config=config, layer_idx=1)",
        ),
        # It keeps its size nowhere: the model is built on no memory and the module taken out of it.
        (
            "float16",
            {"model.layers.1.input_layernorm.weight": 7e4},
            "model.layers.1.input_layernorm",
            'return model.get_submodule("model.layers.1.input_layernorm").to_empty(device="cpu")',
        ),
    ],
)
def test_a_module_of_a_transformers_model_is_built_by_its_config(
    precision: str, changes: dict[str, float], origin: str, built: str, tmp_path: Path
) -> None:
    model = checkpoint(tmp_path / "llama", "llama", changes)
    options: dict[str, Any] = {"generate": False, "attn_implementation": "eager"}
    found = overflow_lab.scan(model, precisions=precision, repro=tmp_path / "r", **options)
    place = found.verdicts[precision].origin
    assert place is not None
    assert place.module == origin
    assert found.reproduction is not None
    assert found.reproduction.rebuilds == "module", found.reproduction.note
    assert built in found.reproduction.path.read_text()
    config = (tmp_path / "r" / "config.json").read_text()
    assert str(tmp_path) not in config
    assert "_name_or_path" not in config
    done = python(found.reproduction.path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "it breaks"), done.stderr


def test_a_users_own_module_is_rebuilt_from_a_copy_of_the_file(tmp_path: Path) -> None:
    path = user_file(tmp_path / "src")
    found = overflow_lab.scan(f"{path}:build", precisions="float16", repro=tmp_path / "r")
    origin = found.verdicts["float16"].origin
    assert origin is not None
    assert origin.module == "gate"
    assert found.reproduction is not None
    assert found.reproduction.rebuilds == "module", found.reproduction.note
    path.unlink()
    text = found.reproduction.path.read_text()
    assert "from my_model import Gate" in text
    assert "Gate(width=8, gain=1.5)" in text
    done = python(found.reproduction.path)
    assert (done.returncode, done.stderr) == (1, "")
    assert "values are not finite" in done.stdout


def test_the_saved_weights_and_inputs_are_the_modules_own(tmp_path: Path) -> None:
    path = user_file(tmp_path / "src")
    overflow_lab.scan(f"{path}:build", precisions="float16", repro=tmp_path / "r")
    saved = load_file(tmp_path / "r" / "tensors.safetensors")
    torch.manual_seed(0)
    first = nn.Linear(4, 8)
    given = torch.linspace(-2, 2, 8).reshape(2, 4)
    assert set(saved) == {"module.scale", "module.shift", "input.0", "input.mask"}
    assert torch.equal(saved["module.shift"], torch.arange(8.0))
    assert saved["input.0"].dtype == torch.float16
    assert torch.allclose(saved["input.0"].float(), first(given), atol=1e-2)
    assert torch.equal(saved["input.mask"], given.half() > 0)


def test_a_module_that_takes_a_function_is_taken_out_of_what_the_users_function_builds(tmp_path: Path) -> None:
    path = user_file(tmp_path / "src")
    found = overflow_lab.scan(f"{path}:nested", precisions="float16", repro=tmp_path / "r")
    assert found.reproduction is not None
    assert found.reproduction.rebuilds == "module", found.reproduction.note
    assert 'whole_model()[0].get_submodule("hidden")' in found.reproduction.path.read_text()
    assert python(found.reproduction.path).returncode == 1


def test_where_the_models_own_code_is_at_fault_the_whole_model_is_run(tmp_path: Path) -> None:
    path = user_file(tmp_path / "src")
    found = overflow_lab.scan(f"{path}:root", precisions="float16", repro=path.parent / "r")
    assert found.reproduction is not None
    assert (found.reproduction.rebuilds, "own code" in found.reproduction.note) == ("model", True)
    assert [p.name for p in (path.parent / "r").iterdir()] == ["repro.py"]
    beside = found.reproduction.path.rename(path.parent / "repro.py")
    done = python(beside)
    assert (done.returncode, done.stderr) == (1, "")
    assert "the model itself: float32 up to 480,000; float16 up to 0, 8 not finite" in done.stdout


def test_a_module_in_memory_is_rebuilt_where_its_class_can_be_imported(tmp_path: Path) -> None:
    model = nn.Sequential(*overflowing_linear(), nn.LayerNorm(4))
    found = overflow_lab.scan(model, (torch.ones(2, 4),), precisions="float16", repro=tmp_path / "r")
    assert found.reproduction is not None
    assert found.reproduction.rebuilds == "module", found.reproduction.note
    assert "return Linear(in_features=4, out_features=4, bias=True)" in found.reproduction.path.read_text()
    assert python(found.reproduction.path).returncode == 1


def test_a_mended_module_makes_the_script_end_with_0(tmp_path: Path) -> None:
    path = user_file(tmp_path / "src")
    overflow_lab.scan(f"{path}:build", precisions="float16", repro=tmp_path / "r")
    copied = tmp_path / "r" / "my_model.py"
    copied.write_text(copied.read_text().replace(".square() * self.gain", ".tanh()"))
    done = python(tmp_path / "r" / "repro.py")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "it does not break here")


def test_nothing_is_written_where_nothing_breaks(tmp_path: Path) -> None:
    path = user_file(tmp_path / "src")
    found = overflow_lab.scan(f"{path}:fine", precisions="float16", repro=tmp_path / "r")
    assert found.reproduction is None
    assert not (tmp_path / "r").exists()


def test_nothing_is_captured_unless_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = user_file(tmp_path / "src")
    overflow_lab.scan(f"{path}:build", precisions="float16")
    assert [p for p in tmp_path.rglob("*") if p.suffix == ".safetensors"] == []


def test_the_users_imports_and_hooks_are_as_before(tmp_path: Path) -> None:
    model = overflowing_linear()
    paths, names = list(sys.path), set(sys.modules)
    overflow_lab.scan(model, (torch.ones(2, 4),), precisions="float16", repro=tmp_path / "r")
    assert sys.path == paths
    assert not {name for name in set(sys.modules) - names if "my_model" in name or name == "repro"}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_command_says_what_is_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = user_file(tmp_path / "src")
    assert run(["scan", f"{path}:build", "-p", "float16", "--repro", "out"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("script     out/repro.py  (the module at fault alone;")
    assert run(["scan", f"{path}:build", "-p", "float16", "--repro", "out"]) == 2
    assert "out exists; choose another folder, or give --overwrite." in capsys.readouterr().err

"""The weights of a checkpoint, scanned in its files: the numbers of torch's own casts, in bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import overflow_lab
from overflow_lab.capture.statistics import Tape
from overflow_lab.capture.stored import measure, stored_in
from overflow_lab.cli.app import run
from overflow_lab.errors import UsageError
from overflow_lab.formats import FORMATS, round_to
from tests import tiny_models

FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


def spread(shape: tuple[int, ...], *, low: float = -30, high: float = 20, seed: int = 0) -> torch.Tensor:
    """Values of all magnitudes from 2**low to 2**high, of both signs."""
    generator = torch.Generator().manual_seed(seed)
    exponents = low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)
    return torch.exp2(exponents) * torch.sign(torch.randn(shape, generator=generator, dtype=torch.float64))


def saved(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, path)
    return path


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_cast_loses_what_torchs_own_cast_loses(tmp_path: Path, dtype: str, precision: str) -> None:
    values = spread((700, 9)).to(FLOATS[dtype])
    found = overflow_lab.weights(saved(tmp_path / "m.safetensors", w=values), precisions=[precision])
    (row,) = found.casts
    cast = values.to(FLOATS[precision])
    fmt = FORMATS[precision]
    finite = torch.isfinite(values)
    assert row.to_infinity == int((torch.isinf(cast) & finite).sum())
    halfway = values.double().abs() == fmt.smallest_subnormal / 2  # a tie, which becomes zero: told as subnormal
    zeroed = (cast == 0) & (values != 0) & ~halfway
    assert row.to_zero == int(zeroed.sum())
    below = (values.double().abs() < fmt.smallest_normal) & (values != 0) & ~zeroed
    own = values.double().abs() >= torch.finfo(values.dtype).smallest_normal
    assert row.to_subnormal == int((below & own).sum())
    kept = finite & torch.isfinite(cast)
    a, b = values[kept].double(), cast[kept].double()
    expected = ((a - b).square().sum() / a.square().sum()).sqrt().item()
    assert row.rounding == pytest.approx(expected, rel=0.15, abs=1e-9)  # of a sample
    assert found.tensors[0].range.count == 6300


@given(limit=st.floats(60_000, 70_000), count=st.integers(1, 50))
@settings(max_examples=30, deadline=None)
def test_values_round_the_largest_are_counted_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, limit: float, count: int
) -> None:
    values = torch.linspace(-limit, limit, count)
    path = saved(tmp_path_factory.mktemp("m") / "m.safetensors", w=values)
    (row,) = overflow_lab.weights(path, precisions=["float16"]).casts
    assert row.to_infinity == int(torch.isinf(values.half()).sum())


@pytest.mark.parametrize("precision", ["float8_e4m3fn", "float8_e5m2", "tf32"])
def test_formats_that_torch_does_not_compute_in_are_those_of_the_exact_rounding(tmp_path: Path, precision: str) -> None:
    values = spread((40, 90), low=-20, high=18).float()
    (row,) = overflow_lab.weights(saved(tmp_path / "m.safetensors", w=values), precisions=[precision]).casts
    fmt = FORMATS[precision]
    rounded = round_to(values.numpy(), fmt)
    assert row.to_infinity == int((~(abs(rounded) <= fmt.max)).sum())
    assert row.to_zero == int(((rounded == 0) & (values.numpy() != 0)).sum())


@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=6),
    block=st.sampled_from([64, 1000, 4096, 1 << 20]),
    threads=st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_blocks_and_threads_do_not_change_what_is_measured(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], block: int, threads: int
) -> None:
    tensors = {
        f"w{n}": spread((size,), seed=n).to([torch.float32, torch.bfloat16][n % 2]) for n, size in enumerate(sizes)
    }
    path = saved(tmp_path_factory.mktemp("m") / "m.safetensors", **tensors)
    stored = stored_in(path)
    measured = measure(stored, threads=threads, block=block)
    again = measure(stored, threads=threads, block=block)
    for one, seen, repeated in zip(stored, measured, again, strict=True):
        whole = eager(tensors[one.name])
        assert seen.range == repeated.range
        assert (seen.range.count, seen.range.min, seen.range.max) == (whole.count, whole.min, whole.max)
        assert (seen.range.smallest, seen.range.exponents) == (whole.smallest, whole.exponents)
        assert seen.range.sum_of_squares == pytest.approx(whole.sum_of_squares, rel=1e-12)
        kept = seen.sample.sort().values
        assert torch.isin(kept, tensors[one.name].double()).all()
        assert len(kept) == len(tensors[one.name])


def eager(tensor: torch.Tensor) -> Any:
    tape = Tape(torch.device("cpu"), kernel="eager")
    row = tape.measure(tensor)
    return tape.drain().row(row)


def test_a_model_of_transformers_has_the_ranges_of_its_parameters(tmp_path: Path) -> None:
    folder = tiny_models.save("llama", tmp_path)
    found = overflow_lab.weights(folder)
    model = dict(tiny_models.build("llama").named_parameters())
    assert {row.name for row in found.tensors} <= model.keys()
    for row in found.tensors:
        assert row.range.absmax == model[row.name].abs().max().item()
        assert row.module == row.name.rpartition(".")[0]
    assert found.severity("bfloat16") == "none"
    assert set(found.to_frame()["name"]) == {row.name for row in found.tensors}


def sharded(folder: Path) -> Path:
    """A checkpoint in three files with an index, as transformers writes it."""
    tiny_models.build("llama").save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    whole = overflow_lab.weights(tiny_models.save("llama", tmp_path))
    parts = overflow_lab.weights(sharded(tmp_path / "shards"))
    assert len(parts.files) > 2
    assert sorted(parts.tensors, key=lambda r: r.name) == sorted(whole.tensors, key=lambda r: r.name)
    index = tmp_path / "shards" / "model.safetensors.index.json"
    assert overflow_lab.weights(index).tensors == parts.tensors


def test_a_pickle_is_read_without_running_it(tmp_path: Path) -> None:
    values = {"a.weight": spread((30, 40)).float(), "steps": torch.tensor(3), "a.bias": torch.zeros(4).half()}
    torch.save({"state_dict": values}, tmp_path / "m.pt")
    found = overflow_lab.weights(tmp_path / "m.pt")
    assert {row.name: row.range.absmax for row in found.tensors} == {
        "a.weight": values["a.weight"].abs().max().item(), "a.bias": 0.0
    }  # fmt: skip
    assert found.others == (("steps", "int64"),)


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("evil",))


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("m.safetensors", b"", "damaged"),
        ("m.safetensors", b"\xff" * 64, "damaged"),
        ("m.safetensors", (60).to_bytes(8, "little") + b"{}", "damaged"),
        ("m.safetensors", (2).to_bytes(8, "little") + b"[]", "damaged"),
        ("m.bin", b"no pickle", "save it as safetensors"),
    ],
)
def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=said) as caught:
        overflow_lab.weights(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.safetensors", w=torch.ones(1000), v=torch.ones(1000))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match="damaged"):
        overflow_lab.weights(path)


def test_code_in_a_pickle_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3), "evil": Evil()}, tmp_path / "m.bin")
    with pytest.raises(UsageError, match="cannot be read without loading"):
        overflow_lab.weights(tmp_path / "m.bin")


def test_a_missing_shard_an_empty_folder_and_a_wrong_precision_are_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "shards")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(UsageError, match=gone.name):
        overflow_lab.weights(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="has no weights"):
        overflow_lab.weights(tmp_path / "empty")
    with pytest.raises(UsageError, match="unknown number format 'fp12'"):
        overflow_lab.weights(folder, precisions=["fp12"])
    with pytest.raises(UsageError, match="no folder here"):
        overflow_lab.weights("nobody/nothing")


# ---- severity, command line ----


def test_severities_and_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fits = saved(tmp_path / "fits.safetensors", w=torch.linspace(-1, 1, 999))
    tiny = saved(tmp_path / "tiny.safetensors", w=torch.cat([torch.ones(900), torch.full((100,), 1e-6)]))
    large = saved(tmp_path / "large.safetensors", w=torch.ones(9), running_var=torch.tensor([1.0, 497_160.0]))
    for path, severity, codes in ((fits, "none", (0, 0)), (tiny, "warning", (1, 0)), (large, "error", (1, 1))):
        assert overflow_lab.weights(path).severity("float16") == severity
        for fail_on, code in zip(("warning", "error"), codes, strict=True):
            assert run(["weights", str(path), "--fail-on", fail_on, "-p", "float16"]) == code
    shown = capsys.readouterr().out
    assert "running_var" in shown
    assert "does not fit" in shown
    assert "497,160" in shown
    assert run(["weights", str(tmp_path / "none.safetensors")]) == 2
    assert "\n" not in capsys.readouterr().err.strip()


def test_json_is_one_object_with_all_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "m.safetensors", w=torch.tensor([1.0, torch.inf, 1e9]), n=torch.arange(3))
    assert run(["weights", str(path), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in made["tensors"]] == ["w"]
    assert made["tensors"][0]["range"]["posinf"] == 1
    assert made["precisions"]["float16"]["to_infinity"] == 1
    assert made["precisions"]["bfloat16"]["severity"] == "error"  # it is infinite already
    assert made["others"] == [{"name": "n", "kind": "I64"}]
    assert made["schema"] == 1


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    peaks = []
    for megabytes in (4, 200):
        path = tmp_path / f"{megabytes}.safetensors"
        save_file({f"w{n}": torch.ones(2**20) for n in range(megabytes // 4)}, path)
        script = (
            "import sys, overflow_lab; overflow_lab.weights(sys.argv[1]); "
            "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
        )
        done = subprocess.run([sys.executable, "-c", script, str(path)], check=True, capture_output=True, text=True)
        peaks.append(int(done.stdout) / 1024)
    assert peaks[1] < peaks[0] + 40

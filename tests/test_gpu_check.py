"""`make gpu`, played on the CPU: every check passes there, notices what it is there for, and the script reports it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from overflow_lab.capture import devices
from overflow_lab.capture.shadow import operations
from overflow_lab.capture.statistics import Rows, Tape
from overflow_lab.gpu_check import costs, inside, kernels, patients, report, watching
from overflow_lab.gpu_check.costs import SIZES, Size, Work, chosen

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent
TINY = Size(32, 1, 4, 2, 48, 100)


@pytest.mark.parametrize("name", report.CHECKS)
def test_every_check_passes_on_the_cpu_and_says_what_it_did(name: str) -> None:
    with torch.no_grad():
        assert report.CHECKS[name](CPU)


# ---- a check that cannot fail is none ----


@pytest.mark.parametrize("field", ["nan", "zero", "smallest", "sum", "sum_of_squares", "exponents"])
def test_a_kernel_with_one_wrong_statistic_is_noticed(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    whole = Tape.drain

    def wrong(tape: Tape) -> Rows:
        rows = whole(tape)
        if tape.kernel_name != "eager":
            values = getattr(rows, field)
            values.flat[0] = values.flat[0] * 3 / 2 + 1
        return rows

    monkeypatch.setattr(Tape, "drain", wrong)
    with pytest.raises(kernels.Failed, match=r"float16: (the sums are|" + field + " is)"):
        kernels.all_codes(CPU)


def test_a_cuda_device_without_its_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without(Tape):
        def __init__(self, device: torch.device) -> None:
            super().__init__(CPU, kernel="eager")
            self.fallback = "triton is not installed"

        def measure(self, tensor: torch.Tensor) -> int:
            return 0

    monkeypatch.setattr(kernels, "Tape", Without)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
    with pytest.raises(kernels.Failed, match="the kernel is eager: triton is not installed"):
        kernels.first_use(torch.device("cuda"))


def test_an_observer_that_changes_an_output_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(tape: Tape, tensor: torch.Tensor) -> int:
        if tensor.is_floating_point() and tensor.dim() == 3:
            tensor.mul_(1.5)
        return whole(tape, tensor)

    whole = Tape.measure
    monkeypatch.setattr(Tape, "measure", changed)
    with (
        pytest.raises(kernels.Failed, match=r"forward in torch\.float32 is another when it is watched"),
        torch.no_grad(),
    ):
        watching.same_outputs(CPU)


def test_shadows_in_tf32_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def coarse(op: Any, name: str, *given: Any) -> Any:
        made, own = whole(op, name, *given)
        return made.half().float() if name in ("aten.mm", "aten.convolution") else made, own

    whole = operations.replay
    monkeypatch.setattr(operations, "replay", coarse)
    with pytest.raises(kernels.Failed, match="is off by"), torch.no_grad():
        inside.products_in_float32(CPU)


def test_draws_that_are_looked_for_in_another_generator_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "random_state", lambda device: torch.zeros(1))
    with pytest.raises(kernels.Failed, match="the shadow is off by"), torch.no_grad():
        inside.random_numbers(CPU)


def test_an_attention_that_is_not_replayed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(op: Any, name: str, *given: Any) -> Any:
        if "attention" in name:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        return whole(op, name, *given)

    whole = operations.replay
    monkeypatch.setattr(operations, "replay", refusing)
    with pytest.raises(kernels.Failed, match="FlashAttention"), torch.no_grad():
        inside.attention(CPU)


@pytest.mark.parametrize(
    ("check", "patient"),
    [(inside.product_in_float16, "Block"), (inside.square_in_float16, "Norm"), (inside.sum_in_bfloat16, "Edge")],
)
def test_a_fault_that_is_not_found_is_noticed(monkeypatch: pytest.MonkeyPatch, check: Any, patient: str) -> None:
    monkeypatch.setattr(inside, patient, lambda **_: torch.nn.Identity())
    with pytest.raises(kernels.Failed, match="the origin in"), torch.no_grad():
        check(CPU)


# ---- costs ----


def test_the_largest_model_that_fits_is_chosen() -> None:
    assert [size.parameters // 10**8 for size in SIZES[:3]] == [80, 36, 14]
    assert chosen(140 * 10**9) == chosen(80 * 10**9) == SIZES[0]
    assert chosen(24 * 10**9) == SIZES[2]
    assert chosen(0) == SIZES[-1]


def test_a_size_is_that_of_the_model_it_builds() -> None:
    model = TINY.build(CPU)
    norms = 3 * TINY.hidden
    assert sum(p.numel() for p in model.parameters()) == TINY.parameters + norms
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def test_costs_are_ratios_to_the_bare_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "SIZES", (TINY,))
    found = costs.costs(CPU, seconds=0.0, length=8, new=2)
    assert found["parameters"] == TINY.parameters
    assert list(found["ratios"]) == ["prefill 1x8", "decode 2"]
    for row in found["ratios"].values():
        assert list(row) == ["bare_seconds", "modules", "operations", "shadow"]
        assert all(value > 0 for value in row.values())


def test_a_way_that_runs_out_of_memory_has_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Work, "_shadow", full)
    model = TINY.build(CPU)
    prefill, _ = costs.works(TINY, CPU, length=8)
    with torch.no_grad():
        row = costs.measure(prefill, model, model, CPU, seconds=0.0)
    assert row["shadow"] is None
    assert row["modules"] > 0


# ---- the script ----


def test_without_cuda_one_line_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert report.main([]) == 2
    assert capsys.readouterr().out == (
        f"gpu_check: torch {torch.__version__} sees no CUDA device; nothing was checked.\n"
    )


def _works(device: torch.device) -> str:
    return f"on {device}"


def _breaks(device: torch.device) -> str:
    raise kernels.Failed("min is 1, and should be 2")


def _is_left_out(device: torch.device) -> str:
    raise kernels.LeftOut("pandas is not installed")


def test_the_table_and_the_last_line_tell_what_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "CHECKS", {"one": _works, "two": _breaks, "three": _is_left_out})
    monkeypatch.setattr(costs, "SIZES", (TINY,))
    assert report.main(["--device", "cpu", "--seconds", "0.01"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["one", "ok"]
    assert lines[2].startswith("two")
    assert lines[2].endswith("min is 1, and should be 2")
    assert lines[-2] == "1 of 3 checks are ok. Not so: two."
    last = json.loads(lines[-1])
    assert last["checks"] == {"one": "ok", "two": "min is 1, and should be 2", "three": "left out"}
    assert last["costs"]["parameters"] == TINY.parameters
    assert last["environment"]["device"] == "cpu"


def test_it_runs_where_nothing_but_torch_and_transformers_is_installed() -> None:
    program = """
import sys
for name in ("pandas", "matplotlib", "jinja2", "typer", "rich", "llvmlite", "scipy", "triton", "accelerate"):
    sys.modules[name] = None
from overflow_lab.gpu_check import inside, report
report.CHECKS = {n: c for n, c in report.CHECKS.items() if n.startswith(("kernel: a", "shadow: p", "scan"))}
sys.exit(report.main(["--device", "cpu", "--seconds", "0"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout.splitlines()[-1])["checks"] == {
        "kernel: all codes": "ok",
        "shadow: product, float16": "ok",
        "scan": "left out",
    }


def test_a_patient_at_the_edge_of_bfloat16_is_finite_in_float32() -> None:
    assert patients.Edge()(torch.ones(2, 3)).isfinite().all()

"""Runs the checks, measures the costs, and prints a table, and all of it as JSON in the last line."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from overflow_lab.capture.environment import environment
from overflow_lab.errors import one_line
from overflow_lab.gpu_check import inside, kernels, watching
from overflow_lab.gpu_check.costs import costs

Check = Callable[[torch.device], str]

# The first is first since it times what is compiled once.
CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "kernel: first use": kernels.first_use,
        "kernel: all codes": kernels.all_codes,
        "kernel: sizes and strides": kernels.sizes,
        "kernel: bit patterns": kernels.bit_patterns,
        "kernel: repeatable": kernels.repeatable,
        "capture: outputs": watching.same_outputs,
        "capture: nothing left": watching.nothing_left,
        "capture: ranges": watching.same_ranges,
        "shadow: product, float16": inside.product_in_float16,
        "shadow: square, float16": inside.square_in_float16,
        "shadow: sum, bfloat16": inside.sum_in_bfloat16,
        "shadow: healthy": inside.healthy,
        "shadow: attention": inside.attention,
        "shadow: no TF32": inside.products_in_float32,
        "shadow: random numbers": inside.random_numbers,
        "shadow: float32": inside.float32_itself,
        "scan": inside.whole_scan,
    }
)


def main(arguments: list[str] | None = None) -> int:
    """Check and measure; return the exit code: 0 all as it should be, 1 some check failed, 2 no such device."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="where (cuda, cuda:1; cpu to try the script)")
    parser.add_argument("--seconds", type=float, default=120.0, help="time for the costs; 0 leaves them out")
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        _write(f"gpu_check: torch {torch.__version__} sees no CUDA device; nothing was checked.")
        return 2
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    facts = environment(str(device))
    _write(f"{facts['processor']}, torch {facts['torch']}, transformers {facts.get('transformers')}")
    checks = checked(device)
    found = {"environment": facts, "checks": checks, "costs": _measured(device, chosen.seconds)}
    failed = [name for name, result in checks.items() if result not in ("ok", "left out")]
    right = list(checks.values()).count("ok")
    _write(f"{right} of {len(checks)} checks are ok." + (f" Not so: {', '.join(failed)}." if failed else ""))
    _write(json.dumps(found))
    return 1 if failed else 0


def checked(device: torch.device) -> dict[str, str]:
    """Run all checks, print a line for each, and return "ok", "left out" or what is wrong, by name."""
    results = {}
    for name, check in CHECKS.items():
        began = time.perf_counter()
        try:
            with torch.no_grad():
                detail, results[name] = check(device), "ok"
        except kernels.LeftOut as error:
            detail, results[name] = str(error), "left out"
        except Exception as error:  # one that fails hides no other
            detail = results[name] = str(error) if isinstance(error, kernels.Failed) else one_line(error)
        state = results[name] if results[name] in ("ok", "left out") else "FAILED"
        _write(f"{name:26s} {state:8s} {time.perf_counter() - began:6.1f} s  {detail}")
    return results


def _measured(device: torch.device, seconds: float) -> dict[str, Any] | None:
    """Measure and print the costs; what goes wrong is told, and fails no check."""
    if not seconds:
        return None
    try:
        found = costs(device, seconds=seconds)
    except Exception as error:
        _write(f"the costs could not be measured: {one_line(error)}")
        return {"error": one_line(error)}
    _write(f"Llama of {found['parameters'] / 1e9:.2g} billion parameters in bfloat16; ratios to the bare call")
    _write(f"{'':16s} {'bare':>10s} {'modules':>10s} {'operations':>10s} {'shadow':>10s}")
    for name, row in found["ratios"].items():
        bare, *ratios = row.values()
        cells = "".join(f" {'-' if ratio is None else format(ratio, '.2f'):>10s}" for ratio in ratios)
        _write(f"{name:16s} {bare or 0:8.3f} s{cells}")
    return found


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()

"""What watching a model costs: `python -m overflow_lab.benchmark` (or `make bench`), ratios in one interleaved run.

The model is T5-small-sized at random weights. Each round runs the bare model, the model with all its modules watched,
and the model under transformers' DebugUnderflowOverflow, one after the other, so that a slow moment of the machine
meets all three. Printed are medians over the rounds and their spread; the last line is one JSON object of the ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from overflow_lab.capture.module_ranges import ModuleRanges
from overflow_lab.capture.ports import Ports
from overflow_lab.capture.precisions import Prepared, parse_precision
from overflow_lab.capture.shadow.call import Call
from overflow_lab.capture.shadow.dispatch import ShadowMode
from overflow_lab.capture.shadow.run import run
from overflow_lab.capture.statistics import Tape
from overflow_lab.capture.stored import BLOCK, stored_in
from overflow_lab.capture.stored import measure as measure_stored
from overflow_lab.recording import PrecisionRow

Ask = Callable[[Any], object]


@dataclass(frozen=True)
class Work:
    """One thing to time: its name in the JSON, and what is asked of the model."""

    name: str
    call: Ask
    peer: bool = True


def t5_small() -> Any:
    """Return a model of T5-small's size (d_model 512, 6 + 6 layers, 32,128 tokens) at random weights."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        d_model=512,
        d_kv=64,
        d_ff=2048,
        num_layers=6,
        num_heads=8,
        vocab_size=32128,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    return T5ForConditionalGeneration(config).eval()


def forward(batch: int, length: int) -> Ask:
    """Return a plain forward of `batch` x `length` tokens, as many on the decoder's side."""
    ids = torch.randint(2, 32000, (batch, length), generator=torch.Generator().manual_seed(0))
    return lambda model: model(input_ids=ids, decoder_input_ids=ids)


def generate(model: Any) -> object:
    """Beam search over 32 tokens with 4 beams, for a batch of 4 inputs of 32 tokens."""
    ids = torch.randint(2, 32000, (4, 32), generator=torch.Generator().manual_seed(0))
    return model.generate(input_ids=ids, num_beams=4, max_new_tokens=32, min_new_tokens=32, do_sample=False)


WORKS = (
    Work("modules_8x128", forward(8, 128)),
    Work("modules_1x32", forward(1, 32)),
    Work("modules_generate", generate),
)


def watched(model: Any, call: Ask) -> None:
    """Run `call` with the ranges of all modules recorded, as a scan does."""
    ports = Ports("float32", Tape(torch.device("cpu")))
    with ModuleRanges(model, ports):
        call(model)
    ports.settle()


def peer_model(model: Any) -> Any:
    """Return a copy of the model under transformers' DebugUnderflowOverflow, which never takes its hooks off."""
    from transformers.debug_utils import DebugUnderflowOverflow

    copied = copy.deepcopy(model)
    DebugUnderflowOverflow(copied)
    return copied


def seconds(call: Callable[[], object]) -> float:
    """Return the wall-clock time of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(work: Work, model: Any, peer: Any, rounds: int) -> dict[str, list[float]]:
    """Return the ratios to the bare run, round by round: "ours" and "peer"."""
    ratios: dict[str, list[float]] = {"ours": [], "peer": []}
    for number in range(rounds + 1):
        bare = seconds(lambda: work.call(model))
        ours = seconds(lambda: watched(model, work.call))
        with contextlib.redirect_stdout(io.StringIO()):
            other = seconds(lambda: work.call(peer))
        if number:  # the first round warms up caches and compiles
            ratios["ours"].append(ours / bare)
            ratios["peer"].append(other / bare)
    return ratios


def shadow_ratios(model: Any, precision: str, rounds: int) -> list[float]:
    """Return the cost of a shadow run of 8 x 128.

    In bfloat16 to a float32 and a bfloat16 forward together; in float16, with emulated products, to a native forward.
    """
    ids = torch.randint(2, 32000, (8, 128), generator=torch.Generator().manual_seed(0))
    asked = parse_precision(precision)
    dtype, half = asked.torch_dtype(), asked.dtype == "float16"
    row = PrecisionRow(asked.name, asked.dtype, "to")
    low = Prepared(asked, copy.deepcopy(model).to(dtype), row, dtype, "cpu", emulated=half)
    call = Call({"input_ids": ids, "decoder_input_ids": ids})
    ratios = []
    for number in range(rounds + 1):
        plain = seconds(lambda: call.make(low.model)) + (0.0 if half else seconds(lambda: call.make(model)))
        mode = ShadowMode()
        shadowed = seconds(lambda mode=mode: run(mode, low, model, call))  # type: ignore[misc]
        mode.shadows.close()
        ratios += [shadowed / plain] if number else []
    return ratios


def cold_seconds(rounds: int) -> list[float]:
    """Return how many seconds `overflow-lab scan demo` takes in a fresh process above importing torch, transformers."""
    scan = ["-m", "overflow_lab", "scan", "demo", "--quiet", "--overwrite"]
    imports = ["-c", "import torch, transformers"]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            took = [seconds(lambda c=c: _fresh(c, folder)) for c in (imports, scan)]  # type: ignore[misc]
            found += [took[1] - took[0]] if number else []
    return found


def _fresh(arguments: list[str], folder: str) -> None:
    """Run Python in a process of its own, on one thread as `make demo` does."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    subprocess.run(command, check=True, capture_output=True, cwd=folder, env=environment)


def weights_ratios(dtype: torch.dtype, rounds: int, *, megabytes: int = 256) -> list[float]:
    """Return the cost of scanning the weights in a file, to reading its bytes once into memory that is used again.

    The file was just written, so that it is in the page cache; reading is done by one thread, scanning by two.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        generator = torch.Generator().manual_seed(0)
        elements = megabytes * 2**20 // dtype.itemsize
        save_file({"weight": (torch.randn(elements, generator=generator) * 0.02).to(dtype)}, path)
        found, memory = stored_in(path), bytearray(BLOCK)
        ratios = []
        for number in range(rounds + 1):
            plain = seconds(lambda: _read(path, memory))
            scanned = seconds(lambda: measure_stored(found))
            ratios += [scanned / plain] if number else []
    return ratios


def _read(path: Path, memory: bytearray) -> None:
    with path.open("rb", buffering=0) as file:
        while file.readinto(memory):
            pass


def peak_megabytes(how: str) -> float:
    """Return the peak memory of a fresh process that does 8 x 128 "bare" or "watched"."""
    command = [sys.executable, "-m", "overflow_lab.benchmark", "--child", how]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def child(how: str) -> None:
    """Do the work twice and print this process's peak memory in MB."""
    model, call = t5_small(), forward(8, 128)
    watched(model, forward(1, 8))  # what is loaded and compiled once is no cost of a forward
    for _ in range(2):
        call(model) if how == "bare" else watched(model, call)
    scale = 2**20 if sys.platform == "darwin" else 2**10
    sys.stdout.write(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale}\n")


def main() -> None:
    """Measure, print the table, and the JSON as the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds: two minutes instead of ten")
    parser.add_argument("--rounds", type=int, help="rounds for each work")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's threads")
    parser.add_argument("--child", choices=("bare", "watched"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.no_grad():
        if arguments.child:
            child(arguments.child)
            return
        report(arguments.rounds or (3 if arguments.quick else 9))


def _memory() -> list[float]:
    return [peak_megabytes("watched") - peak_megabytes("bare") for _ in range(3)]


def report(rounds: int) -> None:
    """Print the table of all works."""
    model = t5_small()
    peer = peer_model(model)
    made: dict[str, float] = {}
    out = sys.stdout
    out.write(
        f"T5-small size, float32, {torch.get_num_threads()} threads, {rounds} rounds; "
        "ratio to the bare model, median (min to max)\n"
    )
    for work in WORKS:
        ratios = measure(work, model, peer, rounds)
        cells = [f"{statistics.median(r):5.2f} ({min(r):.2f} to {max(r):.2f})" for r in ratios.values()]
        out.write(f"{work.name:20s} overflow-lab {cells[0]:24s} DebugUnderflowOverflow {cells[1]}\n")
        out.flush()
        made |= {work.name: statistics.median(ratios["ours"]), f"{work.name}_peer": statistics.median(ratios["peer"])}
    few = max(2, rounds // 3)
    others: tuple[tuple[str, str, Callable[[], list[float]]], ...] = (
        ("shadow_bf16_8x128", "of a float32 and a bfloat16 forward", lambda: shadow_ratios(model, "bfloat16", few)),
        ("shadow_fp16_8x128", "of a native float16 forward", lambda: shadow_ratios(model, "float16", few)),
        ("weights", "of reading the file (float32)", lambda: weights_ratios(torch.float32, rounds)),
        ("weights_bfloat16", "of reading the file (bfloat16)", lambda: weights_ratios(torch.bfloat16, rounds)),
        ("memory_modules_mb", "MB above the bare forward's peak", _memory),
        ("demo_cold_s", "seconds above importing torch and transformers", lambda: cold_seconds(few)),
    )
    for name, unit, found in others:
        values = found()
        cell = f"{statistics.median(values):5.2f} ({min(values):.2f} to {max(values):.2f}, {len(values)} rounds)"
        out.write(f"{name:20s} overflow-lab {cell} {unit}\n")
        out.flush()
        made[name] = statistics.median(values)
    out.write(json.dumps({name: round(value, 3) for name, value in made.items()}) + "\n")


if __name__ == "__main__":
    main()

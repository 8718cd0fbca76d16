"""Models that break in float16, as checkpoints and as a user's file, and how a reproduction of them is run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from tests import tiny_models

USER_FILE = """
import torch
from torch import nn


class Gate(nn.Module):
    def __init__(self, width, gain):
        super().__init__()
        self.width, self.gain = width, gain
        self.scale = nn.Parameter(torch.full((width,), 300.0))
        self.register_buffer("shift", torch.arange(width, dtype=torch.float32), persistent=False)

    def forward(self, hidden, *, mask=None):
        squared = (hidden * self.scale).square() * self.gain
        return {"gated": squared + self.shift, "mask": mask}


class Net(nn.Module):
    def __init__(self, secret):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.gate = Gate(8, 1.5)

    def forward(self, x):
        return self.gate(self.first(x), mask=x > 0)["gated"].log()


class Hidden(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.inner = make()

    def forward(self, x):
        return self.inner(x).square() * 6e4


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = Hidden(lambda: nn.Linear(4, 4))

    def forward(self, x):
        return self.hidden(x) * 0.5


class Own(nn.Module):
    def forward(self, x):
        return x.square() * 3e4


def build():
    torch.manual_seed(0)
    return Net("secret"), {"x": torch.linspace(-2, 2, 8).reshape(2, 4)}


def nested():
    torch.manual_seed(0)
    return Outer(), [(torch.zeros(2, 4),), (torch.full((2, 4), 4.0),)]


def root():
    return Own(), torch.full((2, 4), 4.0)


def fine():
    return nn.Linear(4, 4), torch.ones(2, 4)
"""


def python(path: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder of its own, where overflow-lab cannot be imported."""
    block = (
        "import sys; sys.modules['overflow_lab'] = None; import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    arguments = [sys.executable, "-c", block, str(path)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(path.parent)}
    return subprocess.run(arguments, capture_output=True, text=True, env=environment, cwd=path.parent)


def user_file(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "my_model.py"
    path.write_text(USER_FILE)
    return path


def checkpoint(folder: Path, name: str, changes: dict[str, float]) -> str:
    """Save a tiny model with some weights multiplied, and return its folder."""
    model = tiny_models.build(name)
    with torch.no_grad():
        for weight, factor in changes.items():
            model.get_parameter(weight).mul_(factor)
    model.save_pretrained(folder)
    tiny_models.build_tokenizer().save_pretrained(folder)
    return str(folder)


def overflowing_t5(folder: Path) -> Path:
    """Save a small T5 whose second feed-forward layer overflows in float16, and return its folder."""
    dense = "encoder.block.1.layer.1.DenseReluDense"
    return Path(checkpoint(folder, "t5", {f"{dense}.wi.weight": 600.0, f"{dense}.wo.weight": 600.0}))


def overflowing_linear() -> nn.Sequential:
    """Return one linear layer, in a model, whose sums overflow in float16."""
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.fill_(2.0**15)
    return nn.Sequential(layer)

"""Built-in pictures and sounds, made by formulas and a generator of their own; and readers for the user's files."""

from __future__ import annotations

import math
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from overflow_lab.errors import UsageError, one_line

SEED = 20
NO_PILLOW = "pictures need pillow, which is not installed; pip install 'overflow-lab[images]'"


def pictures(size: tuple[int, int], channels: int = 3) -> Iterator[Any]:
    """Yield eight uint8 arrays of (height, width, 3): gradient, cloud, chequers, noise, black, white, line, rings."""
    height, width = size
    generator = torch.Generator().manual_seed(SEED)
    rows = torch.linspace(0, 1, height)[:, None].expand(height, width)
    columns = torch.linspace(0, 1, width)[None].expand(height, width)
    coarse = torch.rand(1, 3, 5, 5, generator=generator)
    cloud = torch.nn.functional.interpolate(coarse, size=size, mode="bicubic", align_corners=True)[0].permute(1, 2, 0)
    board = ((torch.arange(height)[:, None] // 8 + torch.arange(width)[None] // 8) % 2).float()
    line = torch.zeros(height, width)
    line[height // 2] = 1.0
    planes = (
        torch.stack([rows, columns, 1 - rows], dim=-1),
        cloud + 0.05 * torch.randn(height, width, 3, generator=generator),
        board,
        torch.rand(height, width, 3, generator=generator),
        torch.zeros(height, width),
        torch.ones(height, width),
        line,
        0.5 + 0.5 * torch.sin(40 * (rows**2 + columns**2)),
    )
    for plane in planes:
        colour = plane if plane.dim() == 3 else plane[..., None].expand(height, width, 3)
        yield (colour.clamp(0, 1) * 255).round().to(torch.uint8).numpy()


def sounds(rate: int) -> Iterator[Any]:
    """Yield six float32 arrays at `rate` Hz, 0.4 to 2 seconds: a chirp, noise, chord, silence, clicks, loud chirp."""
    generator = torch.Generator().manual_seed(SEED)

    def time(seconds: float) -> torch.Tensor:
        return torch.arange(int(seconds * rate)) / rate

    def chirp(seconds: float) -> torch.Tensor:
        t = time(seconds)
        return torch.sin(2 * math.pi * (100 * t + 1500 / seconds * t**2))

    clicks = torch.zeros(int(0.6 * rate))
    clicks[:: max(1, rate // 10)] = 1.0
    chord = sum(torch.sin(2 * math.pi * pitch * time(0.8)) for pitch in (220.0, 277.2, 329.6))
    for sound in (
        0.5 * chirp(0.5),
        0.1 * torch.randn(int(0.5 * rate), generator=generator),
        0.2 * torch.as_tensor(chord),
        torch.zeros(int(0.4 * rate)),
        clicks,
        0.99 * chirp(2.0),
    ):
        yield sound.float().numpy()


def spectrum(sound: torch.Tensor, bins: int, frames: int) -> torch.Tensor:
    """Return a plain log power spectrum of `sound`, float32 (bins, frames), scaled as Whisper's: about -1 to 1.

    It stands in for a feature extractor that is missing: the right range and texture, not the right filters.
    """
    window, hop = 400, 160
    needed = window + hop * (frames - 1)
    padded = torch.nn.functional.pad(sound[:needed].float(), (0, max(0, needed - len(sound))))
    power = torch.fft.rfft(padded.unfold(0, window, hop) * torch.hann_window(window), dim=-1).abs().square()
    pooled = torch.nn.functional.adaptive_avg_pool1d(power[None], bins)[0].T
    logs = pooled.clamp_min(1e-10).log10()
    return (torch.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0


def open_picture(path: Path) -> Any:
    """Return the picture at `path` as a uint8 array of (height, width, 3); UsageError when it is none."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError(NO_PILLOW) from error
    try:
        with Image.open(path) as image:
            return np.array(image.convert("RGB"))
    except Exception as error:
        raise UsageError(
            f"{path.name} is no picture that can be read ({one_line(error, limit=120)}); leave it out"
        ) from error


def open_sound(path: Path, *, rate: int) -> Any:
    """Return the 16-bit PCM WAV file at `path`, mixed to one channel, as a float32 array; UsageError for any other."""
    try:
        with wave.open(str(path), "rb") as file:
            width, channels, own_rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            data = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise UsageError(
            f"{path.name} is no WAV file that can be read ({one_line(error, limit=120)}); convert it"
        ) from error
    if width != 2 or own_rate != rate:
        raise UsageError(f"{path.name} has {8 * width} bits at {own_rate} Hz; convert it to 16 bits at {rate} Hz")
    samples = np.frombuffer(data, dtype="<i2").reshape(-1, channels).astype(np.float32)
    return samples.mean(axis=1) / 32768.0

"""The weights of a checkpoint as they lie in its files: measured block by block, without a model and without loading.

The header of a safetensors file is 8 bytes of length and a JSON object of names, dtypes, shapes and places
(https://huggingface.co/docs/safetensors, "Format"). A pickle of torch is mapped into memory by torch itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from overflow_lab.capture.statistics import Tape
from overflow_lab.errors import UsageError, one_line
from overflow_lab.ranges import Range

# Bytes that are read and measured at once; they stay in the processor's cache between the two.
BLOCK = 1 << 20
THREADS = 2
# Elements of a tensor that are kept to see how a cast rounds: 1 / sqrt(4096) = 1.6 percent is the error of that.
SAMPLE = 4096
# Rows on a tape before they are merged, of 2 kB each.
_MOST_ROWS = 1024

_SAFETENSORS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: `start` is where its bytes begin; `mapped` has it where torch has mapped it into memory.

    `dtype` is None for what is no floating tensor of torch's.
    """

    name: str
    file: Path
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    start: int = 0
    mapped: torch.Tensor | None = field(default=None, compare=False)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.elements * (self.dtype.itemsize if self.dtype else 0)

    def blocks(self, size: int = BLOCK) -> Iterator[tuple[int, int]]:
        """Yield (first element, number of elements) of each block of at most `size` bytes."""
        step = max(1, size // (self.dtype.itemsize if self.dtype else 1))
        for first in range(0, self.elements, step):
            yield first, min(step, self.elements - first)


@dataclass(frozen=True)
class Measured:
    """What was seen of a stored tensor: its range, and at most about SAMPLE elements, evenly spread, in float64."""

    range: Range
    sample: torch.Tensor


def stored_in(file: Path) -> list[Stored]:
    """Return the tensors of a file, safetensors or a pickle that torch wrote, in the order of their places.

    Raises UsageError, in one line, where it is neither, is damaged, or is a pickle of something else than tensors.
    """
    if file.suffix != ".safetensors":
        return _pickled(file)
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            size = file.stat().st_size
            if not 2 <= length <= size - 8:
                raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
            header = json.loads(opened.read(length))
            found = [_described(file, 8 + length, n, e) for n, e in header.items() if n != "__metadata__"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(file, error) from error
    end = max((8 + length + entry["data_offsets"][1] for n, entry in header.items() if n != "__metadata__"), default=0)
    if end > size:
        raise _damaged(file, ValueError(f"it ends at byte {size:,}, its tensors at {end:,}"))
    return sorted(found, key=lambda stored: stored.start)


def _described(file: Path, begin: int, name: str, entry: dict[str, Any]) -> Stored:
    start, end = entry["data_offsets"]
    made = Stored(name, file, entry["dtype"], tuple(entry["shape"]), _SAFETENSORS.get(entry["dtype"]), begin + start)
    if made.dtype is not None and made.nbytes != end - start:
        raise ValueError(f"{name} has {end - start:,} bytes for a shape of {made.shape}")
    return made


def _damaged(file: Path, error: Exception) -> UsageError:
    return UsageError(f"{file.name} is damaged, or no safetensors file ({one_line(error, limit=160)}); get it again.")


def _pickled(file: Path) -> list[Stored]:
    """Return the tensors of a pickle, mapped; no code in it is run (weights_only)."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # an old format, no pickle at all, or one that wants to run code
        reason = one_line(error, limit=120)
        raise UsageError(f"{file.name} cannot be read without loading ({reason}); save it as safetensors.") from error
    while isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    named = loaded.items() if isinstance(loaded, dict) else ()
    tensors = [(str(name), t.detach()) for name, t in named if isinstance(t, torch.Tensor)]
    if not tensors:
        raise UsageError(f"{file.name} holds no tensors by name; give a checkpoint, or save its state_dict().")
    return [Stored(n, file, _name(t), tuple(t.shape), _floating(t), mapped=t.reshape(-1)) for n, t in tensors]


def _floating(tensor: torch.Tensor) -> torch.dtype | None:
    return tensor.dtype if tensor.dtype in _SAFETENSORS.values() and tensor.layout == torch.strided else None


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def measure(found: Sequence[Stored], *, threads: int = THREADS, block: int = BLOCK) -> list[Measured]:
    """Return what each tensor holds, in the same order. All are floating.

    Reads each byte once; memory is a block and some rows for each thread, and the samples. The numbers do not depend
    on which thread is the faster one: each takes its own blocks, one after the other.
    """
    work = [(place, *part) for place, stored in enumerate(found) for part in stored.blocks(block)]
    readers = [_Reader(found, block) for _ in range(max(1, threads))]
    with ThreadPoolExecutor(len(readers)) as pool:
        runs = [pool.submit(reader.read, work[number :: len(readers)]) for number, reader in enumerate(readers)]
        for run in runs:
            run.result()
    return [
        _together([reader.parts[place] for reader in readers if place in reader.parts]) for place in range(len(found))
    ]


def each_block(stored: Stored, *, block: int = BLOCK) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor in blocks, each valid until the next one is asked for."""
    reader = _Reader([stored], block)
    try:
        for first, count in stored.blocks(block):
            yield reader.block(stored, first, count)
    finally:
        reader.close()


def _together(parts: list[Measured]) -> Measured:
    """Return what several threads have seen of one tensor."""
    if not parts:
        return Measured(Range(), torch.empty(0, dtype=torch.float64))
    total = parts[0].range
    for part in parts[1:]:
        total = total + part.range
    return Measured(total, torch.cat([part.sample for part in parts]))


class _Reader:
    """One thread's buffer, open file and tape; `parts` is what it has seen of each tensor, by its place."""

    def __init__(self, found: Sequence[Stored], block: int) -> None:
        self.parts: dict[int, Measured] = {}
        self._found = found
        self._memory = torch.empty(max(block, 16), dtype=torch.uint8)
        self._view = memoryview(self._memory.numpy())  # type: ignore[arg-type]  # an array is a buffer
        self._tape = Tape(torch.device("cpu"))
        self._file: IO[bytes] | None = None
        self._path: Path | None = None
        self._noted: list[tuple[int, int]] = []
        self._samples: list[tuple[int, torch.Tensor]] = []

    def read(self, work: Sequence[tuple[int, int, int]]) -> None:
        """Measure these blocks: (place of the tensor, first element, number of elements)."""
        try:
            for place, first, count in work:
                stored = self._found[place]
                values = self.block(stored, first, count)
                self._noted.append((place, self._tape.measure(values)))
                step = max(1, stored.elements // SAMPLE)
                self._samples.append((place, values[(-first) % step :: step].to(torch.float64)))
                if len(self._tape) >= _MOST_ROWS:
                    self._settle()
            self._settle()
        finally:
            self.close()

    def block(self, stored: Stored, first: int, count: int) -> torch.Tensor:
        """Return elements of a tensor, [count]: in this thread's buffer, or where torch has mapped them."""
        if stored.mapped is not None:
            return stored.mapped[first : first + count]
        assert stored.dtype is not None
        size = count * stored.dtype.itemsize
        self._fill(stored.file, stored.start + first * stored.dtype.itemsize, size)
        return self._memory[:size].view(stored.dtype)

    def _fill(self, path: Path, start: int, size: int) -> None:
        try:
            if self._file is None or self._path != path:
                self.close()
                self._file, self._path = path.open("rb", buffering=0), path
            self._file.seek(start)
            done = 0
            while done < size:
                got = self._file.readinto(self._view[done:size])  # type: ignore[attr-defined]
                if not got:
                    raise OSError(f"it ended at byte {start + done:,}")
                done += got
        except OSError as error:
            raise UsageError(f"{path.name} cannot be read ({one_line(error, limit=120)}); get it again.") from error

    def _settle(self) -> None:
        """Merge the rows on the tape, and the samples, into what is known of each tensor."""
        noted, self._noted = self._noted, []
        samples, self._samples = self._samples, []
        rows = self._tape.drain()
        if not noted:
            return
        places = list(dict.fromkeys(place for place, _ in noted))
        group = {place: number for number, place in enumerate(places)}
        merged = rows.merge([row for _, row in noted], [group[place] for place, _ in noted])
        for place in places:
            part = Measured(merged[group[place]], torch.cat([values for p, values in samples if p == place]))
            self.parts[place] = _together([self.parts[place], part]) if place in self.parts else part

    def close(self) -> None:
        """Close the file that is open."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

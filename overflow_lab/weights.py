"""The weights of a checkpoint, scanned in its files: what is in them, and what a cast to each precision would lose."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overflow_lab.analysis.casts import cast_of, severity_of, too_large, unsettled, worst_first
from overflow_lab.errors import UsageError
from overflow_lab.formats import FORMATS, FloatFormat, get_format, headroom_bits, round_to
from overflow_lab.recording import CastRow, TensorRow
from overflow_lab.recording.codec import plain

if TYPE_CHECKING:
    import pandas as pd

    from overflow_lab.capture.stored import Measured, Stored
    from overflow_lab.progress import Progress

INDEX = ".index.json"
# Files of tensors that are measured together, between two steps of the progress.
_AT_ONCE = 256


@dataclass(frozen=True)
class Weights:
    """What is in the files of a checkpoint: a row for each floating tensor, and one for each of its casts.

    `others` are the names and kinds of tensors that are not of a floating format, which a cast leaves alone (integers,
    packed quantised weights). `nbytes` is what was read.
    """

    model: str
    files: tuple[str, ...]
    precisions: tuple[str, ...]
    tensors: tuple[TensorRow, ...]
    casts: tuple[CastRow, ...]
    others: tuple[tuple[str, str], ...] = ()
    nbytes: int = 0

    def lost(self, precision: str) -> list[CastRow]:
        """Return the casts to a precision that lose more than bits of the mantissa, the worst first."""
        rows = [row for row in self.casts if row.precision == precision]
        return [row for row in worst_first(rows) if row.to_infinity or row.to_zero or row.to_subnormal]

    def severity(self, precision: str) -> str:
        """Return "error" where an element becomes infinite, or is not finite already; "warning", "none"."""
        if any(row.range.nonfinite for row in self.tensors):
            return "error"
        return severity_of([row for row in self.casts if row.precision == precision])

    def summary(self, precision: str) -> dict[str, Any]:
        """Return what the casts of all weights to a precision lose together; see `CastRow` for the words.

        `headroom` is that of the largest weight, in bits; `rounding` the largest relative error of any tensor.
        """
        rows = [row for row in self.casts if row.precision == precision]
        largest = max((row.range.absmax or 0.0 for row in self.tensors), default=0.0)
        sums = {name: sum(getattr(row, name) for row in rows) for name in ("to_infinity", "to_zero", "to_subnormal")}
        return {
            "severity": self.severity(precision),
            "headroom": headroom_bits(largest, FORMATS[precision]),
            **sums,
            "tensors": len(self.lost(precision)),
            "rounding": max((row.rounding for row in rows if row.rounding is not None), default=None),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `overflow-lab weights --json` prints."""
        from overflow_lab import __version__

        made = {
            "overflow_lab": __version__,
            "schema": 1,
            "model": self.model,
            "files": self.files,
            "bytes": self.nbytes,
            "precisions": {name: self.summary(name) for name in self.precisions},
            "tensors": self.tensors,
            "casts": self.casts,
            "others": [{"name": name, "kind": kind} for name, kind in self.others],
        }
        return dict(plain(made))

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each tensor; for each precision its headroom in bits, and what the cast to it loses."""
        import pandas as pd

        casts = {(row.name, row.precision): row for row in self.casts}
        return pd.DataFrame([self._record(tensor, casts) for tensor in self.tensors])

    def _record(self, tensor: TensorRow, casts: Mapping[tuple[str, str], CastRow]) -> dict[str, Any]:
        found = tensor.range
        made: dict[str, Any] = {
            **{"name": tensor.name, "dtype": tensor.dtype, "shape": tensor.shape, "elements": found.count},
            **{"absmax": found.absmax, "smallest": found.smallest, "rms": found.rms, "nonfinite": found.nonfinite},
        }
        for name in self.precisions:
            made[f"headroom_{name}"] = headroom_bits(found.absmax or 0.0, FORMATS[name])
            for what in ("to_infinity", "to_zero", "to_subnormal", "energy_lost", "rounding"):
                made[f"{what}_{name}"] = getattr(casts[tensor.name, name], what)
        return made

    def __repr__(self) -> str:
        said = [f"{name}: {self.severity(name)}, {len(self.lost(name))} tensors lose" for name in self.precisions]
        return f"<Weights of {self.model}: {len(self.tensors)} tensors, {self.nbytes:,} bytes; {'; '.join(said)}>"


def weights(
    model: str | Path,
    *,
    precisions: Iterable[str] = ("float16", "bfloat16"),
    revision: str | None = None,
    subfolder: str | None = None,
    progress: Progress | None = None,
) -> Weights:
    """Scan the weights of a checkpoint without loading it: each byte is read once, and a block is in memory at a time.

    `model` is a file (.safetensors, a pickle such as .bin or .pt, or the index of a sharded checkpoint), a folder, or a
    hub id. `precisions` are formats ("float16", "bfloat16", "float8_e4m3fn", ...). No code of a pickle is run. Raises
    UsageError where there are no weights or a file is damaged.
    """
    from overflow_lab.capture.stored import stored_in
    from overflow_lab.progress import Silent

    names = tuple(dict.fromkeys(get_format(name).name for name in _listed(precisions)))
    files = list(_files(str(model), revision, subfolder))
    found = [stored for file in files for stored in stored_in(file)]
    floating = [stored for stored in found if stored.dtype is not None]
    told = progress or Silent()
    told.stage("reading weights", len(floating))
    tensors: list[TensorRow] = []
    casts: list[CastRow] = []
    for stored, measured in _measured(floating, told):
        tensors.append(_row(stored, measured))
        casts += [_cast(stored, measured, tensors[-1], name) for name in names]
    return Weights(
        model=str(model),
        files=tuple(file.name for file in files),
        precisions=names,
        tensors=tuple(tensors),
        casts=tuple(casts),
        others=tuple((stored.name, stored.kind) for stored in found if stored.dtype is None),
        nbytes=sum(stored.nbytes for stored in floating),
    )


def _listed(precisions: Iterable[str]) -> list[str]:
    return [precisions] if isinstance(precisions, str) else list(precisions)


def _measured(floating: Sequence[Stored], told: Progress) -> Iterator[tuple[Stored, Measured]]:
    from overflow_lab.capture.stored import measure

    for first in range(0, len(floating), _AT_ONCE):
        part = floating[first : first + _AT_ONCE]
        for pair in zip(part, measure(part), strict=True):
            told.advance()
            yield pair


def _row(stored: Stored, measured: Measured) -> TensorRow:
    module = stored.name.rpartition(".")[0]
    dtype = str(stored.dtype).removeprefix("torch.")
    return TensorRow(stored.name, module, "parameter", dtype, stored.shape, measured.range)


def _cast(stored: Stored, measured: Measured, row: TensorRow, precision: str) -> CastRow:
    fmt = FORMATS[precision]
    beyond = _beyond(stored, fmt) if unsettled(measured.range, fmt) else too_large(measured.range, fmt)
    return cast_of(row, precision, to_infinity=beyond, rounding=_rounding(measured.sample.numpy(), fmt))


def _beyond(stored: Stored, fmt: FloatFormat) -> int:
    """Count the finite elements that round to more than a format's largest value, by reading the tensor again."""
    import torch

    from overflow_lab.capture.stored import each_block

    count = 0
    for values in each_block(stored):
        large = values[(values.double().abs() > fmt.max) & torch.isfinite(values.double())].double().numpy()
        count += int((~(abs(round_to(large, fmt)) <= fmt.max)).sum())
    return count


def _rounding(values: Any, fmt: FloatFormat) -> float | None:
    """Return the relative error that rounding makes of those values that stay finite; None where there are none."""
    import numpy as np

    rounded = round_to(values, fmt)
    kept = np.isfinite(values) & np.isfinite(rounded)
    total = float(np.square(values[kept]).sum())
    if not total > 0.0:
        return None
    return float(np.sqrt(np.square(rounded[kept] - values[kept]).sum() / total))


# ---- the files ----


def _files(model: str, revision: str | None, subfolder: str | None) -> Iterator[Path]:
    """Yield the files of a checkpoint that hold its weights."""
    place = Path(model).expanduser()
    if place.is_file():
        yield from _shards(place, lambda name: place.parent / name) if place.name.endswith(INDEX) else [place]
        return
    if place.is_dir():
        folder = place / subfolder if subfolder else place
        first = _first(folder)
        if first is None:
            raise UsageError(f"{model!r} has no weights (.safetensors, .bin, .pt); give a folder or a file that has.")
        yield from _shards(first, lambda name: folder / name) if first.name.endswith(INDEX) else [first]
        return
    yield from _from_hub(model, revision, subfolder)


def _first(folder: Path) -> Path | None:
    """Return the one file of weights in a folder, or the index of several; those of transformers before any others."""
    from overflow_lab.subjects.checkpoint import PICKLES, SAFE

    named = next((folder / name for name in (*SAFE, *PICKLES) if (folder / name).is_file()), None)
    if named is not None:
        return named
    for pattern in (f"*.safetensors{INDEX}", "*.safetensors", f"*.bin{INDEX}", "*.bin", "*.pt", "*.pth"):
        found = sorted(folder.glob(pattern))
        if len(found) > 1:
            raise UsageError(f"{folder.name} has {len(found)} files like {found[0].name}; name the one that is meant.")
        if found:
            return found[0]
    return None


def _shards(index: Path, place: Any) -> Iterator[Path]:
    """Yield the files that an index names, each once, in order."""
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{index.name} is damaged, or no index of weights ({error}); get it again.") from error
    for name in names:
        path = place(name)
        if path is None or not Path(path).is_file():
            raise UsageError(f"{index.name} names {name!r}, which is not there; get the whole checkpoint.")
        yield Path(path)


def _from_hub(model: str, revision: str | None, subfolder: str | None) -> Iterator[Path]:
    from overflow_lab.subjects.checkpoint import PICKLES, SAFE, Source, read_config
    from overflow_lab.subjects.options import SubjectOptions

    source = Source(model, model, False, SubjectOptions(revision=revision, subfolder=subfolder))
    first = source.file(*SAFE, *PICKLES)
    if first is None:
        read_config(source)  # says why: no such name, no network, gated
        raise UsageError(f"{model!r} has none of {', '.join((*SAFE, *PICKLES))}; name another model, or a file.")
    yield from _shards(Path(first), source.file) if first.endswith(INDEX) else [Path(first)]

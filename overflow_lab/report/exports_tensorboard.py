"""A recording as a folder of events for TensorBoard, written without torch. A step is a layer, in order of execution.

So a curve runs through the depth of the model, and the histograms of magnitudes stand one behind the other as in the
range ladder. The names of the layers are the text `layers`, by step.
"""

from __future__ import annotations

import datetime
import importlib.util
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from overflow_lab.analysis import frame
from overflow_lab.errors import UsageError
from overflow_lab.recording import Recording
from overflow_lab.report import text
from overflow_lab.report.markdown import code
from overflow_lab.report.plots import low_precisions

# One file, of a name that says whose it is: the usual one would hold the name of the machine.
_FILE = "events.out.tfevents.{seconds}.overflow-lab"
_NAMED = 2000


def write_events(recording: Recording, folder: Path) -> Path:
    """Write one file of events into `folder`, in place of an earlier one of overflow-lab's, and return the folder.

    Raises UsageError where TensorBoard is not installed, and where `folder` is a file.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError("TensorBoard is not installed: pip install 'overflow-lab[tensorboard]'; or export to .csv.")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder.name} is a file; give a folder for TensorBoard's events.")
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob(_FILE.format(seconds="*")):
        earlier.unlink()
    time = _seconds(recording.header.created)
    layers = frame.layers(recording)
    with (folder / _FILE.format(seconds=int(time))).open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=time, file_version="brain.Event:2").SerializeToString())
        if not layers.empty:
            named = Summary(value=[_names(layers)])
            writer.write(Event(wall_time=time, step=0, summary=named).SerializeToString())
        for step, row in enumerate(layers.to_dict("records"), start=1):
            summary = Summary(value=list(_values(row, low_precisions(layers))))
            writer.write(Event(wall_time=time, step=step, summary=summary).SerializeToString())
        writer.flush()
    return folder


def _values(row: Mapping[Any, Any], names: list[str]) -> Iterator[Any]:
    """Yield a layer's scalars, missing ones left out, and the histogram of its magnitudes in float32."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    for tag, column in _tags(row, names):
        value = row.get(column)
        if value is not None and not text.missing(value):
            yield Summary.Value(tag=tag, simple_value=float(value))
    if row["exponents"]:
        yield Summary.Value(tag="log2_magnitude/float32", histo=_histogram(row["exponents"]))


def _tags(row: Mapping[Any, Any], names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield TensorBoard's tag and the column of `layers` that it shows."""
    yield "absmax/float32", "absmax"
    for column in row:
        for what in ("headroom", "flushed"):
            if str(column).startswith(f"{what}_"):
                yield f"{what}/{str(column).removeprefix(what + '_')}", str(column)
    for name in names:
        yield f"absmax/{name}", f"observed_{name}"
        yield f"nonfinite/{name}", f"nonfinite_{name}"
        yield f"relative_error/{name}", f"error_{name}"
        yield f"effective_bits/{name}", f"bits_{name}"


def _histogram(exponents: Mapping[int, int]) -> Any:
    """Return the counts by floor(log2 |x|) as buckets of log2 |x|: each ends where the next exponent begins."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    low, high = min(exponents), max(exponents)
    counts = [float(exponents.get(e, 0)) for e in range(low, high + 1)]
    middle = [(e + 0.5, n) for e, n in zip(range(low, high + 1), counts, strict=True)]
    return HistogramProto(
        min=float(low),
        max=float(high + 1),
        num=sum(counts),
        sum=math.fsum(m * n for m, n in middle),
        sum_squares=math.fsum(m * m * n for m, n in middle),
        # TensorBoard takes the first bucket to begin at minus infinity: an empty one says where it does begin.
        bucket_limit=[float(low), *(float(e + 1) for e in range(low, high + 1))],
        bucket=[0.0, *counts],
    )


def _names(layers: pd.DataFrame) -> Any:
    """Return the names of the layers by step, as TensorBoard's text plugin shows them."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    lines = ["| step | module | class |", "| --- | --- | --- |"]
    for step, row in enumerate(layers.head(_NAMED).to_dict("records"), start=1):
        port = "" if row["port"] == "output" else f" {code(row['port'])}"
        module, kind = code(text.module_name(str(row["module"]))), code(row["class_name"])
        lines.append(f"| {step} | {module.replace('|', chr(92) + '|')}{port} | {kind} |")
    if len(layers) > _NAMED:
        lines += ["", f"The first {_NAMED:,} of {len(layers):,} layers; the export as CSV has them all."]
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=["\n".join(lines).encode()], tensor_shape=shape)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag="layers", metadata=metadata, tensor=tensor)


def _seconds(created: str) -> float:
    """Return the time of the scan in seconds since 1970; 0 where it is no time."""
    try:
        return datetime.datetime.fromisoformat(created.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0

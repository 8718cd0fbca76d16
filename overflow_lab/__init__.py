"""overflow-lab: find where a model breaks in float16 or bfloat16, and why.

In one minute
-------------
A scan runs a model in float32 and in each low precision, records the range of what every module takes and returns, and
judges each precision by what reaches the output::

    import overflow_lab

    scan = overflow_lab.scan("google-t5/t5-small")          # a hub id, a folder, file.py:function, "demo"
    scan = overflow_lab.scan(model, {"input_ids": ids})     # or a module in memory and its keyword inputs
    scan                                                    # a verdict for each precision; a table in a notebook
    scan.verdicts["float16"].origin                         # the module and operation that made the first bad value
    scan.verdicts["float16"].chain                          # why: from the output back to the origin
    scan.to_frame()                                         # pandas: a row for each layer, headroom in bits
    scan.to_dict()                                          # the JSON of `overflow-lab scan --json`
    scan.save_report("t5.html")                             # one file, to attach to an issue

The module itself is never touched: scans run on copies, and leave no hook, flag or seed behind.

The pieces
----------
`scan`      runs a subject and returns a `Scan`; options are those of the command line.
`Recording` what was recorded, read again by `load(path)` without torch or the model.
`merge`     one recording of several: of other inputs, of other machines, or of the processes of one scan.
`analyze`   a recording's `Diagnosis`: `verdicts` and `findings`.
`report`    a recording's report, as HTML text.
`sites`, `layers`, `operations`, `steps`  a recording as pandas tables.
`compare`   two recordings, or two precisions of one: a `Comparison` of what got worse and better, and where.
`export`    one of these tables as a file: CSV, Parquet, JSON, or events for TensorBoard.
`range_ladder`, `error_growth`   pictures of `layers`, as matplotlib Figures; `error_staircase` of `operations`,
            `generation_timeline` of `steps`.
`remedy`    what mends a model, each remedy proven by a second scan: `Remedies`.
`finetune`  trains a copy of a model until its activations fit, by an `ActivationPenalty`, which is for your loop, too.
`weights`   what is in the files of a checkpoint, and what casts would lose, without loading it: `Weights`.
`missing_kernels`  what this torch lacks for a model in one precision.
`assert_fits`  for test suites: fails with the diagnosis unless a model works in a precision, with headroom to spare.

Words
-----
A *precision* is how a run is executed: `float16` and `bfloat16` (cast as the model's own loader does), `float16-to`
(cast by `.to()`), `float16-autocast`. *Headroom* is log2(largest finite value / largest magnitude), in bits; negative
does not fit. The *origin* is the module, and the operation in it, that made a bad value out of good ones; *carriers*
only passed it on; the *chain* leads from the output back to it. A *verdict* is `ok`, `overflow`, `nan`, `underflow`,
`precision` or `unsupported`; its severity says whether the output is wrong.

On the command line: `overflow-lab scan MODEL`, `fix MODEL`, `convert MODEL`, `finetune MODEL`, `report RECORDING`,
`diff A B`, `merge A B`, `export RECORDING FILE`, `kernels MODEL`, `weights MODEL`.
Errors that are raised on purpose derive from `OverflowLabError`.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from overflow_lab.errors import OverflowLabError, RecordingFormatError, ScanInterrupted, UsageError

__version__ = "0.1.0"

if TYPE_CHECKING:
    from overflow_lab.analysis import Diagnosis, analyze
    from overflow_lab.analysis.compare import compare
    from overflow_lab.analysis.comparison import Comparison
    from overflow_lab.analysis.frame import layers, operations, sites
    from overflow_lab.analysis.steps import steps
    from overflow_lab.kernels import MissingKernel, missing_kernels
    from overflow_lab.recording import Recording, load
    from overflow_lab.recording.merging import merge
    from overflow_lab.remedies.convert import convert
    from overflow_lab.remedies.finetune import finetune
    from overflow_lab.remedies.mending import remedy
    from overflow_lab.remedies.penalty import ActivationPenalty
    from overflow_lab.remedies.treatment import Remedies
    from overflow_lab.report import report
    from overflow_lab.report.exports_tables import export
    from overflow_lab.report.plots import error_growth, error_staircase, generation_timeline, range_ladder
    from overflow_lab.scan import Scan, scan
    from overflow_lab.testing import assert_fits
    from overflow_lab.weights import Weights, weights

# Imported on first use: torch, pandas and matplotlib take seconds, and reading a recording needs none of them.
_HOMES = {
    "Diagnosis": "overflow_lab.analysis",
    "analyze": "overflow_lab.analysis",
    "Comparison": "overflow_lab.analysis.comparison",
    "compare": "overflow_lab.analysis.compare",
    "convert": "overflow_lab.remedies.convert",
    "layers": "overflow_lab.analysis.frame",
    "operations": "overflow_lab.analysis.frame",
    "sites": "overflow_lab.analysis.frame",
    "steps": "overflow_lab.analysis.steps",
    "MissingKernel": "overflow_lab.kernels",
    "missing_kernels": "overflow_lab.kernels",
    "error_growth": "overflow_lab.report.plots",
    "error_staircase": "overflow_lab.report.plots",
    "generation_timeline": "overflow_lab.report.plots",
    "range_ladder": "overflow_lab.report.plots",
    "Recording": "overflow_lab.recording",
    "load": "overflow_lab.recording",
    "merge": "overflow_lab.recording.merging",
    "export": "overflow_lab.report.exports_tables",
    "Remedies": "overflow_lab.remedies.treatment",
    "finetune": "overflow_lab.remedies.finetune",
    "ActivationPenalty": "overflow_lab.remedies.penalty",
    "remedy": "overflow_lab.remedies.mending",
    "report": "overflow_lab.report",
    "Scan": "overflow_lab.scan",
    "scan": "overflow_lab.scan",
    "assert_fits": "overflow_lab.testing",
    "Weights": "overflow_lab.weights",
    "weights": "overflow_lab.weights",
}

__all__ = [
    "ActivationPenalty",
    "Comparison",
    "Diagnosis",
    "MissingKernel",
    "OverflowLabError",
    "Recording",
    "RecordingFormatError",
    "Remedies",
    "Scan",
    "ScanInterrupted",
    "UsageError",
    "Weights",
    "__version__",
    "analyze",
    "assert_fits",
    "compare",
    "convert",
    "error_growth",
    "error_staircase",
    "export",
    "finetune",
    "generation_timeline",
    "layers",
    "load",
    "merge",
    "missing_kernels",
    "operations",
    "range_ladder",
    "remedy",
    "report",
    "scan",
    "sites",
    "steps",
    "weights",
]


def __getattr__(name: str) -> Any:
    """Import a public name where it lives."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)


class _Package(types.ModuleType):
    """Keeps `overflow_lab.scan` and `.report` the functions, also after Python binds the modules of those names."""

    def __setattr__(self, name: str, value: Any) -> None:
        bound = getattr(value, name) if name in _HOMES and isinstance(value, types.ModuleType) else value
        super().__setattr__(name, bound)


sys.modules[__name__].__class__ = _Package

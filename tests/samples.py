"""Writes the sample reports below reports/samples/: `make samples`, or `python -m tests.samples`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import overflow_lab

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "reports" / "samples"


@dataclass(frozen=True)
class Sample:
    """A sample report: what is scanned, what it shows, and the verdict and mechanism that it must come to."""

    name: str
    model: str
    shows: str
    expected: Mapping[str, tuple[str, str | None]]

    @property
    def recording(self) -> Path:
        """Where the recording is kept."""
        return FOLDER / f"{self.name}.jsonl.gz"

    @property
    def report(self) -> Path:
        """Where the report is kept."""
        return FOLDER / f"{self.name}.html"


SAMPLES = (
    Sample(
        "demo",
        "demo",
        "a trained T5 that overflows in float16 and is right in bfloat16: origin, chain, answers of beam search",
        {
            "float16": ("overflow", "matmul-overflow"),
            "bfloat16": ("ok", None),
            "float16-to": ("overflow", "matmul-overflow"),
        },
    ),
    Sample(
        "positions-bf16",
        "tests/sample_models.py:positions",
        "an encoder that counts its positions in bfloat16: everything is finite, and the output is wrong",
        {"float16": ("ok", None), "bfloat16": ("precision", "position-rounding")},
    ),
    Sample(
        "fourier-kernel",
        "tests/sample_models.py:fourier",
        "an FNet whose Fourier transform has no kernel in half precision on a CPU",
        {"float16": ("unsupported", "kernel-missing"), "bfloat16": ("unsupported", "kernel-missing")},
    ),
)


def scan(sample: Sample, recording: Path | None = None) -> overflow_lab.Scan:
    """Return the scan of a sample, recorded in a file if one is given; the model is named by its path from the root."""
    file, colon, function = sample.model.partition(":")
    model = f"{ROOT / file}:{function}" if colon else sample.model
    return overflow_lab.scan(model, recording=recording, store_texts=sample.model == "demo")


def page() -> str:
    """Return the page beside the samples that says what each is."""
    rows = [f"| [{s.name}.html]({s.name}.html) | `overflow-lab scan {s.model}` | {s.shows} |" for s in SAMPLES]
    return _PAGE.format(rows="\n".join(rows))


def write(samples: Iterable[Sample] = SAMPLES) -> None:
    """Scan each sample anew; write its recording, its report and the page beside them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for sample in samples:
        sample.recording.unlink(missing_ok=True)
        found = scan(sample, sample.recording)
        found.save_report(sample.report)
        sys.stdout.write(f"{sample.report.relative_to(ROOT)}  {sample.report.stat().st_size // 1000} kB\n")
    (FOLDER / "README.md").write_text(page(), encoding="utf-8")


_PAGE = """\
# Sample reports

Written by `make samples`, and kept true by `tests/test_sample_reports.py`. A tracker or a repository shows an HTML
file as text: download it and open it in a browser. Beside each report lies its recording, from which
`overflow-lab report NAME.jsonl.gz` makes the report again.

| report | made by | what it shows |
|---|---|---|
{rows}

The models are small: the [demo](../../docs/demo.md), and two of
[tests/sample_models.py](../../tests/sample_models.py).
[How to read a report](../../docs/report.md), [how to read a verdict](../../docs/verdict.md).
"""


if __name__ == "__main__":
    write()

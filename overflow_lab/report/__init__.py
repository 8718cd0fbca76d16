"""Reporting: what a diagnosis looks like as a page, on a terminal, as pictures and as JSON. Never imports torch."""

from __future__ import annotations

from pathlib import Path

from overflow_lab.analysis.results import Diagnosis
from overflow_lab.recording import Recording
from overflow_lab.report.writing import write_file


def report(recording: Recording, diagnosis: Diagnosis | None = None) -> str:
    """Return a recording's report as one HTML page; it is analysed first where no diagnosis is given."""
    from overflow_lab.report.html import render  # matplotlib and pandas take seconds to import

    if diagnosis is None:
        from overflow_lab.analysis import analyze

        diagnosis = analyze(recording)
    return render(recording, diagnosis)


def write_report(recording: Recording, diagnosis: Diagnosis, path: Path) -> Path:
    """Write the report to `path`, making its folder, and return it. Raises UsageError when it cannot be written."""
    return write_file(path, report(recording, diagnosis), "the report")

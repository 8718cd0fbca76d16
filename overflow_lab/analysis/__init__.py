"""What a recording means: tables, findings, verdicts. Reads the recording only and never imports torch."""

from overflow_lab.analysis.results import Diagnosis, Effect, Finding, Link, Origin, Verdict
from overflow_lab.analysis.verdicts import analyze

__all__ = ["Diagnosis", "Effect", "Finding", "Link", "Origin", "Verdict", "analyze"]

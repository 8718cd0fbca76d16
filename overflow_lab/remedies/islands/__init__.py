"""The smallest fp32 islands: parts of a model which, kept in float32, mend what breaks in half precision.

The search widens from where the diagnosis says that values break until the model is mended, leaves out what is not
needed (delta debugging), and has every set that it returns confirmed by a scan. Two kinds of members: modules, on their
uncast weights (`keep`), with their outputs cast back or left in float32, and operations of a module's own code, whose
results stay wide until others are given them (`operations`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overflow_lab.progress import Progress
    from overflow_lab.remedies.islands.proposals import Islands
    from overflow_lab.scan import Scan
    from overflow_lab.subjects import Subject

RUNS = 60


def propose(
    subject: Subject, found: Scan, precision: str, *, progress: Progress | None = None, runs: int = RUNS
) -> Islands:
    """Return the islands that mend `precision`, the best first, with how many runs it took; where there are none short
    of the whole model, the reason.

    At most `runs` runs are made: a forward of the first batches is one, and so is a scan.
    """
    from overflow_lab.remedies.islands.proposals import islands

    return islands(subject, found, precision, progress=progress, runs=runs)

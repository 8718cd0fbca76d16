"""The command line: a map onto the Python API. Only this package prints."""

from __future__ import annotations

import sys

from overflow_lab.cli.app import run


def main() -> None:
    """Run `overflow-lab` with the arguments of the process, and exit with its code (see design: 0, 1, 2 or 3)."""
    sys.exit(run(sys.argv[1:]))

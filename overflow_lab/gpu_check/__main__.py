"""`python -m overflow_lab.gpu_check`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from overflow_lab.gpu_check.report import main
    except ModuleNotFoundError as error:
        sys.stdout.write(
            f"gpu_check: {error.name} is not installed; it needs torch 2.6 and transformers 5, or later.\n"
        )
        sys.exit(2)
    sys.exit(main())

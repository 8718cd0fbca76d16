"""`python -m overflow_lab.cli`."""

from overflow_lab.cli import main

main()

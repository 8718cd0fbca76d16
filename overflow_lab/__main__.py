"""`python -m overflow_lab`."""

from overflow_lab.cli import main

main()

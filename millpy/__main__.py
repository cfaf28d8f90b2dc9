"""`python -m millpy`."""

from millpy.cli import main

main()

"""Entry point of `python -m millpy`."""

from millpy.cli.app import main

main()

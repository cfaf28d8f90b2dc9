"""Keeps the devices of a graph analyzed: `python -m services.analytics GRAPH.py --to DIR`, as `millpy analytics`."""

import sys

from millpy.cli.app import main

if __name__ == "__main__":
    sys.argv.insert(1, "analytics")
    main()

"""Brings the database to this version and deploys graphs: `python -m services.migrate [--roles] [GRAPH.py ...]`."""

import sys

from millpy.service import prepare

if __name__ == "__main__":
    sys.exit(prepare(sys.argv[1:]))

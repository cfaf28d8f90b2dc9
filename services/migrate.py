"""Migrate the database to this version and deploy graphs: `python -m services.migrate [--roles] [GRAPH.py ...]`."""

import sys

from millpy.process.service import prepare

if __name__ == "__main__":
    sys.exit(prepare(sys.argv[1:], usage=__doc__))

"""A worker: `python -m services.worker GRAPH.py [COMPUTATION ... | --no-injectors]`; the environment configures it."""

import sys

from millpy.process.service import serve

if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], usage=__doc__))

"""A worker: `python -m services.worker GRAPH.py [COMPUTATION ... | --no-injectors]`; settings by the environment."""

import sys

from millpy.service import serve

if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))

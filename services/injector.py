"""A worker that takes only the injectors of a graph: `python -m services.injector GRAPH.py [INJECTOR ...]`."""

import sys

from millpy.service import injectors, serve

if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], injectors))

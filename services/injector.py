"""A worker that runs only the injectors of a graph: `python -m services.injector GRAPH.py [INJECTOR ...]`."""

import sys

from millpy.process.service import injectors, serve

if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], injectors, usage=__doc__))

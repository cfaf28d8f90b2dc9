"""A worker that writes only a graph's archives: `python -m services.archiver GRAPH.py [ARCHIVE ...]`."""

import sys

from millpy.process.service import archives, serve

if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], archives, usage=__doc__))

"""A service that audits each hour of a graph when it is final: `python -m services.auditor GRAPH.py [OPTION ...]`."""

import sys

from millpy.cli.app import main

if __name__ == "__main__":
    sys.argv[1:] = ["audit", *sys.argv[1:], "--follow"]
    main()

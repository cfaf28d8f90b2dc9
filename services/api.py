"""The API: `python -m services.api`; the environment configures it."""

import sys

from millpy.cli.app import main

if __name__ == "__main__":
    sys.argv[1:] = ["api", *sys.argv[1:]]
    main()

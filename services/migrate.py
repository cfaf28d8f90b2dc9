"""Brings the database to the schema of this version and ends: `python -m services.migrate`."""

import sys

from millpy.service import prepare

if __name__ == "__main__":
    sys.exit(prepare())

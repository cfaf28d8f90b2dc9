"""A file of records, looked up in a table that changes."""

from __future__ import annotations

import os

from millpy import File
from tests.crash.lookups import graph_of

graph = graph_of(File(os.environ["CRASH_INPUT"]))

"""Two files of records, joined by key and time in each way, and windows over the joined records."""

from __future__ import annotations

import os

from millpy import File
from tests.crash.joins import graph_of

graph = graph_of(File(os.environ["CRASH_INPUT"]), File(os.environ["CRASH_INPUT"] + ".right"))

"""Sessions that merge and are retracted, and their totals, over a file."""

from __future__ import annotations

import os

from millpy import File, SessionWindows, seconds
from tests.conformance.test_retracting_tables import GAP, graph_of

graph = graph_of(File(os.environ["CRASH_INPUT"]), SessionWindows(seconds(GAP)))

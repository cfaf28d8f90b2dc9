"""Lines of a user's file that make runs differ are found, and those that do not are left alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from millpy import Computation, Context, Count, EventTime, Files, FixedWindows, Graph, minutes
from millpy.testing.crash_test.nondeterminism import shape_reasons, suspects

BODY = """
import random, time, uuid
from datetime import datetime
LAST = {{}}
TOTALS = [0]
LIMIT = 5
class Spikes:
    limit = 3
    def process_record(self, context, record):
        seen = context[Spikes.seen]
        seen.n += 1
        local = {{}}
        local["a"] = LIMIT
        {line}
"""


def found_in(tmp_path: Path, line: str) -> list[str]:
    path = tmp_path / "graph.py"
    path.write_text(BODY.format(line=line))
    return [suspect.why for suspect in suspects(f"{path}:graph")]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("record.value += random.gauss(0, 1)", "`random.gauss` differs in every run"),
        ("context.produce(uuid.uuid4())", "`uuid.uuid4` differs in every run"),
        ("context.produce(datetime.now())", "`datetime.now` reads the clock"),
        ("context.produce(time.time())", "`time.time` reads the clock"),
        ("context.set_timer('t', at=1, processing=True)", "processing-time timer"),
        ("LAST[record.device] = 1", "`LAST` is kept outside of the context"),
        ("LAST.setdefault(record.device, []).append(1)", "`LAST` is kept outside of the context"),
        ("TOTALS[0] += 1", "`TOTALS` is kept outside of the context"),
        ("self.seen = {}", "`self.seen` is kept outside of the context"),
        ("self.counts[record.device] += 1", "`self.counts` is kept outside of the context"),
        ("global LIMIT", "`LIMIT` is kept outside of the context"),
        ("names = [name for name in set(record.names)]", "`set(record.names)` iterates over a set"),
        ("context.produce(hash(record.device))", "`hash` of text differs in every process"),
    ],
)
def test_suspect_line_is_found(tmp_path: Path, line: str, word: str) -> None:
    found = found_in(tmp_path, line)

    assert len(found) == 1
    assert word in found[0]


@pytest.mark.parametrize(
    "line",
    [
        "context.produce(record.value)",
        "local.update(a=1)",
        "for name in sorted(set(record.names)): pass",
        "x = self.limit",
    ],
)
def test_harmless_line_is_not_suspected(tmp_path: Path, line: str) -> None:
    assert found_in(tmp_path, line) == []


class Reading(msgspec.Struct):
    device: str
    at: int


class Nothing(Computation):
    def process_record(self, context: Context, record: Reading) -> None:
        context.produce(record)


def test_shape_of_a_graph_gives_reasons() -> None:
    graph = Graph("shapes")
    time = EventTime("at", unit="s", sorted=True)
    one = graph.inject("one", Files("1"), schema=Reading, event_time=time)
    other = graph.inject("other", Files("2"), schema=Reading, event_time=time)
    one.key_by("device").window(FixedWindows(minutes(1))).aggregate(n=Count()).to_table("plain")
    both = [one.key_by("device"), other.key_by("device")]
    joined = graph.process(Nothing(), name="joined", inputs=both, output=Reading)
    joined.to_table("joined")
    joined.key_by("device").window(FixedWindows(minutes(1))).aggregate(n=Count()).to_table("behind")

    assert shape_reasons(graph, "plain") == []
    assert ["several sources (one, other)" in reason for reason in shape_reasons(graph, "joined")] == [True]
    assert len(shape_reasons(graph, "behind")) == 2
    assert shape_reasons(graph, "late records") == []

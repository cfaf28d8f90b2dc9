"""Changed code of a `WindowFunction` over stored windows: refused, or the open windows stay what they were."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.commands import millpy as run
from tests.crash.graph_files import DEVICES, END, MIDDLE, SOURCE, drop, one, rows
from tests.crash.harness import Worker, committed

GRAPH = (
    SOURCE
    + '''
SLACK = 0

def start_of(at):
    return at - timedelta(seconds=(at.second - SLACK) % 60)

class Minutes(WindowFunction):
    length = minutes(1)

    def assign(self, record, at, key):
        return [(start_of(at), start_of(at) + self.length)]

class Visits(WindowFunction):
    """Windows that merge."""
    merges = True

    def __init__(self, gap_s):
        self.gap_s = gap_s

    def assign(self, record, at, key):
        return [(at, min(at + timedelta(seconds=self.gap_s), at.replace(second=0) + minutes(1)))]

    def merge(self, window, others):
        return super().merge(window, others)

for windows in (Minutes(), Visits(5)):
    keyed = source.key_by("device").window(windows, name=type(windows).__name__.lower())
    keyed.aggregate(n=Count(), total=Sum("value")).to_table(type(windows).__name__.lower(), history=True)
'''
)
REFUSED = {
    "the code of assign": ("min(at +", "max(at + timedelta(0), at +"),
    "the code of merge": ("return super().merge(window, others)", "return list(super().merge(window, others))"),
    "a constant of the class": ("length = minutes(1)", "length = minutes(2)"),
    "a parameter": ("Visits(5)", "Visits(6)"),
    "a bound": ("merges = True", "merges = True\n    length_max = hours(2)"),
    "the name": ("Minutes", "Spans"),
}
ROWS = """
SELECT device, extract(epoch FROM window_start)::int, n::int, total::int8 FROM factory.{}
 WHERE window_start < to_timestamp(900)
"""


def changed(old: str, new: str) -> str:
    assert old in GRAPH
    return GRAPH.replace(old, new)


def wanted(slack: int) -> Counter[tuple[str, int, int, int]]:
    """Device, start, number and total of each minute; those of later records begin that many seconds later."""
    found: dict[tuple[str, int], list[int]] = {}
    for device in range(DEVICES):
        for at in range(END):
            later = slack if at >= MIDDLE else 0
            found.setdefault((f"d{device}", (at - later) // 60 * 60 + later), []).append(at * 10 + device)
    return Counter((*name, len(values), sum(values)) for name, values in found.items())


def test_code_of_windows_is_refused_if_it_changed_and_taken_if_it_means_the_same(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "feed").mkdir()
    (tmp_path / "old.py").write_text(GRAPH)
    drop(tmp_path, 0, MIDDLE)
    taken = "SELECT coalesce(sum(consumed), 0) FROM millpy.accounting WHERE consumer IN ('minutes', 'visits')"
    with Worker(tmp_path, database_url, tmp_path, graph=tmp_path / "old.py") as old:
        old.await_while_running(lambda: bool(committed(database_url)), "it is deployed")
        old.await_while_running(lambda: one(database_url, taken) == 2 * MIDDLE * DEVICES, "the first half")
        old.kill()
    before = committed(database_url)
    for what, (text, other) in REFUSED.items():
        (tmp_path / "other.py").write_text(changed(text, other))
        assert "generation=" in run("deploy", "other.py", "--database", database_url, status=2), what
    (tmp_path / "other.py").write_text(changed(*REFUSED["the code of assign"]))
    with Worker(tmp_path, database_url, tmp_path, graph=tmp_path / "other.py") as refused:
        assert refused.process.wait(60) == 1
        assert "visits: the window changed from Visits(gap_s=5) with " in refused.log
        assert " of code " in refused.log
    assert committed(database_url) == before

    # Comments, docstrings, the class's name, the way a constant is written, and what a method calls.
    same = (
        changed("class Minutes(", "class Spans(")
        .replace("(Minutes()", "(Spans()")
        .replace("Windows that", "Those that")
    )
    same = same.replace("length = minutes(1)", "# A minute.\n    length = seconds(60)\n    stored_as = 'Minutes'")
    same = same.replace("type(windows).__name__", "(windows.stored_as or type(windows).__name__)")
    (tmp_path / "same.py").write_text(same.replace("SLACK = 0", "SLACK = 10"))
    drop(tmp_path, MIDDLE, END)
    drop(tmp_path, 1_000, 1_001)
    with Worker(tmp_path, database_url, tmp_path, graph=tmp_path / "same.py") as new:
        new.await_while_running(lambda: one(database_url, taken) == 2 * (END + 1) * DEVICES, "all of it")

    for table, slack in (("minutes", 10), ("visits", 0)):
        assert Counter(rows(database_url, ROWS.format(table))) == wanted(slack), table
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []

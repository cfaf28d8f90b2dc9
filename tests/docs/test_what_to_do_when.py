"""Each situation of docs/what-to-do-when.md happens, and the commands of its section show it and end it."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from millpy.admin.queries import Admin
from millpy.model.time import INSTANT_MIN
from tests.commands import millpy
from tests.crash.harness import await_true
from tests.docs.blocks import ROOT, blocks_of
from tests.docs.commands import commands_in
from tests.forked import ForkedProcess, fork_millpy

PAGE = ROOT / "docs" / "what-to-do-when.md"
SITUATIONS = re.findall(r"^## … (.+)$", PAGE.read_text(), re.MULTILINE)
EIGHT = datetime(2026, 11, 26, 8, tzinfo=UTC)
IDLE = '    event_time=EventTime("at", max_disorder=seconds(10)),\n    idle=AdvanceWithClock(after=seconds(1)),\n'


class Plant:
    """The graph of the page in a directory, with its database, its feed and its workers."""

    def __init__(self, directory: Path, database_url: str) -> None:
        self.directory = directory
        self.admin = Admin(database_url)
        self.workers: list[ForkedProcess] = []
        (graph,) = (block for block in blocks_of(PAGE) if block.options.get("title") == "plant.py")
        (directory / "incoming").mkdir()
        self.graph = directory / "plant.py"
        self.graph.write_text(graph.body)

    def feed(self, name: str, *readings: tuple[str, int, Any], raw: Sequence[str] = ()) -> None:
        """Write a file of readings (device, minute after eight, temperature) and wait until it was read."""
        lines = [
            json.dumps({"device": device, "at": (EIGHT + timedelta(minutes=minute)).isoformat(), "temperature": value})
            for device, minute, value in readings
        ]
        before, hidden = self.injected(), self.directory / "incoming" / f".{name}"
        hidden.write_text("".join(f"{line}\n" for line in [*lines, *raw]))
        hidden.rename(hidden.with_name(name))
        await_true(lambda: self.injected() == before + len(lines) + len(raw), f"{name} is read")

    def injected(self) -> int:
        (row,) = self.admin.ask("SELECT coalesce(sum(injected), 0)::int AS n FROM millpy.sources")
        return int(row["n"])

    def change(self, before: str, after: str) -> None:
        """Change the graph's file."""
        text = self.graph.read_text()
        assert before in text
        self.graph.write_text(text.replace(before, after))

    def work(self) -> ForkedProcess:
        """Begin a worker, and wait until it owns something."""
        count = "SELECT count(DISTINCT worker_id)::int AS n FROM millpy.watermarks WHERE live"
        (before,) = self.admin.ask(count)
        self.workers.append(fork_millpy(self.directory, "run", "plant.py"))
        await_true(lambda: self.admin.ask(count)[0]["n"] > before["n"], "the worker owns intervals")
        return self.workers[-1]

    def rest(self) -> None:
        """Drain the workers."""
        for worker in self.workers:
            worker.terminate()
        for worker in self.workers:
            worker.communicate(60)
        self.workers.clear()

    def means(self, schema: str = "plant") -> dict[tuple[str, int], float]:
        """Rows of `per_minute`: device and minute after eight -> mean."""
        minute = "extract(epoch FROM window_start - :eight)::int / 60"
        rows = self.admin.ask(f"SELECT device, {minute} AS minute, mean FROM {schema}.per_minute", eight=EIGHT)
        return {(row["device"], row["minute"]): row["mean"] for row in rows}

    def has_watermarks(self, graph: str) -> bool:
        """Tell whether every interval of a graph has a watermark."""
        of_graph = "FROM mill.intervals JOIN mill.graphs USING (graph_id) WHERE name = :graph"
        (row,) = self.admin.ask(f"SELECT min(low_watermark) AS least {of_graph}", graph=graph)
        return row["least"] > INSTANT_MIN


class Section:
    """The commands of a situation, each run at its turn."""

    def __init__(self, title: str) -> None:
        text = PAGE.read_text().split(f"## … {title}\n")[1].split("\n## ")[0]
        blocks = re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        self.left = [shlex.split(command)[1:] for block in blocks for command in commands_in(block)]

    def run(self) -> str:
        """Run the next command."""
        return millpy(*self.left.pop(0))

    def refused(self) -> str:
        """Run the next command, which has to be refused."""
        return millpy(*self.left.pop(0), status=2)

    def run_until(self, there: Callable[[str], bool]) -> str:
        """Run the next command again and again until it shows something."""
        command, shown = self.left.pop(0), ""

        def shows() -> bool:
            nonlocal shown
            shown = millpy(*command)
            return there(shown)

        await_true(shows, shlex.join(command))
        return shown


@pytest.fixture
def plant(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plant]:
    monkeypatch.setenv("MILLPY_DATABASE_URL", database_url)
    monkeypatch.setenv("MILLPY_LEASE_S", "3")
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.chdir(tmp_path)
    made = Plant(tmp_path, database_url)
    try:
        yield made
    finally:
        made.rest()


@pytest.fixture
def section(request: pytest.FixtureRequest) -> Iterator[Section]:
    (mark,) = request.node.iter_markers("situation")
    found, failed = Section(mark.args[0]), request.session.testsfailed
    yield found
    assert found.left == [] or request.session.testsfailed > failed, "the section has other commands"


situation = pytest.mark.situation


def test_each_situation_has_a_test() -> None:
    module = sys.modules[__name__]
    marked = [mark.args[0] for name in dir(module) for mark in getattr(getattr(module, name), "pytestmark", ())]

    assert len(SITUATIONS) == 10
    assert sorted(marked) == sorted(SITUATIONS)


@situation("the newest windows are missing")
def test_windows_that_wait_for_a_quiet_feed(plant: Plant, section: Section) -> None:
    plant.work()
    plant.feed("a.ndjson", ("kiln", 0, 20), ("kiln", 2, 21))
    assert "08:00:00" in section.run_until(lambda shown: "kiln" in shown)
    assert "08:02:00" in section.run_until(lambda shown: "kiln" in shown)
    assert "has delivered nothing later than" in section.run()
    assert ("kiln", 2) not in plant.means()
    plant.rest()
    plant.change('    event_time=EventTime("at", max_disorder=seconds(10)),\n', IDLE)
    plant.change("from millpy import ", "from millpy import AdvanceWithClock, ")

    assert "AdvanceWithClock" in section.run()
    section.run()
    plant.work()

    await_true(lambda: plant.means().get(("kiln", 2)) == 21, "the clock closes the window")


@situation("a source is disconnected")
def test_a_directory_that_is_away(plant: Plant, section: Section) -> None:
    plant.work()
    plant.feed("a.ndjson", ("kiln", 0, 20))
    incoming, away = plant.directory / "incoming", plant.directory / "away"
    incoming.rename(away)

    section.run_until(lambda shown: "incoming" in shown)
    assert "readings" in section.run()
    away.rename(incoming)

    section.run_until(lambda shown: shown.count("source_connected") >= 1)
    plant.feed("b.ndjson", ("kiln", 1, 20))


@situation("a source is paused")
def test_a_feed_that_breaks_altogether(plant: Plant, section: Section) -> None:
    plant.work()
    plant.feed("a.ndjson", raw=['{"device":"kiln"}'] * 120)

    section.run_until(lambda shown: "records are dead letters, more than 50%" in shown)
    assert section.run().count("undecodable") == 3
    with pytest.raises(AssertionError):
        await_true(lambda: plant.injected() > 120, "nothing behind the pause is taken", within_s=1)
    section.run()

    plant.feed("b.ndjson", ("kiln", 0, 20))
    assert "running" in millpy("sources", "list", "plant.py")


@situation("a payload cannot be read")
def test_one_payload_that_cannot_be_read(plant: Plant, section: Section) -> None:
    plant.work()
    plant.feed("a.ndjson", ("kiln", 0, 20), ("kiln", 0, "warm"), ("kiln", 5, 20))
    await_true(lambda: ("kiln", 0) in plant.means(), "the window is over")

    section.run_until(lambda shown: "undecodable" in shown)
    assert '"temperature": "warm"' in section.run()
    (plant.directory / "corrected.json").write_text(
        '{"device": "kiln", "at": "2026-11-26T08:00:00Z", "temperature": 30}'
    )
    assert "1 replayed" in section.run()

    await_true(lambda: plant.means()["kiln", 0] == 25, "the window has both")
    assert plant.admin.ask("SELECT state FROM millpy.dead_letters") == [{"state": "replayed"}]


@situation("records came too late")
def test_records_of_a_gateway_that_was_offline(plant: Plant, section: Section) -> None:
    plant.work()
    plant.feed("a.ndjson", ("kiln", 0, 20), ("kiln", 5, 20))
    await_true(lambda: ("kiln", 0) in plant.means(), "the window is over")
    plant.feed("b.ndjson", ("kiln", 0, 30))

    section.run_until(lambda shown: "per_minute" in shown)
    assert "readings" in section.run()
    assert "1 replayed" in section.run()

    assert "gateway was offline" in section.run()
    assert plant.means()["kiln", 0] == 25
    (row,) = plant.admin.ask("SELECT late_count FROM plant.per_minute WHERE window_start = :eight", eight=EIGHT)
    assert row == {"late_count": 1}


@situation("a key is parked")
def test_a_function_that_raises(plant: Plant, section: Section) -> None:
    plant.work()
    plant.feed("a.ndjson", ("kiln", 0, 2000), ("kiln", 1, 95), ("press", 1, 96))
    section.run_until(lambda shown: "2000.0 degrees" in shown)
    assert "parked keys: plant.check" in millpy("doctor", "plant.py")
    hot = "SELECT device, temperature FROM plant.too_hot ORDER BY at, device"
    await_true(lambda: len(plant.admin.ask(hot)) == 1, "the other key continues")
    plant.rest()
    plant.change("> 1_000", "> 10_000")
    plant.work()

    section.run()

    await_true(lambda: len(plant.admin.ask(hot)) == 3, "the key continues")
    assert [row["device"] for row in plant.admin.ask(hot)] == ["kiln", "kiln", "press"]
    assert plant.admin.ask("SELECT FROM millpy.parked") == []


@situation("a device is silent")
def test_a_device_that_sends_nothing(plant: Plant, section: Section) -> None:
    plant.work()
    plant.feed("a.ndjson", ("kiln", 0, 20), *(("press", minute, 20) for minute in range(50)))

    section.run_until(lambda shown: "kiln" in shown)
    section.run_until(lambda shown: "kiln" in shown)
    assert "08:00:00" in section.run()
    plant.feed("b.ndjson", ("kiln", 50, 20), ("press", 52, 20))

    section.run_until(lambda shown: "kiln" in shown)


@situation("a worker has died")
def test_a_worker_that_is_killed(plant: Plant, section: Section) -> None:
    killed, _ = plant.work(), plant.work()
    plant.feed("a.ndjson", ("kiln", 0, 20))
    claims = millpy("events", "plant.py", "--kind", "claimed").count("took")
    killed.send_signal(signal.SIGKILL)
    plant.feed("b.ndjson", ("kiln", 5, 20))

    await_true(lambda: plant.means() == {("kiln", 0): 20}, "the other one computes the window")
    section.run_until(lambda shown: shown.count("took") > claims)
    section.run_until(lambda shown: "all 23 intervals have an owner" in shown)


@situation("a number in a finished window is wrong")
def test_a_probe_in_the_flame(plant: Plant, section: Section) -> None:
    plant.work()
    plant.feed("a.ndjson", ("press", 1, 900), ("press", 5, 20))
    await_true(lambda: ("press", 1) in plant.means(), "the window is over")

    section.run()

    assert plant.means()["press", 1] == 22.5
    assert "mean 900 -> 22.5" in section.run()


@situation("the meaning of a step has to change")
def test_windows_of_another_length(plant: Plant, section: Section) -> None:
    plant.work()
    plant.feed("a.ndjson", ("kiln", 0, 20), ("kiln", 1, 30), ("kiln", 9, 20))
    plant.change("FixedWindows(minutes(1))", "FixedWindows(minutes(5))")
    assert "make it the next generation: Graph(…, generation=…)" in section.refused()
    plant.change('Graph("plant")', 'Graph("plant", generation=2)')

    section.run()
    plant.work()
    await_true(lambda: plant.means("plant_2") == {("kiln", 0): 25}, "generation 2 has read the files, too")
    await_true(lambda: plant.has_watermarks("plant_2"), "each of its intervals has a watermark")
    section.run()
    section.run()

    assert plant.means() == {("kiln", 0): 25}
    assert re.search(r"plant +2 +True", millpy("graphs"))

"""The commands that show what a graph has made, on the example project that `millpy init` writes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest

from millpy.admin import events as admin_events
from millpy.admin.queries import Admin
from millpy.embedded import EmbeddedPostgres
from millpy.model.checkpoint import Kind
from millpy.store.postgres.store import PostgresStore
from tests.commands import millpy, millpy_json
from tests.conformance.store_builders import MINUTE, Owner, a_graph, entries
from tests.databases import fresh_database

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Project:
    directory: Path
    url: str
    database: str

    def run(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "millpy", "run"], cwd=self.directory, env=self.environment(), check=False,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), "MILLPY_DATABASE_URL": self.url}

    def ask(self, *arguments: str, status: int = 0) -> str:
        return millpy(*arguments, "--database", self.url, status=status)

    def json(self, *arguments: str) -> Any:
        return millpy_json(*arguments, "--database", self.url)


@pytest.fixture(scope="module")
def made(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project that has run; tests only look at it."""
    directory = tmp_path_factory.mktemp("init") / "plant"
    millpy("init", str(directory))
    with fresh_database(postgres) as name:
        project = Project(directory, postgres.url(name), name)
        project.run()
        yield project


def test_written_project_accounts_for_every_line(made: Project) -> None:
    lines = (made.directory / "readings.ndjson").read_text().splitlines()

    ((source,), rows) = (found := made.json("status"))["sources"], found["accounting"]

    assert source["injected"] == len(lines)
    assert (source["duplicate"], source["dead_lettered"]) == (9, 1)
    assert [row["late"] for row in rows if row["consumer"]] == [1]
    assert all(row["balanced"] for row in rows)


def test_init_overwrites_no_file(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")

    assert millpy("init", str(tmp_path), status=2).startswith(f"millpy: {tmp_path}/README.md already exists\n  hint: ")
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "mine"


def test_windows_lists_the_newest_by_event_time(made: Project) -> None:
    rows = made.json("windows", "-n", "4")["rows"]

    assert [(row["device"], row["window_start"][11:16]) for row in rows] == [
        ("boiler", "08:08"), ("boiler", "08:09"), ("cellar", "08:09"), ("hall", "08:09"),
    ]  # fmt: skip
    assert len(made.json("windows", "temperature_1m")["rows"]) == 30


@pytest.mark.parametrize(
    ("options", "starts"),
    [
        (["--key", "hall", "--from", "2026-11-01T08:08:00Z"], ["08:08", "08:09"]),
        (["--key", "device=hall", "--to", "2026-11-01T09:02:00+01:00"], ["08:00", "08:01"]),
        (["--key", "n=13"], ["08:02"]),
        (["--key", "hall", "--open"], []),
        (["--key", "nobody"], []),
    ],
)
def test_windows_filters_by_value_and_time(made: Project, options: list[str], starts: list[str]) -> None:
    assert [row["window_start"][11:16] for row in made.json("windows", *options)["rows"]] == starts


def test_windows_follows_new_rows(made: Project, postgres: EmbeddedPostgres) -> None:
    write = """
        INSERT INTO plant.temperature_1m (device, window_start, window_end, n, mean, high, pane_index, pane_timing,
                                          late_count, interval_id, bundle)
        SELECT device, window_start + interval '1 hour', window_end + interval '1 hour', 7, mean, high, 0, 'on_time', 0,
               interval_id, bundle + 1
          FROM plant.temperature_1m WHERE device = 'hall' ORDER BY window_start DESC LIMIT 1
    """
    change = "UPDATE plant.temperature_1m SET n = 8, pane_index = 1, bundle = bundle + 1 WHERE n = 7"
    command = [sys.executable, "-m", "millpy", "windows", "--follow", "--json", "--key", "hall", "-n", "1"]
    with fresh_database(postgres, made.database) as name:
        copied = Project(made.directory, postgres.url(name), name)
        following = subprocess.Popen(command, env=copied.environment(), stdout=subprocess.PIPE, text=True)
        assert following.stdout is not None
        try:
            seen = [json.loads(following.stdout.readline())["n"]]
            for statement in (write, change):
                with psycopg.connect(copied.url, autocommit=True) as connection:
                    connection.execute(statement)
                seen.append(json.loads(following.stdout.readline())["n"])
        finally:
            following.kill()
            following.communicate()

    assert seen == [12, 7, 8]


def test_missing_tables_are_named(made: Project) -> None:
    assert made.ask("windows", "nope", status=2) == (
        "millpy: there is no result table 'nope'\n  hint: there are: plant.temperature_1m\n"
    )
    assert made.ask("windows", "-k", "devise=x", status=2).startswith(
        "millpy: plant.temperature_1m has no column 'devise'"
    )
    assert made.ask("windows", "--key", "n=many", status=2).startswith(
        'millpy: invalid input syntax for type bigint: "many"'
    )


def test_sql_only_reads(made: Project) -> None:
    asked = "SELECT device, sum(n)::int AS n, '%:x' AS other FROM plant.temperature_1m GROUP BY 1 ORDER BY 1"

    assert made.json("sql", asked)[0] == {"device": "boiler", "n": 121, "other": "%:x"}
    assert made.ask("sql", "DELETE FROM plant.temperature_1m", status=2).startswith(
        "millpy: this statement would change the database"
    )
    assert made.ask("sql", "SELECT nope FROM plant.temperature_1m", status=2).startswith('millpy: column "nope" does')


def test_sql_shows_columns_of_equal_name(made: Project) -> None:
    assert made.ask("sql", "SELECT 1, 2").splitlines()[-1].split() == ["1", "2"]
    assert made.json("sql", "SELECT 1 AS n, 2 AS n_2, 3 AS n") == [{"n": 1, "n_2": 2, "n_3": 3}]


def test_sql_shows_values_that_python_lacks(made: Project) -> None:
    statement = (
        "SELECT 'infinity'::timestamptz AS a, '20000-01-01'::date AS b, '24:00'::time AS c, 'NaN'::float8 AS d, "
        "ARRAY[timestamptz '2026-11-01 08:00:00Z'] AS e, interval '1 day 2:00:00.5' AS f, '\\x00ff'::bytea AS g, "
        "interval '99999999 years' AS h, int4range(1, 5) AS i, daterange('2026-11-01', 'infinity') AS j, "
        "int8multirange(int8range(1, 3), int8range(7, NULL)) AS k, ARRAY[numrange(NULL, 1.50, '[]')] AS l"
    )

    (row,) = made.json("sql", statement)

    assert row == {
        "a": "infinity", "b": "20000-01-01", "c": "24:00:00", "d": "NaN", "e": ["2026-11-01T08:00:00Z"],
        "f": "P1DT7200.5S", "g": "AP8=", "h": "99999999 years", "i": "[1,5)", "j": "[2026-11-01,infinity)",
        "k": "{[1,3),[7,)}", "l": ["(,1.50]"],
    }  # fmt: skip
    shown = made.ask("sql", statement).splitlines()[-1]
    assert "1 d 2 h 0.5 s" in shown and r"\x00ff" in shown and "99999999 years" in shown


def test_windows_says_why_it_shows_none(made: Project) -> None:
    assert made.ask("windows", "--to", "2000-01-01T00:00:00Z").strip() == (
        "(no rows in plant.temperature_1m match these options)"
    )


def test_events_are_described(made: Project) -> None:
    reported = {event["kind"]: event["happened"] for event in made.json("events")}

    assert reported["claimed"].endswith("took 5 intervals of readings, temperature_1m")
    assert reported["dead_lettered"].startswith("1 record of readings dead-lettered (undecodable): DecodeError")
    assert reported["late"] == "1 record came too late for temperature_1m"
    assert {event["kind"] for event in made.json("events", "--kind", "late")} == {"late"}
    assert made.json("events", "--from", "2126-01-01T00:00:00Z") == []


EVENTS = [
    (
        "deployed",
        {"version": 4, "changes": ["~ lateness", "+ table"], "watermarks": {"sums": "2026-11-26 08:00:00+00"}},
        "version 4: ~ lateness; + table; from watermark sums 2026-11-26 08:00:00+00",
    ),
    ("switched", {"from": 1, "to": 2, "by": "lea"}, "lea made generation 2 the current one; before it was 1"),
    (
        "rows_expired",
        {"table": "sums", "partitions": 1, "from": "a", "to": "b", "rows": 2, "bytes": 9},
        "sums: dropped 1 partition with 2 rows, from a to b",
    ),
    (
        "read_on",
        {"stream": "s", "partition": "p", "what": "f has grown", "windows_are_closed_to": {"sums": "c"}},
        "source s (p) is read on: f has grown; windows are closed: sums to c",
    ),
]


@pytest.mark.parametrize(("kind", "detail", "happened"), EVENTS, ids=[kind for kind, *_ in EVENTS])
def test_events_of_changes_are_sentences(kind: str, detail: dict[str, Any], happened: str) -> None:
    assert admin_events.describe(kind, detail, {}) == happened


@pytest.mark.parametrize(("partitions", "words"), [(1, "1 partition"), (2, "2 partitions")])
def test_events_use_singular_and_plural(partitions: int, words: str) -> None:
    reported = admin_events.describe("resumed", {"stream": "readings", "partitions": partitions, "by": "lea"}, {})

    assert reported == f"lea resumed source readings ({words})"


def test_events_tell_when_more_was_dead_lettered_than_they_count(
    made: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_events, "COUNTED_MAX", 1)

    found = admin_events.list_events(Admin(made.url), None, start="", kinds=["dead_lettered", "late"], limit=5)

    assert {event["happened"].split(" of ")[0].split(" came")[0] for event in found} == {"1 or more record"}


def test_fleet_has_a_line_for_each_device(made: Project) -> None:
    head, _, *lines = made.ask("fleet", "--silent", "0.1ms", "-n", "2").splitlines()

    assert head.split() == ["device", "lag", "silent", "rate", "records", "dups", "late", "dead"]
    assert len(lines) == 2 and all(len(line) <= 80 for line in lines)
    assert made.ask("fleet", "--silent", "52w").strip() == "(none)"


async def test_fleet_has_one_line_for_a_device_of_two_partitions(database_url: str) -> None:
    async with PostgresStore(database_url) as store:
        owner = Owner(store, await store.deploy(a_graph()))
        await owner.register()
        await owner.claim()
        now_us = int(datetime.now(UTC).timestamp() * 1e6)
        for interval, silent_us in zip(owner.deployment.intervals_of("readings"), (120 * MINUTE, MINUTE), strict=True):
            at = now_us - silent_us
            device = entries(Kind.FLEET, "device", ("dev-1", [10, 1, at - MINUTE, at, 0.5, now_us]))
            await owner.commit(owner.checkpoint(interval, delta=(device,)))
    project = Project(Path(), database_url, "")

    (row,) = project.json("fleet")["fleet"]

    assert (row["device"], row["records"], row["duplicates"], row["lag"]) == ("dev-1", 20, 2, "PT60S")
    assert row["source_partitions"] == ["a", "b"]
    assert project.json("fleet", "--silent", "30m")["fleet"] == []  # it is silent only in one of them


async def test_windows_tells_which_window_is_open(database_url: str) -> None:
    async with PostgresStore(database_url) as store:
        owner = Owner(store, await store.deploy(a_graph()))
        await owner.register()
        await owner.claim()
        project = Project(Path(), database_url, "")
        before = project.ask("windows", "sums_1m")
        (interval, _) = owner.deployment.intervals_of("sums")
        window = entries(Kind.WINDOW, "", ("a", [1, 2.5], f"0/{MINUTE}", 2 * MINUTE))
        await owner.commit(owner.checkpoint(interval, delta=(window,)))

    assert before == "(no rows in factory.sums_1m yet: no window is open; the watermark is at the beginning)\n"
    assert project.ask("windows", "sums_1m") == (
        "(no rows in factory.sums_1m yet: the window from 1970-01-01 00:00:00Z to 1970-01-01 00:01:00Z is open until"
        " the watermark reaches its end; `millpy watermarks --explain factory.sums` shows what it waits for)\n"
    )
    assert project.ask("windows", "alarms").startswith(
        "(no rows in factory.alarms yet: its computation has written none"
    )


def test_piped_tables_are_not_cut(made: Project) -> None:
    text = made.ask("windows", "-n", "1")

    assert text.split("\n")[0].split() == [
        "device",
        "window_start",
        "window_end",
        "n",
        "mean",
        "high",
        "late_count",
        "is_final",
    ]
    assert "\x1b" not in text


async def test_state_shows_cells_timers_and_open_windows_of_a_key(database_url: str) -> None:
    async with PostgresStore(database_url) as store:
        owner = Owner(store, await store.deploy(a_graph()))
        await owner.register()
        await owner.claim()
        (interval, _) = owner.deployment.intervals_of("sums")
        cell = entries(Kind.STATE, "usual", ("a", 1), (["a", 2], {"x": 1}), (7, 3))
        timer = entries(Kind.TIMER, "event", ("a", {"at": 1}, "quiet", 3 * MINUTE))
        window = entries(Kind.WINDOW, "", ("a", [1, 2.5], f"0/{MINUTE}", 2 * MINUTE))
        await owner.commit(owner.checkpoint(interval, delta=(cell, timer, window)))
        await owner.fold(interval)
        await owner.commit(owner.checkpoint(interval, delta=(entries(Kind.STATE, "usual", ("b", 5)),)))
    project = Project(Path(), database_url, "")

    found = project.json("state", "sums", "--key", "a")

    assert [row["value"] for row in found["state"]] == [1]
    assert [row["timer"] for row in found["timers"]] == ["quiet"]
    assert [row["value"] for row in found["windows"]] == [[1, 2.5]]
    assert [row["value"] for row in project.json("state", "factory.sums", "-k", '["a", 2]')["state"]] == [{"x": 1}]
    assert [row["value"] for row in project.json("state", "sums", "-k", "7")["state"]] == [3]
    assert [row["key"] for row in project.json("state", "sums")["state"]] == ['"a"', '"b"', "7", '["a",2]']
    assert project.ask("state", "sums", "--key", "nobody") == "nothing is stored for key nobody of sums\n"
    assert "there are: alarms, readings, sums" in project.ask("state", "nope", status=2)


def shown_on_the_first_page() -> list[tuple[str, str]]:
    """Yield (command, expected output) from docs/first-five-minutes.md."""
    page = (ROOT / "docs" / "first-five-minutes.md").read_text()
    return re.findall(r"^\$ millpy ((?:sql|windows) .*)\n((?:[^`\n]+\n)+)```", page, re.MULTILINE)


async def test_parked_lists_the_newest_keys(database_url: str) -> None:
    async with PostgresStore(database_url) as store:
        owner = Owner(store, await store.deploy(a_graph()))
        await owner.register()
        await owner.claim()
        (interval, _) = owner.deployment.intervals_of("sums")
        keys = [(f"k{number}", {"ticket": number, "parked_at": number * MINUTE}) for number in range(3)]
        await owner.commit(owner.checkpoint(interval, delta=(entries(Kind.PARKED, "key", *keys),)))
    of = ("parked", "list", "--database", database_url)

    assert [row["key"] for row in millpy_json(*of, "-n", "2")["parked"]] == ['"k1"', '"k2"']
    assert "these are the newest 2; -n shows more" in millpy(*of, "-n", "2")
    assert "newest" not in millpy(*of)
    assert json.loads(millpy("parked", "release", "sums", "--database", database_url, "--json"))["keys"] == 3


def test_first_five_minutes_page_shows_the_printed_output(made: Project) -> None:
    shown = shown_on_the_first_page()

    assert len(shown) == 2
    for command, printed in shown:
        assert made.ask(*shlex.split(command)) == printed

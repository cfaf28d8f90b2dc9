"""`millpy correct` changes a row of a finished window once, says who did it, and keeps what was there before."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import psycopg
import pytest

from millpy.admin.corrections import correct, corrected_windows, without_corrected
from millpy.admin.queries import Admin
from millpy.errors import UsageError
from millpy.store.postgres.arrays import register_arrays
from millpy.store.postgres.deployment.generations import switch
from millpy.store.postgres.store import PostgresStore
from tests.commands import millpy, run_millpy
from tests.conformance.store_builders import a_graph
from tests.databases import until_waiting
from tests.waiting import await_true

NAMES = "device, window_start, window_end, total, label, pane_index, pane_timing, late_count, interval_id, bundle"
WINDOW = ["--window", "device=d1", "--window", "window_start=1970-01-01T00:00:00Z"]
WHY = ["--why", "bad firmware", "--only-table"]


def deployed(url: str, mode: str) -> Admin:
    """A graph with the row of a window that is over, and of one that is open."""

    async def deploy() -> None:
        graph = a_graph()
        async with PostgresStore(url) as store:
            await store.deploy(replace(graph, tables=(replace(graph.tables[0], history=mode), *graph.tables[1:])))

    asyncio.run(deploy())
    with psycopg.connect(url, autocommit=True) as connection:
        (number,) = connection.execute("SELECT min(interval_id) FROM mill.places WHERE computation = 'sums'").fetchone()  # type: ignore[misc]
        connection.execute("UPDATE mill.intervals SET input_watermark = 60000000, low_watermark = 60000000")
        for table in ("sums_1m", "sums_1m_history"):
            query = f"""INSERT INTO factory.{table} ({NAMES})
                        SELECT 'd1', to_timestamp(s), to_timestamp(s + 60), 9, 'a', 0, 'on_time', 0, %s, 1
                          FROM unnest('{{0,60}}'::int[]) AS s"""
            connection.execute(query, [number])  # type: ignore[call-overload]
    return Admin(url)


@pytest.mark.parametrize("mode", ["accumulating", "retracting"])
def test_a_correction_is_audited_and_a_pane_of_the_history(database_url: str, mode: str) -> None:
    admin, where = deployed(database_url, mode), ["--database", database_url]
    for value in ("1.5", "2.5"):
        made = millpy("correct", "factory.sums_1m", *WINDOW, "--set", f"total={value}", *WHY, *where, "--json")

    row = json.loads(made)
    assert (row["total"], row["label"], row["pane_index"]) == (2.5, "a", 2)
    again = millpy("correct", "factory.sums_1m", *WINDOW, "--set", "total=2.5", *WHY, *where).splitlines()
    assert again[0].split() == ["device", "window_start", "window_end", "label", "total"]
    assert "1970-01-01 00:00:00Z  1970-01-01 00:01:00Z" in again[2]
    found = json.loads(millpy("corrections", "factory", *where, "--json"))
    assert [(c["old_row"]["total"], c["new_row"]["total"], c["why"]) for c in found] == [
        (9.0, 1.5, "bad firmware"),
        (1.5, 2.5, "bad firmware"),
    ]
    corrected = corrected_windows(admin, "factory", "sums_1m")
    rows = [("changed", ["d1", "0", "60000000", "9", "a"]), ("changed", ["d1", "60000000", "120000000", "9", "a"])]
    assert without_corrected(rows, corrected) == rows[1:]  # a repair leaves it as it is
    (me,) = admin.ask("SELECT session_user AS name")
    assert {(c["requested_by"], c["key"], c["window_end"]) for c in found} == {
        (me["name"], '"d1"', "1970-01-01T00:01:00Z")
    }
    assert "total 9 -> 1.5" in millpy("corrections", "factory", *where)
    history = admin.ask(
        "SELECT total, pane_index, is_retraction FROM factory.sums_1m_history"
        " WHERE window_start = to_timestamp(0) ORDER BY 2, 3"
    )
    taken_back = [(9.0, 0, True), (1.5, 1, True)] if mode == "retracting" else []
    assert [tuple(row.values()) for row in history] == sorted(
        [(9.0, 0, False), *taken_back, (1.5, 1, False), (2.5, 2, False)], key=lambda pane: pane[1:]
    )


REFUSED: list[tuple[dict[str, list[str]], str]] = [
    ({"why": ["--why", "bad firmware"]}, "other results are computed from factory.sums_1m: alarms"),
    ({"window": ["--window", "device=d1", "--window", "window_start=1970-01-01T00:01:00Z"]}, "is still open"),
    ({"window": [*WINDOW[:3], "window_start=1999-01-01T00:00:00Z"]}, "has no row for the window"),
    ({"window": WINDOW[:2]}, "the window has no window_start"),
    ({"window": [*WINDOW, "--window", 'x"; DROP TABLE mill.events; --=1']}, "cannot be given here"),
    ({"set": ["--set", "pane_index=7"]}, "column pane_index of factory.sums_1m cannot be given here"),
    ({"set": ["--set", "total=warm"]}, 'invalid input syntax for type double precision: "warm"'),
    ({"set": ["--set", "total"]}, "is not COLUMN=VALUE"),
    ({"why": ["--why", " "]}, "a correction needs a reason"),
    (
        {"window": [*WINDOW[:3], "window_start=1970-01-01T00:00:00"]},
        "window_start '1970-01-01T00:00:00' has no time zone",
    ),
    (
        {"window": [*WINDOW, "--window", "window_end=1970-01-01 00:01"]},
        "window_end '1970-01-01 00:01' has no time zone",
    ),
    ({"table": ["mill.events"]}, "mill.events is no result table of windows"),
]


def test_what_cannot_be_corrected_is_refused_and_changes_nothing(database_url: str) -> None:
    admin = deployed(database_url, "accumulating")
    for change, message in REFUSED:
        given = {"table": ["factory.sums_1m"], "window": WINDOW, "set": ["--set", "total=1"], "why": WHY} | change
        arguments = [one for part in given.values() for one in part]

        status, output = run_millpy("correct", *arguments, "--database", database_url)

        assert (status, message in output) == (2, True), output
    assert not admin.ask("SELECT FROM mill.corrections")
    assert {row["total"] for row in admin.ask("SELECT total FROM factory.sums_1m")} == {9.0}


CORRECT = """SELECT millpy.correct('factory.sums_1m', '{"device": "d1", "window_start": "1970-01-01T00:00:00Z"}',
                                  '{"total": 1}', 'why', true)"""


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE mill.intervals SET low_watermark = low_watermark - 1",
        "UPDATE mill.result_tables SET allowed_lateness_us = 1",
    ],
)
def test_a_window_that_may_get_another_pane_is_still_open(database_url: str, change: str) -> None:
    """A late record waits in it, or may come."""
    deployed(database_url, "accumulating")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(change)  # type: ignore[call-overload]
        with pytest.raises(psycopg.Error, match="the window is still open"):
            connection.execute(CORRECT)


def test_a_correction_follows_the_panes_of_the_history(database_url: str) -> None:
    """The row of the table may be an older one: users restore rows."""
    deployed(database_url, "accumulating")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("UPDATE factory.sums_1m_history SET pane_index = 7 WHERE window_start = to_timestamp(0)")
        ((row,),) = connection.execute(CORRECT).fetchall()
    assert row["pane_index"] == 8


@pytest.mark.parametrize("mode", ["accumulating", "retracting"])
def test_a_correction_that_is_repeated_is_made_once(database_url: str, mode: str) -> None:
    """The command may be killed when it has committed, before it says so."""
    admin = deployed(database_url, mode)
    with psycopg.connect(database_url, autocommit=True) as connection:
        ((first,),) = connection.execute(CORRECT).fetchall()
        history = admin.ask("SELECT * FROM factory.sums_1m_history")
        connection.execute("SET timezone TO 'Asia/Kolkata'")
        ((again,),) = connection.execute(CORRECT).fetchall()
        assert again == first
        assert len(admin.ask("SELECT FROM millpy.corrections")) == 1
        assert admin.ask("SELECT * FROM factory.sums_1m_history") == history

        connection.execute(CORRECT.replace("'why'", "'another reason'"))  # type: ignore[call-overload]
        connection.execute(CORRECT)  # the row is another since the first
    assert [row["why"] for row in admin.ask("SELECT why FROM millpy.corrections ORDER BY correction_id")] == [
        "why", "another reason", "why"
    ]  # fmt: skip


def test_a_window_stays_corrected_when_its_correction_is_forgotten(database_url: str) -> None:
    """Else an audit finds its row wrong, and a repair puts the old value back."""
    admin = deployed(database_url, "accumulating")
    ages = {"dead_letter_kept_s": 1e9, "settled_kept_s": 1e9, "events_kept_s": 60.0}

    async def forget() -> None:
        async with PostgresStore(database_url) as store:
            for _ in range(2):  # once with, and once without a correction
                await store.forget_old(now_us=await store.now_us(), **ages)

    def corrected() -> bool:
        rows = [("changed", ["d1", "0", "60000000", "9", "a"])]
        return without_corrected(rows, corrected_windows(admin, "factory", "sums_1m")) == []

    with psycopg.connect(database_url, autocommit=True) as connection:

        def drop(begin: int, end: int) -> None:
            table = "FROM mill.result_tables WHERE name = 'sums_1m'"
            part = f"INSERT INTO mill.partitions SELECT table_id, %s, %s, 'part' {table}"
            connection.execute(part.encode(), [begin, end])
            connection.execute(f"SELECT mill.drop_partitions(table_id) {table}".encode())

        connection.execute(CORRECT)
        connection.execute("UPDATE mill.corrections SET corrected_at = now() - interval '1 hour'")
        asyncio.run(forget())
        assert not admin.ask("SELECT FROM mill.corrections")
        assert corrected()
        connection.execute("UPDATE mill.result_tables SET retention_us = 1, partition_us = 60000000")
        connection.execute("UPDATE mill.intervals SET input_watermark = 1000000000000")
        drop(0, 60_000_000)
        assert corrected(), "the partition that begins there is not dropped"
        drop(60_000_000, 60_000_001)
        assert not corrected(), "its row was dropped"


@pytest.mark.parametrize("zone", ["UTC", "America/Lima"])
def test_a_time_needs_a_zone_whatever_the_zone_of_the_session(database_url: str, zone: str) -> None:
    deployed(database_url, "accumulating")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"SET TimeZone = '{zone}'")  # type: ignore[call-overload]
        found = connection.execute(
            "SELECT t, mill.has_zone(t) FROM unnest(ARRAY['1970-01-01 00:00', '1970-01-01', '1970-01-01T00:00:00Z',"
            " '1970-01-01 02:00+02', '1970-01-01 00:00 Europe/Berlin', 'infinity', 'today']) AS t"
        ).fetchall()
        assert connection.execute("SELECT current_setting('TimeZone')").fetchone() == (zone,)
    assert [named for _, named in found] == [False, False, True, True, True, True, False], found


@pytest.mark.parametrize("mode", ["accumulating", "retracting"])
def test_floats_keep_their_digits_in_a_session_that_shows_few(database_url: str, mode: str) -> None:
    admin = deployed(database_url, mode)
    exact = 0.1 + 0.2
    with psycopg.connect(database_url, autocommit=True) as connection:
        for table in ("sums_1m", "sums_1m_history"):
            connection.execute(f"UPDATE factory.{table} SET total = %s", [exact])  # type: ignore[call-overload]
        connection.execute("SET extra_float_digits = -10")
        connection.execute(
            """SELECT millpy.correct('factory.sums_1m', '{"device": "d1", "window_start": "1970-01-01T00:00:00Z"}',
                                     '{"label": "b"}', 'x', true)"""
        )

    (row,) = admin.ask("SELECT total FROM factory.sums_1m WHERE label = 'b'")
    history = admin.ask("SELECT DISTINCT total FROM factory.sums_1m_history")
    (noted,) = admin.ask("SELECT CAST(old_row ->> 'total' AS float8) AS old, CAST(new_row ->> 'total' AS float8) AS new"
                         " FROM millpy.corrections")  # fmt: skip
    assert (row["total"], [one["total"] for one in history], *noted.values()) == (exact, [exact], exact, exact)


async def test_a_table_that_is_switched_meanwhile_is_not_corrected(database_url: str) -> None:
    admin = await asyncio.to_thread(deployed, database_url, "accumulating")
    newer = replace(a_graph(), generation=2)
    async with PostgresStore(database_url) as store:
        await store.deploy(replace(newer, tables=(replace(newer.tables[0], history="accumulating"), *newer.tables[1:])))
    window, values = {"device": "d1", "window_start": "1970-01-01T00:00:00Z"}, {"total": 1.5}
    waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"

    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        register_arrays(connection)
        await switch(connection, "factory", 2, behind_us_max=None, rights="new")
        correcting = asyncio.create_task(
            asyncio.to_thread(correct, admin, "factory.sums_1m", window, values, "bad firmware", only_table=True)
        )
        await asyncio.to_thread(await_true, lambda: admin.ask(waiting), "the correction waits for the switch")
        await connection.commit()

        with pytest.raises(UsageError, match="was switched to another table"):
            await correcting

    (rows,) = admin.ask(
        "SELECT (SELECT count(*) FROM factory.sums_1m_history) AS new, (SELECT count(*) FROM mill.corrections) AS made,"
        " (SELECT min(total) FROM factory_1.sums_1m) AS total"
    )
    assert rows == {"new": 0, "made": 0, "total": 9.0}


async def test_a_correction_that_waits_for_another_change_of_the_row_notes_what_that_left(database_url: str) -> None:
    admin = await asyncio.to_thread(deployed, database_url, "accumulating")
    window, values = {"device": "d1", "window_start": "1970-01-01T00:00:00Z"}, {"label": "b"}

    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        await connection.execute("UPDATE factory.sums_1m SET total = 7, pane_index = 4 WHERE window_start = 'epoch'")
        correcting = asyncio.create_task(
            asyncio.to_thread(correct, admin, "factory.sums_1m", window, values, "bad firmware", only_table=True)
        )
        await until_waiting(database_url, 1)
        await connection.commit()
        await correcting

    (noted,) = admin.ask("SELECT old_row -> 'total' AS old, new_row -> 'pane_index' AS pane FROM millpy.corrections")
    assert noted == {"old": 7, "pane": 5}

"""`millpy dead-letters` and `millpy late` on PostgreSQL: from a broken record to a replayed one."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

from millpy.admin.dead_letters import DEAD_LETTERS, LATE_RECORDS, RecordFilter, request_late
from millpy.admin.queries import Admin
from millpy.process.assembly import run_worker
from tests.commands import millpy as run
from tests.commands import run_millpy
from tests.crash.memory_world import LIMITS
from tests.crash.test_replay import Faults, a_graph, payload
from tests.feed import Feed

ROOT = Path(__file__).resolve().parents[2]


async def millpy(url: str, *arguments: str, status: int = 0) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MILLPY_DATABASE_URL": url}
    command = [sys.executable, "-m", "millpy", *arguments]
    done = await asyncio.to_thread(
        subprocess.run, command, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == status, (done.stdout, done.stderr)
    return done.stdout + done.stderr


def account(url: str) -> dict[str, Any]:
    with psycopg.connect(url, autocommit=True) as connection:
        found = connection.execute("SELECT injected, accepted, duplicate, dead_lettered FROM millpy.sources").fetchall()
        unbalanced = connection.execute("SELECT count(*) FROM millpy.accounting WHERE NOT balanced").fetchall()
    assert unbalanced == [(0,)]
    return dict(zip(("injected", "accepted", "duplicate", "dead_lettered"), found[0], strict=True))


async def until(holds: Callable[[], bool], worker: asyncio.Task[None]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            assert not worker.done(), worker.result()
            await asyncio.sleep(0.02)


async def test_dead_letters_are_listed_replayed_corrected_and_discarded(database_url: str, tmp_path: Path) -> None:
    Faults.decoding = Faults.computing = Faults.mapping = True
    feed, stop = Feed(), asyncio.Event()
    worker = asyncio.create_task(run_worker(a_graph(feed), database_url, limits=LIMITS, stop=stop))
    try:
        feed.push(payload(1, at=9_000_000), payload(2, kind="decode"), payload(3, kind="compute"))
        feed.push(b"\xff\x00", b"{", payload(4, at=0), payload(5, kind="map"))
        await until(lambda: not feed.unacknowledged, worker)
        assert account(database_url) == {"injected": 7, "accepted": 4, "duplicate": 0, "dead_lettered": 3}

        listed = json.loads(await millpy(database_url, "dead-letters", "list", "--json"))
        assert sorted((row["computation"], row["reason"]) for row in listed) == [
            ("readings", "undecodable"),
            ("readings", "undecodable"),
            ("readings", "undecodable"),
            ("totals", "user_error"),
            ("totals", "user_error"),
        ]
        for limit, says in ((4, True), (5, False)):
            shown = await millpy(database_url, "dead-letters", "list", "-n", str(limit))
            assert (f"these are the newest {limit}; -n shows more" in shown) == says, shown

        Faults.decoding = Faults.computing = Faults.mapping = False
        output = await millpy(database_url, "dead-letters", "replay", "--all", "--wait", "30", status=1)
        assert "2 open, 3 replayed" in output
        assert account(database_url) == {"injected": 7, "accepted": 5, "duplicate": 0, "dead_lettered": 2}

        (tmp_path / "corrected").write_bytes(payload(6))
        numbers = {row["payload_text"]: row["dead_letter_id"] for row in listed}
        how = [str(numbers["{"]), "--payload", str(tmp_path / "corrected"), "--wait", "30"]
        assert "1 replayed" in await millpy(database_url, "dead-letters", "replay", *how)
        assert account(database_url) == {"injected": 7, "accepted": 6, "duplicate": 0, "dead_lettered": 1}

        # A command that was killed while it waited is repeated, and waits for what it has requested.
        repeated = await millpy(database_url, "dead-letters", "replay", *how)
        assert "requested 0 of 1" in repeated
        assert "1 replayed" in repeated

        admin, rubbish = Admin(database_url), numbers["\\377\\000"]
        assert DEAD_LETTERS.discard(admin, [rubbish]) == 1
        output = await millpy(database_url, "dead-letters", "replay", str(rubbish), "--json", status=1)
        assert json.loads(output) == {"requested": 0, "of": 1, "states": None}
        await millpy(database_url, "dead-letters", "replay", str(rubbish), "--wait", "1", status=1)
        assert account(database_url)["dead_lettered"] == 1
        for action in (["replay", "--wait", "1"], ["discard"]):
            assert " 0 of 0" in await millpy(database_url, "dead-letters", *action, "--all")
        assert " 0 of 0" in await millpy(database_url, "late", "replay", "--all", "--into-window", "--stream", "none")
        late = LATE_RECORDS.ids(admin, RecordFilter(computation="windows"))
        assert late
        assert request_late(admin, late) == len(late)
        await until(lambda: LATE_RECORDS.states(admin, late) == {"open": len(late)}, worker)
        assert LATE_RECORDS.rows(admin, RecordFilter(computation="windows"), 1)[0]["attempts"] == 1
    finally:
        stop.set()
        await worker


def test_a_replay_of_what_another_command_has_requested_says_so_and_waits_for_it(database_url: str) -> None:
    Faults.decoding = Faults.computing = Faults.mapping = False
    feed = Feed()
    feed.push(b"{", payload(1, at=9_000_000), payload(2, at=0))

    async def run_until(holds: Callable[[], bool]) -> None:
        stop = asyncio.Event()
        worker = asyncio.create_task(run_worker(a_graph(feed), database_url, limits=LIMITS, stop=stop))
        await until(holds, worker)
        stop.set()
        await worker

    admin, of_windows = Admin(database_url), RecordFilter(computation="windows")
    asyncio.run(run_until(lambda: bool(not feed.unacknowledged and LATE_RECORDS.ids(admin, of_windows))))
    letters, late = DEAD_LETTERS.ids(admin, RecordFilter()), LATE_RECORDS.ids(admin, of_windows)
    for command, ids, some in (("dead-letters", letters, []), ("late", late, ["--computation", "windows"])):
        replay, of = [command, "replay", "--database", database_url], len(ids)
        assert f"requested {of} of {of}" in run(*replay, "--all", *some)
        # Now no worker runs.
        for again in ([*replay, "--all", *some], [*replay, *map(str, ids)]):
            assert f"requested 0 of {of}" in run(*again)
            waited = run_millpy(*again, "--json", "--wait", "0.1")
            assert waited[0] == 1, waited
        assert "requested 0 of 0" in run(*replay, "--all", "--stream", "none")
    asyncio.run(run_until(lambda: DEAD_LETTERS.states(admin, letters) == {"open": 1}))
    assert LATE_RECORDS.states(admin, late) == {"open": len(late)}

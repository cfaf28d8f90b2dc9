"""What happens to the plant in the course of the day. Each disturbance begins, shows, lasts, ends, and shows again.

A sign is what an operator looks at: `status` are the rows of `millpy status` and the result tables, `events` those of
`millpy events`, `metrics` what Prometheus scrapes. Signs must show within TOLD_S_MAX of the moment from which they can.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar

import psycopg

from millpy.errors import StoreUnavailableError
from tests.plant.fleet import (
    BAD_FROM,
    HALL_FROM,
    HOUR,
    OFFLINE_FROM,
    OFFLINE_GATEWAY,
    OFFLINE_UNTIL,
    TICK_S,
    first_bad_tick,
)
from tests.plant.plant import BEHIND_S, CATCHES_UP_S_MAX, GRAPH, GRAPH_FILE, WORKERS, Plant, fill, until

TOLD_S_MAX = 10.0
LOOKED_S_MAX = 60.0
"""After this a sign counts as missing; between TOLD_S_MAX and this it is late."""
FULL_S = 60.0
AWAY_S = 12.0
LOG_MB = 3_000
SILENT_S = 1_800
DISORDER_S = 900
"""As in `graph.py`: after this much silence a gateway counts as silent, and this far a source may be out of order."""
Signs = Mapping[str, Callable[[], bool]]


@dataclass(slots=True)
class Outcome:
    """What was seen of a disturbance: sign -> seconds until it showed, None if it never did."""

    name: str
    told: dict[str, float | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def faults(self) -> list[str]:
        """Return the signs that came late or not at all."""
        return [
            f"{self.name}: {sign} {'never' if seconds is None else f'only after {seconds:.1f} s'}"
            for sign, seconds in self.told.items()
            if seconds is None or seconds > TOLD_S_MAX
        ]


class Disturbance(ABC):
    """One thing that happens.

    Attributes:
        hour: the hour of the day at which it begins.
        until: the hour by which it must be over; None for no such hour.
    """

    name: ClassVar[str]
    hour: ClassVar[float]
    until: ClassVar[float | None] = None

    def __init__(self) -> None:
        self.began = datetime.now(UTC)
        self.outcome = Outcome(self.name)

    @property
    def tick(self) -> int:
        """The tick before which it begins."""
        return int(self.hour * HOUR) // TICK_S

    def run(self, plant: Plant) -> None:
        """Begin, look for the signs, and end."""
        self.began = datetime.now(UTC)
        try:
            self.happen(plant)
        except Exception as error:
            self.outcome.told[repr(error)] = None
            raise

    @abstractmethod
    def happen(self, plant: Plant) -> None:
        """Do all of it."""

    def await_signs(self, when: str, signs: Signs) -> None:
        """Look for signs side by side, and note when each shows."""

        def look(sign: str, shows: Callable[[], bool]) -> None:
            self.outcome.told[f"{when}, {sign}"] = until(shows, LOOKED_S_MAX)

        threads = [threading.Thread(target=look, args=item, daemon=True) for item in signs.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def has_event(self, plant: Plant, kind: str, words: str = "") -> bool:
        """Tell whether an event of this kind, with these words in its sentence, is newer than the beginning."""
        return any(moment(event["at"]) >= self.began and words in event["happened"] for event in plant.events(kind))


def moment(text: str) -> datetime:
    """Read a time as the commands print it."""
    return datetime.fromisoformat(text)


def disconnected(plant: Plant) -> list[str]:
    """Return the sources that `millpy status` shows as disconnected."""
    return [row["stream"] for row in plant.admin().sources(GRAPH) if row["state"] == "disconnected"]


def is_live(plant: Plant, pid: int) -> bool:
    """Tell whether `millpy status` shows a worker as live."""
    return any(row["pid"] == pid and row["live"] for row in plant.admin().workers(GRAPH))


def live_workers(plant: Plant) -> int:
    """Return how many workers `millpy status` shows as live."""
    return sum(bool(row["live"]) for row in plant.admin().workers(GRAPH))


def replay_into_windows(plant: Plant, table: str, why: str) -> None:
    """Put the late records of a table into the windows that they missed."""
    arguments = ("--all", "--computation", table, "--into-window", "--why", why, "--wait", f"{LOOKED_S_MAX:.0f}s")
    plant.millpy("late", "replay", *arguments)


def silences(plant: Plant, *, silent: bool) -> bool:
    """Tell whether the newest row about the gateway that goes offline says so."""
    rows = plant.admin().ask(
        "SELECT silent FROM plant.silences WHERE gateway = :gateway ORDER BY at DESC LIMIT 1", gateway=OFFLINE_GATEWAY
    )
    return bool(rows) and rows[0]["silent"] is silent


def is_listed_as_silent(plant: Plant) -> bool:
    """Tell whether `millpy status` names the gateway that goes offline among the silent devices."""
    return any(OFFLINE_GATEWAY in row["longest_silent"] for row in plant.admin().silences(GRAPH))


class GatewayOffline(Disturbance):
    """A gateway loses its uplink and stores what its devices send, for 20 hours."""

    name = "gateway offline for 20 h"
    hour = (OFFLINE_FROM + SILENT_S + DISORDER_S - 2 * TICK_S) / HOUR

    def happen(self, plant: Plant) -> None:
        """See the signs of its silence, which began SILENT_S earlier."""
        self.await_signs(
            "silent",
            {
                "table": lambda: silences(plant, silent=True),
                "status": lambda: is_listed_as_silent(plant),
                "events": lambda: self.has_event(plant, "devices_silent", OFFLINE_GATEWAY),
                "metrics": lambda: sum(plant.metric("millpy_silent_devices")) > 0,
            },
        )


class GatewayBack(Disturbance):
    """The gateway delivers 20 hours at once."""

    name = "gateway delivers 20 h"
    hour = OFFLINE_UNTIL / HOUR

    def happen(self, plant: Plant) -> None:
        """Wait until it is back, and its late records have amended their windows."""
        late_before = sum(plant.metric("millpy_late_records_total"))
        amended = "SELECT coalesce(sum(late_count), 0) AS n FROM plant.relayed"
        self.await_signs(
            "back",
            {
                "table": lambda: silences(plant, silent=False),
                "status": lambda: not is_listed_as_silent(plant),
                "windows": lambda: plant.admin().ask(amended)[0]["n"] > 0,
                "events": lambda: self.has_event(plant, "devices_back", OFFLINE_GATEWAY),
                "events of late records": lambda: self.has_event(plant, "late"),
                "metrics": lambda: plant.metric("millpy_silent_devices") == [0.0],
                "metrics of late records": lambda: sum(plant.metric("millpy_late_records_total")) > late_before,
            },
        )
        delivered = OFFLINE_UNTIL + 2 * TICK_S + BEHIND_S - DISORDER_S  # the order of its messages is kept
        until(lambda: plant.caught_up(delivered), LOOKED_S_MAX)
        late = "SELECT count(*) AS n FROM millpy.late_records WHERE computation = 'relayed' AND state = 'open'"
        if over := plant.admin().ask(late)[0]["n"]:
            replay_into_windows(plant, "relayed", "gateway was offline")
            self.outcome.notes.append(f"{over:,} readings went into windows that were over before the lateness changed")


class WorkerKilled(Disturbance):
    """A worker is killed by SIGKILL; `millpy run` starts another, and the others take over."""

    name = "worker killed"
    hour = 4.0

    def happen(self, plant: Plant) -> None:
        """Kill one, and see another take its place."""
        restarts = sum(plant.metric("millpy_worker_restarts_total"))
        victim = plant.worker_pids()[0]
        os.kill(victim, signal.SIGKILL)
        self.await_signs(
            "killed",
            {
                "status": lambda: not is_live(plant, victim),
                "events": lambda: self.has_event(plant, "claimed"),
                "metrics": lambda: (
                    sum(plant.metric("millpy_workers", state="down")) > 0
                    or sum(plant.metric("millpy_worker_restarts_total")) > restarts
                ),
            },
        )
        self.await_signs("another", {"status": lambda: live_workers(plant) == WORKERS})


class BrokerRestarted(Disturbance):
    """The broker is stopped, away for AWAY_S, and started again."""

    name = "broker restarted"
    hour = 6.0

    def happen(self, plant: Plant) -> None:
        """Stop it, see the signs, start it, see the signs again."""
        plant.broker.stop()
        stopped = time.monotonic()
        self.await_signs(
            "away",
            {
                "status": lambda: bool(disconnected(plant)),
                "events": lambda: self.has_event(plant, "source_disconnected"),
                "metrics": lambda: 0.0 in plant.metric("millpy_source_connected"),
            },
        )
        time.sleep(max(0.0, AWAY_S - (time.monotonic() - stopped)))
        plant.broker.start()
        self.await_signs(
            "back",
            {
                "status": lambda: not disconnected(plant),
                "events": lambda: self.has_event(plant, "source_connected"),
                "metrics": lambda: set(plant.metric("millpy_source_connected")) == {1.0},
            },
        )


class DiskFull(Disturbance):
    """The disk of the database, its log included, is full for a minute; then somebody makes room."""

    name = "disk full for a minute"
    hour = 13.5

    def happen(self, plant: Plant) -> None:
        """Fill it, see the signs, free it, see commits again."""
        failures, ballast = sum(plant.metric("millpy_turn_failures_total")), plant.disk / "ballast"
        with psycopg.connect(plant.url, autocommit=True) as other:  # a full disk lets no new session in
            taken = sum(fill(ballast))
            _fill_log(other)
        full, emptied = time.monotonic(), threading.Event()

        def keep_full() -> None:
            while not emptied.wait(0.5):
                sum(fill(ballast))  # what the server frees meanwhile

        keeping = threading.Thread(target=keep_full, daemon=True)
        keeping.start()
        self.outcome.notes.append(f"{taken / 1e6:,.0f} MB of ballast")
        self.await_signs(
            "full",
            {
                "status": lambda: self._status_tells(plant),
                "metrics": lambda: (
                    sum(plant.metric("millpy_turn_failures_total")) > failures
                    or 0.0 in plant.metric("millpy_database_answers")
                ),
                "log": lambda: self._log_tells(plant),
            },
        )
        time.sleep(max(0.0, FULL_S - (time.monotonic() - full)))
        emptied.set()
        keeping.join()
        came = (plant.published + 1) * TICK_S
        ballast.unlink()
        freed = time.monotonic()
        self.await_signs(
            "room again",
            {
                "metrics": lambda: plant.metric("millpy_database_answers") == [1.0] * WORKERS,
                "events": lambda: self.has_event(plant, "database_restored"),
            },
        )
        # Commits need not rise: if the day is over by now, and all of it was read before, there is nothing to commit.
        caught_up = until(lambda: plant.caught_up(came), LOOKED_S_MAX)
        self.outcome.told["what came meanwhile is committed"] = None if caught_up is None else 0.0
        self.outcome.notes.append(f"had caught up {time.monotonic() - freed:.1f} s after there was room")
        self.outcome.notes.append(f"PostgreSQL had stopped {plant.server_starts} times")

    @staticmethod
    def _log_tells(plant: Plant) -> bool:
        log = (plant.directory / "run.log").read_text(errors="replace")
        return "No space left" in log or "StoreUnavailableError" in log

    @staticmethod
    def _status_tells(plant: Plant) -> bool:
        """Tell whether `millpy status` fails, or shows a worker without a lease."""
        try:
            return live_workers(plant) < WORKERS
        except StoreUnavailableError:
            return True


def _fill_log(connection: psycopg.Connection) -> None:
    """Let another session write into the log until there is no room for it: PostgreSQL stops with a PANIC."""
    with suppress(psycopg.OperationalError):
        for _ in range(LOG_MB):
            connection.execute("SELECT pg_logical_emit_message(false, 'ballast', repeat('x', 1000000))")


class BadFirmware(Disturbance):
    """Some devices get a firmware that sends text where a number was, for two hours."""

    name = "bad firmware"
    hour = BAD_FROM / HOUR

    def happen(self, plant: Plant) -> None:
        """See that their readings are dead letters, and told, from when the broker has the first of them."""
        bad = first_bad_tick(plant.options)
        until(lambda: plant.published >= bad, CATCHES_UP_S_MAX, 0.05)

        def accounted() -> bool:
            sources = plant.admin().sources(GRAPH)
            return any(row["stream"] == "tts" and row["dead_lettered"] > 0 for row in sources)

        self.await_signs(
            "begun",
            {
                "status": accounted,
                "events": lambda: self._has_letters(plant),
                "metrics": lambda: sum(plant.metric("millpy_dead_letters_total", computation="tts")) > 0,
            },
        )

    @staticmethod
    def _has_letters(plant: Plant) -> bool:
        return any("tts" in event["happened"] for event in plant.events("dead_lettered"))


class FirmwareCorrected(Disturbance):
    """Somebody reads the values out of the text, and puts them into windows that are long over."""

    name = "values of the bad firmware corrected"
    hour = 20.25

    def happen(self, plant: Plant) -> None:
        """Replay each dead letter with its value as a number; what is too late goes into its finished window."""
        letters = "SELECT dead_letter_id, payload FROM millpy.dead_letters WHERE stream = 'tts' AND state = 'open'"
        with psycopg.connect(plant.url, autocommit=True) as connection:
            found = connection.execute(letters).fetchall()
            for number, payload in found:
                record: dict[str, Any] = json.loads(payload)
                record["value"] = float(record["value"].removeprefix("ERR "))
                connection.execute("SELECT millpy.replay_dead_letter(%s, %s)", [number, json.dumps(record).encode()])
        left = "SELECT count(*) AS n FROM millpy.dead_letters WHERE state IN ('open', 'requested')"
        self.await_signs("corrected", {"status": lambda: plant.admin().ask(left)[0]["n"] == 0})
        why = "firmware 7.1 sent text"
        replay_into_windows(plant, "devices", why)
        corrected = plant.admin().ask("SELECT count(*) AS n FROM millpy.corrections WHERE why = :why", why=why)[0]["n"]
        self.outcome.notes.append(f"{len(found):,} values; {corrected:,} finished windows corrected")
        self.outcome.told["corrections"] = 0.0 if corrected or not found else None


class Deployment(Disturbance):
    """A change of the graph's file, which an operator deploys while it runs."""

    settings: ClassVar[dict[str, Any]]
    announced: ClassVar[str]

    def happen(self, plant: Plant) -> None:
        """Edit the file, see what would change, deploy it, and see the workers run it."""
        plant.change_settings(**self.settings)
        explained = plant.millpy("deploy", str(GRAPH_FILE), "--dry-run")
        self.outcome.notes += [line.strip() for line in explained.splitlines() if self.announced in line]
        assert self.announced in explained, explained
        restarts = sum(plant.metric("millpy_worker_restarts_total"))
        plant.millpy("deploy", str(GRAPH_FILE))
        deployed = time.monotonic()
        versions = (
            "SELECT count(*) FILTER (WHERE w.live AND w.version = g.version) AS new,"
            " count(*) FILTER (WHERE w.live AND w.version <> g.version) AS old"
            " FROM millpy.graphs AS g JOIN millpy.workers AS w USING (graph)"
        )
        self.await_signs(
            "deployed",
            {
                "status": lambda: not plant.admin().ask(versions)[0]["old"],
                "events": lambda: self.has_event(plant, "deployed"),
                "metrics": lambda: sum(plant.metric("millpy_worker_restarts_total")) > restarts,
            },
        )
        until(lambda: plant.admin().ask(versions)[0]["new"] == WORKERS, LOOKED_S_MAX)
        self.outcome.notes.append(f"all workers run it {time.monotonic() - deployed:.1f} s after the deployment")


class LatenessChanged(Deployment):
    """The gateway is known to be offline, so its windows get a day instead of two hours."""

    name = "changed lateness"
    hour = 8.5
    settings: ClassVar = {"relayed_lateness_h": 24}
    announced = "lateness"


class NewHall(Deployment):
    """A new hall with topics of its own."""

    name = "new hall with new topics"
    hour = 12.25
    until = HALL_FROM / HOUR
    settings: ClassVar = {"halls": ["hall1", "hall2"]}
    announced = "hall2"

    def happen(self, plant: Plant) -> None:
        """Deploy, and see the new source partition connect."""
        super().happen(plant)
        self.await_signs("connected", {"status": lambda: self._is_connected(plant)})

    @staticmethod
    def _is_connected(plant: Plant) -> bool:
        rows = plant.admin().sources(GRAPH)
        return any("hall2" in row["source_partition"] and row["connected"] for row in rows)


ALL: tuple[type[Disturbance], ...] = (
    GatewayOffline, WorkerKilled, BrokerRestarted, LatenessChanged, BadFirmware, NewHall, DiskFull, FirmwareCorrected,
    GatewayBack,
)  # fmt: skip

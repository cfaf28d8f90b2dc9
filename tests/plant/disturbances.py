"""What happens to the plant in the course of the day. Each disturbance begins, is told, lasts, ends, and is told again.

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
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar

import psycopg

from millpy.errors import StoreUnavailableError
from tests.plant.fleet import BAD_FROM, HOUR, OFFLINE_FROM, OFFLINE_GATEWAY, OFFLINE_UNTIL, TICK_S
from tests.plant.plant import GRAPH, WORKERS, Plant, fill, until

TOLD_S_MAX = 10.0
LOOKED_S_MAX = 60.0
"""After this a sign counts as missing; between TOLD_S_MAX and this it is late."""
FULL_S = 60.0
AWAY_S = 12.0
SILENT_S = 1_800
DISORDER_S = 900
"""As in `graph.py`: after this much of silence a gateway is told, and this far a source may be out of order."""
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
    """

    name: ClassVar[str]
    hour: ClassVar[float]

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
        self.happen(plant)

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


def silences(plant: Plant, *, silent: bool) -> bool:
    """Tell whether the newest row about the gateway that goes offline says so."""
    rows = plant.admin().ask(
        "SELECT silent FROM plant.silences WHERE gateway = :gateway ORDER BY at DESC LIMIT 1", gateway=OFFLINE_GATEWAY
    )
    return bool(rows) and rows[0]["silent"] is silent


class GatewayOffline(Disturbance):
    """A gateway loses its uplink and stores what its devices send, for 20 hours."""

    name = "gateway offline for 20 h"
    hour = (OFFLINE_FROM + SILENT_S + DISORDER_S + 2 * TICK_S) / HOUR

    def happen(self, plant: Plant) -> None:
        """Wait until its silence is a row; the silence began SILENT_S earlier."""
        self.await_signs("silent", {"status": lambda: silences(plant, silent=True)})


class GatewayBack(Disturbance):
    """The gateway delivers 20 hours at once."""

    name = "gateway delivers 20 h"
    hour = (OFFLINE_UNTIL + 2 * TICK_S) / HOUR

    def happen(self, plant: Plant) -> None:
        """Wait until it is back, and its late records have amended their windows."""
        amended = "SELECT coalesce(sum(late_count), 0) AS n FROM plant.relayed"
        self.await_signs(
            "back",
            {
                "status": lambda: silences(plant, silent=False),
                "windows": lambda: plant.admin().ask(amended)[0]["n"] > 0,
            },
        )


class WorkerKilled(Disturbance):
    """A worker is killed by SIGKILL; `millpy run` starts another, and the others take over."""

    name = "worker killed"
    hour = 4.0

    def happen(self, plant: Plant) -> None:
        """Kill one, and see another take its place."""
        before, taken = plant.worker_pids(), sum(plant.metric("millpy_takeovers_total"))
        victim = before[0]
        os.kill(victim, signal.SIGKILL)
        self.await_signs(
            "killed",
            {
                "status": lambda: not is_live(plant, victim),
                "events": lambda: self.has_event(plant, "claimed"),
                "metrics": lambda: (
                    len(plant.metric("millpy_lease_trusted")) < WORKERS
                    or sum(plant.metric("millpy_takeovers_total")) > taken
                ),
            },
        )
        back = until(
            lambda: len(plant.worker_pids()) == WORKERS and sum(plant.metric("millpy_lease_trusted")) == WORKERS,
            LOOKED_S_MAX,
        )
        self.outcome.notes.append("no other worker came" if back is None else f"another worker after {back:.1f} s more")


class BrokerRestarted(Disturbance):
    """The broker is stopped, away for AWAY_S, and started again."""

    name = "broker restarted"
    hour = 6.0

    def happen(self, plant: Plant) -> None:
        """Stop it, see that it is told, start it, see that this is told."""
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
    hour = 8.0

    def happen(self, plant: Plant) -> None:
        """Fill it, see that it is told, free it, see that commits go on."""
        commits, failures = self._commits(plant), sum(plant.metric("millpy_turn_failures_total"))
        ballast = plant.disk / "ballast"
        taken = sum(fill(ballast))
        full = time.monotonic()
        self.outcome.notes.append(f"{taken / 1e6:,.0f} MB of ballast")
        self.await_signs(
            "full",
            {
                "status": lambda: self._status_tells(plant),
                "metrics": lambda: (
                    sum(plant.metric("millpy_turn_failures_total")) > failures
                    or 0.0 in plant.metric("millpy_database_answers")
                ),
                "log": lambda: (
                    "No space left" in (plant.directory / "run.log").read_text(errors="replace")
                    or "StoreUnavailableError" in (plant.directory / "run.log").read_text(errors="replace")
                ),
            },
        )
        while time.monotonic() - full < FULL_S:
            sum(fill(ballast))  # what the server has freed meanwhile
            time.sleep(0.5)
        commits = self._commits(plant)
        ballast.unlink()
        self.await_signs("room again", {"metrics": lambda: self._commits(plant) > commits})
        if plant.server_starts:
            self.outcome.notes.append(f"the server's service manager started it {plant.server_starts} times")
            self.await_signs("room again", {"events": lambda: self.has_event(plant, "database_restored")})

    @staticmethod
    def _commits(plant: Plant) -> float:
        return sum(plant.metric("millpy_commits_total"))

    @staticmethod
    def _status_tells(plant: Plant) -> bool:
        """Tell whether `millpy status` fails, or `/ready` of a worker says why it does nothing."""
        try:
            plant.admin().workers(GRAPH)
        except StoreUnavailableError:
            return True
        return any('"ready": false' in line for slot in range(WORKERS) for line in plant.scrape(slot, "ready"))


class BadFirmware(Disturbance):
    """Some devices get a firmware that sends text where a number was, for two hours."""

    name = "bad firmware"
    hour = (BAD_FROM + 900) / HOUR

    def happen(self, plant: Plant) -> None:
        """See that their readings are dead letters, and told."""

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
    """Somebody reads the values out of the text, and puts them where they belong."""

    name = "values of the bad firmware corrected"
    hour = 20.0

    def happen(self, plant: Plant) -> None:
        """Replay each dead letter with its value as a number, and see that none is left."""
        letters = "SELECT dead_letter_id, payload FROM millpy.dead_letters WHERE stream = 'tts' AND state = 'open'"
        with psycopg.connect(plant.url, autocommit=True) as connection:
            found = connection.execute(letters).fetchall()
            for number, payload in found:
                record: dict[str, Any] = json.loads(payload)
                record["value"] = float(record["value"].removeprefix("ERR "))
                connection.execute("SELECT millpy.replay_dead_letter(%s, %s)", [number, json.dumps(record).encode()])
        self.outcome.notes.append(f"{len(found):,} values")
        left = "SELECT count(*) AS n FROM millpy.dead_letters WHERE state IN ('open', 'requested')"
        self.await_signs("corrected", {"status": lambda: plant.admin().ask(left)[0]["n"] == 0})


ALL: tuple[type[Disturbance], ...] = (
    GatewayOffline, WorkerKilled, BrokerRestarted, DiskFull, BadFirmware, FirmwareCorrected, GatewayBack,
)  # fmt: skip

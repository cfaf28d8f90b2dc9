"""Requests of operators, each in one transaction with the event that says who made it.

A process that is killed in the middle has requested all or nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from millpy.admin.queries import DRAIN, RELEASE, RESUME, Admin, Row

NAMED_MAX = 100
"""How many ids an event names; it counts all."""
Run = Callable[..., list[Row]]
_ACTOR = "SELECT set_config('millpy.actor', :actor, true)"
_NOTE = """
INSERT INTO mill.events (graph_id, kind, detail)
SELECT graph_id, 'requested', CAST(:detail AS jsonb) FROM mill.graphs WHERE name = :graph RETURNING 1
"""
_OF_GRAPH = {
    "dead letters": """
        SELECT dead_letter_id AS id FROM millpy.dead_letters
         WHERE graph = :graph AND dead_letter_id = ANY (CAST(:ids AS bigint[]))""",
    "late records": """
        SELECT late_record_id AS id FROM millpy.late_records
         WHERE graph = :graph AND late_record_id = ANY (CAST(:ids AS bigint[]))""",
}
_REPLAY_LETTERS = "SELECT millpy.replay_dead_letters(CAST(:ids AS bigint[]), :into_window, :why) AS n"
_CORRECT_LETTER = "SELECT millpy.replay_dead_letter(:id, :payload, :into_window, :why) AS n"
_REPLAY_LATE = "SELECT millpy.replay_late_records(CAST(:ids AS bigint[])) AS n"
_INTO_WINDOW = "SELECT millpy.replay_into_window(CAST(:ids AS bigint[]), :why) AS n"
_DISCARD = {
    "dead letters": "SELECT millpy.discard_dead_letters(CAST(:ids AS bigint[])) AS n",
    "late records": "SELECT millpy.discard_late_records(CAST(:ids AS bigint[])) AS n",
}
_STATE_OF_WORKER = """
SELECT CASE WHEN w.engine <> 'workers' THEN 'spark' WHEN mill.alive(w.worker_id) THEN 'live' ELSE 'dead' END AS state
  FROM mill.workers AS w JOIN mill.graphs AS g USING (graph_id) WHERE g.name = :graph AND w.worker_id = :worker
"""


@dataclass(frozen=True, slots=True)
class Actor:
    """Who requests something.

    Attributes:
        name: the name in events.
        token_id: the token by which he is known.
    """

    name: str
    token_id: int


@dataclass(frozen=True, slots=True)
class DrainRefusal:
    """Why a worker cannot drain, and what to do; `unknown` if the graph has no such worker."""

    message: str
    hint: str
    unknown: bool = False


def replay_dead_letters(
    admin: Admin, actor: Actor, graph: str, ids: Sequence[int], *, into_window: bool, why: str
) -> int:
    """Request the replay of dead letters of a graph; return how many were requested."""
    with _acting(admin, actor) as run:
        own = _own(run, "dead letters", graph, ids)
        done = _count(run(_REPLAY_LETTERS, ids=own, into_window=into_window, why=why))
        _note(run, actor, graph, done, {"action": "replay", "of": "dead letters", "into_window": into_window}, own, why)
    return done


def replay_corrected(
    admin: Admin, actor: Actor, graph: str, number: int, payload: bytes, *, into_window: bool, why: str
) -> int:
    """Request the replay of a dead letter with another payload; return 1, or 0 if it cannot be replayed."""
    with _acting(admin, actor) as run:
        own = _own(run, "dead letters", graph, [number])
        done = 0
        if own:
            done = _count(run(_CORRECT_LETTER, id=number, payload=payload, into_window=into_window, why=why))
        what = {"action": "replay with another payload", "of": "dead letters", "into_window": into_window}
        _note(run, actor, graph, done, what, own, why)
    return done


def replay_late_records(
    admin: Admin, actor: Actor, graph: str, ids: Sequence[int], *, into_window: bool, why: str
) -> int:
    """Request that late records are judged again, or added to their finished windows; return how many."""
    with _acting(admin, actor) as run:
        own = _own(run, "late records", graph, ids)
        done = _count(run(_INTO_WINDOW, ids=own, why=why) if into_window else run(_REPLAY_LATE, ids=own))
        _note(run, actor, graph, done, {"action": "replay", "of": "late records", "into_window": into_window}, own, why)
    return done


def discard_records(admin: Admin, actor: Actor, graph: str, what: str, ids: Sequence[int], why: str) -> int:
    """Discard "dead letters" or "late records" of a graph; return how many."""
    with _acting(admin, actor) as run:
        own = _own(run, what, graph, ids)
        done = _count(run(_DISCARD[what], ids=own))
        _note(run, actor, graph, done, {"action": "discard", "of": what}, own, why)
    return done


def release_parked(
    admin: Admin, actor: Actor, graph: str, computation: str, key: str | None, *, discard: bool, why: str
) -> int:
    """Request the release of a parked key, or of all keys of a computation if `key` is None; return how many."""
    with _acting(admin, actor) as run:
        done = _count(run(RELEASE[discard], graph=graph, computation=computation, key=key))
        action = "release without the failed record" if discard else "release"
        what = {"action": action, "of": "parked keys", "computation": computation, "key": key}
        _note(run, actor, graph, done, what, [], why)
    return done


def resume_source(admin: Admin, actor: Actor, graph: str, stream: str) -> int:
    """Resume a source; return how many of its partitions were paused. The event is `resumed`."""
    with _acting(admin, actor) as run:
        return _count(run(RESUME, graph=graph, stream=stream))


def drain_worker(admin: Admin, actor: Actor, graph: str, worker: UUID, why: str) -> int:
    """Request that a worker drains; return 1, or 0 if it does already or cannot. The event is `drain_requested`."""
    with _acting(admin, actor) as run:
        return _count(run(DRAIN, graph=graph, worker=worker, why=why))


def refused_drain(admin: Admin, graph: str, worker: UUID) -> DrainRefusal | None:
    """Return why a worker cannot drain; None if it can, or does already."""
    found = admin.ask(_STATE_OF_WORKER, graph=graph, worker=worker)
    if not found:
        message = f"graph {graph!r} has no worker {worker}"
        return DrainRefusal(message, "`millpy status` lists the workers", unknown=True)
    if found[0]["state"] == "spark":
        return DrainRefusal(f"{worker} is a query of Spark, which cannot drain", "stop the query")
    if found[0]["state"] == "dead":
        message = f"worker {worker} cannot drain: its lease has expired"
        return DrainRefusal(message, "do nothing: live workers take over its intervals")
    return None


@contextmanager
def _acting(admin: Admin, actor: Actor) -> Iterator[Run]:
    with admin.transaction() as run:
        run(_ACTOR, actor=actor.name)
        yield run


def _own(run: Run, what: str, graph: str, ids: Sequence[int]) -> list[int]:
    """Return those ids that are of the graph."""
    return [row["id"] for row in run(_OF_GRAPH[what], graph=graph, ids=list(ids))]


def _count(found: list[Row]) -> int:
    return int(found[0]["n"])


def _note(run: Run, actor: Actor, graph: str, done: int, what: Mapping[str, Any], ids: Sequence[int], why: str) -> None:
    if done:
        detail = {"by": actor.name, "token": actor.token_id, **what, "count": done, "ids": ids[:NAMED_MAX], "why": why}
        run(_NOTE, graph=graph, detail=json.dumps(detail))

"""`millpy dead-letters` and `millpy late`: look at what was set aside, have it taken again, or give it up."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from millpy.clock import SystemClock
from millpy.commands import tables
from millpy.commands.common import DatabaseOption, JsonOption, connected_to, graph_in, print_json, settings_of, worded
from millpy.complaint import EXIT_FAILED
from millpy.errors import UsageError
from millpy.store.admin import Admin
from millpy.store.admin_piles import DEAD_LETTERS, LATE_RECORDS, Pile, Wanted

progress = logging.getLogger("millpy.progress")
LOOK_EVERY_S = 0.1
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[GRAPH.py] [ID]...", help="Which ones; and whose embedded database.", show_default=False),
]
GraphWord = Annotated[str | None, typer.Argument(metavar="[GRAPH.py]", help="Only this graph's.", show_default=False)]
AllOption = Annotated[bool, typer.Option("--all", help="All that the other options select, instead of named ones.")]
ComputationOption = Annotated[str, typer.Option("--computation", metavar="NAME", help="Only this one's.")]
StreamOption = Annotated[str, typer.Option("--stream", metavar="NAME", help="Only records of this stream.")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="WORD", help="Only with this reason.")]
State = Literal["set_aside", "requested", "replayed", "discarded", "any"]
StateOption = Annotated[State, typer.Option("--state", help="Only those in this state.")]
LimitOption = Annotated[int, typer.Option("--limit", metavar="N", min=1, help="At most so many, the newest.")]
PayloadOption = Annotated[
    str, typer.Option("--payload", metavar="FILE", help="Read one record from this payload instead (- for stdin).")
]
WaitOption = Annotated[
    float, typer.Option("--wait", metavar="S", min=0, help="Wait so long until workers have taken them.")
]

dead_letters = typer.Typer(
    help="Records that could not be read, or that code or database refused.", no_args_is_help=True
)
late = typer.Typer(help="Records that were too late for their window.", no_args_is_help=True)


@contextmanager
def _opened(words: Sequence[str], database: str | None) -> Iterator[tuple[Admin, str | None, list[int]]]:
    """The database, the graph's name when one is given, and the ids among the words."""
    ids = [int(word) for word in words if word.isdecimal()]
    locations = [word for word in words if not word.isdecimal()]
    if len(locations) > 1:
        raise UsageError(f"{locations[1]!r} is no number", hint="records are named by their ids, one graph by its file")
    location = locations[0] if locations else None
    with connected_to(settings_of(database), location) as admin:
        yield admin, graph_in(admin, location), ids


def _wanted(ids: Sequence[int], everything: bool, wanted: Wanted) -> Wanted:
    if bool(ids) == everything:
        raise UsageError("say which records", hint="give their ids, or --all (with --computation, --reason, …)")
    return wanted if everything else Wanted(graph=wanted.graph, ids=tuple(ids))


def _list(pile: Pile, words: Sequence[str], database: str | None, as_json: bool, wanted: Wanted, limit: int) -> None:
    with _opened(words, database) as (admin, graph, _):
        found = pile.rows(admin, wanted.of_graph(graph), limit)
    if as_json:
        print_json(found)
        return
    tables.echo([pile.short(row) for row in found])


def _show(pile: Pile, number: int, graph: str | None, database: str | None, as_json: bool) -> None:
    with _opened([graph] if graph else [], database) as (admin, _, _):
        found = pile.rows(admin, Wanted(ids=(number,)), 1)
    if not found:
        raise UsageError(f"there is no {pile.word} {number}", hint=f"`millpy {pile.command} list` shows them")
    if as_json:
        print_json(found[0])
        return
    for name, value in found[0].items():
        if name != "payload" and value not in (None, ""):
            tables.say(f"{name:>16}: {str(value).rstrip().replace(chr(10), chr(10) + ' ' * 18)}")


def _replay(pile: Pile, ids: Sequence[int], admin: Admin, payload: str, wait_s: float, *, as_json: bool) -> int:
    if payload and len(ids) != 1:
        raise UsageError("--payload corrects one record", hint="name its id")
    if payload:
        asked = pile.replay_corrected(admin, ids[0], _read(payload))
    else:
        asked = pile.replay(admin, ids)
    if not as_json:
        tables.say(f"{asked} of {len(ids)} to be taken again" + ("" if wait_s else " by a running worker"))
        if asked < len(ids):
            tables.say(f"the others are settled already, or are no records: see `millpy {pile.command} show ID`")
    states = _await(pile, ids, admin, wait_s) if asked and wait_s else None
    if as_json:
        print_json({"asked": asked, "of": len(ids), "states": states})
    elif states is not None:
        tables.say(_counted(states))
        if states.get("requested"):
            tables.say("nobody has taken them yet: does a worker of this graph run?")
    if states is None:
        return 0 if asked else EXIT_FAILED
    return EXIT_FAILED if states.get("requested") or states.get("set_aside") else 0


def _await(pile: Pile, ids: Sequence[int], admin: Admin, wait_s: float) -> Mapping[str, int]:
    """How many are in which state, when all are settled or the time is over."""
    clock = SystemClock()
    until = clock.monotonic() + wait_s
    while (states := pile.states(admin, ids)).get("requested") and clock.monotonic() < until:
        progress.debug("waiting until they are taken again: %s", _counted(states))
        asyncio.run(clock.sleep(LOOK_EVERY_S))
    return states


def _counted(states: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))


def _read(payload: str) -> bytes:
    if payload == "-":
        return sys.stdin.buffer.read().removesuffix(b"\n")
    path = Path(payload)
    if not path.is_file():
        raise UsageError(f"there is no file {payload}", hint="--payload names a file that holds the corrected record")
    return path.read_bytes().removesuffix(b"\n")


def _chosen(pile: Pile, admin: Admin, wanted: Wanted) -> list[int]:
    return list(wanted.ids) or pile.ids(admin, wanted)


def _discard(pile: Pile, ids: Sequence[int], admin: Admin, *, as_json: bool) -> int:
    gone = pile.discard(admin, ids)
    if as_json:
        print_json({"discarded": gone, "of": len(ids)})
    else:
        tables.say(f"{gone} of {len(ids)} discarded; they stay counted")
    return 0 if gone else EXIT_FAILED


@dead_letters.command("list")
@worded
def list_dead_letters(
    graph: GraphWord = None,
    computation: ComputationOption = "",
    stream: StreamOption = "",
    reason: ReasonOption = "",
    state: StateOption = "set_aside",
    limit: LimitOption = 50,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List dead letters, the newest last."""
    wanted = Wanted(computation=computation, stream=stream, reason=reason, state=state)
    _list(DEAD_LETTERS, [graph] if graph else [], database, as_json, wanted, limit)


@dead_letters.command("show")
@worded
def show_dead_letter(
    number: Annotated[int, typer.Argument(metavar="ID")],
    graph: GraphWord = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show all there is about one dead letter, with its payload and traceback."""
    _show(DEAD_LETTERS, number, graph, database, as_json)


@dead_letters.command("replay")
@worded
def replay_dead_letters(
    words: Words = None,
    everything: AllOption = False,
    computation: ComputationOption = "",
    stream: StreamOption = "",
    reason: ReasonOption = "",
    payload: PayloadOption = "",
    wait_s: WaitOption = 0.0,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> int:
    """Have records taken again after a fix: once, under the dedupe id that they had."""
    with _opened(words or [], database) as (admin, graph, ids):
        wanted = Wanted(graph=graph or "", computation=computation, stream=stream, reason=reason)
        chosen = _chosen(DEAD_LETTERS, admin, _wanted(ids, everything, wanted))
        return _replay(DEAD_LETTERS, chosen, admin, payload, wait_s, as_json=as_json)


@dead_letters.command("discard")
@worded
def discard_dead_letters(
    words: Words = None,
    everything: AllOption = False,
    computation: ComputationOption = "",
    stream: StreamOption = "",
    reason: ReasonOption = "",
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> int:
    """Give records up; the accounting keeps their number."""
    with _opened(words or [], database) as (admin, graph, ids):
        wanted = Wanted(graph=graph or "", computation=computation, stream=stream, reason=reason)
        chosen = _chosen(DEAD_LETTERS, admin, _wanted(ids, everything, wanted))
        return _discard(DEAD_LETTERS, chosen, admin, as_json=as_json)


@late.command("list")
@worded
def list_late(
    graph: GraphWord = None,
    computation: ComputationOption = "",
    stream: StreamOption = "",
    state: StateOption = "set_aside",
    limit: LimitOption = 50,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List late records, the newest last."""
    wanted = Wanted(computation=computation, stream=stream, state=state)
    _list(LATE_RECORDS, [graph] if graph else [], database, as_json, wanted, limit)


@late.command("show")
@worded
def show_late(
    number: Annotated[int, typer.Argument(metavar="ID")],
    graph: GraphWord = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show all there is about one late record."""
    _show(LATE_RECORDS, number, graph, database, as_json)


@late.command("replay")
@worded
def replay_late(
    words: Words = None,
    everything: AllOption = False,
    computation: ComputationOption = "",
    stream: StreamOption = "",
    wait_s: WaitOption = 0.0,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> int:
    """Have records judged again by where their computation stands now; what is late by that is late again."""
    with _opened(words or [], database) as (admin, graph, ids):
        wanted = Wanted(graph=graph or "", computation=computation, stream=stream)
        chosen = _chosen(LATE_RECORDS, admin, _wanted(ids, everything, wanted))
        return _replay(LATE_RECORDS, chosen, admin, "", wait_s, as_json=as_json)


@late.command("discard")
@worded
def discard_late(
    words: Words = None,
    everything: AllOption = False,
    computation: ComputationOption = "",
    stream: StreamOption = "",
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> int:
    """Give records up; the accounting keeps their number."""
    with _opened(words or [], database) as (admin, graph, ids):
        wanted = Wanted(graph=graph or "", computation=computation, stream=stream)
        chosen = _chosen(LATE_RECORDS, admin, _wanted(ids, everything, wanted))
        return _discard(LATE_RECORDS, chosen, admin, as_json=as_json)

"""`millpy dead-letters` and `millpy late`: list, show, replay or discard dead letters and late records."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from millpy.admin.dead_letters import (
    AT_ONCE,
    DEAD_LETTERS,
    LATE_RECORDS,
    RecordFilter,
    RecordTable,
    late_of,
    request_into_window,
    request_late,
    request_letters,
)
from millpy.admin.loaders import utc_text
from millpy.admin.queries import Admin
from millpy.cli import text_table as tables
from millpy.cli.options import (
    DatabaseOption,
    JsonOption,
    connected_to,
    duration_option,
    graph_in,
    handle_errors,
    print_json,
    settings_of,
)
from millpy.cli.recomputation import replay_recomputed
from millpy.clock import SystemClock
from millpy.errors import UsageError
from millpy.process.exit import EXIT_FAILED

progress = logging.getLogger("millpy.observability.status_line")
LOOK_EVERY_S = 0.1
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[GRAPH.py] [ID]...", help="Ids of the records, and the graph's file.", show_default=False),
]
GraphWord = Annotated[
    str | None, typer.Argument(metavar="[GRAPH.py]", help="Only records of this graph.", show_default=False)
]
AllOption = Annotated[
    bool, typer.Option("--all", help="Select all records that match the other options, instead of ids.")
]
ComputationOption = Annotated[str, typer.Option("--computation", metavar="NAME", help="Only from this computation.")]
StreamOption = Annotated[str, typer.Option("--stream", metavar="NAME", help="Only from this stream.")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="WORD", help="Only with this reason.")]
State = Literal["open", "requested", "replayed", "discarded", "any"]
StateOption = Annotated[State, typer.Option("--state", help="Only in this state.")]
LimitOption = Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, help="Show only the newest N.")]
PayloadOption = Annotated[
    str, typer.Option("--payload", metavar="FILE", help="Replay one record from this corrected payload (- for stdin).")
]
WaitOption = Annotated[float, duration_option("--wait", "0s", "How long to wait for the workers.")]

dead_letters = typer.Typer(
    help="List, replay or discard dead letters: records that did not decode, or that code or the database rejected.",
    no_args_is_help=True,
)
late = typer.Typer(help="List, replay or discard records that were too late for their window.", no_args_is_help=True)


@contextmanager
def _opened(words: Sequence[str], database: str | None) -> Iterator[tuple[Admin, str | None, list[int]]]:
    """Connect; yield the database, the graph's name if one is given, and the ids among the words."""
    ids = [int(word) for word in words if word.isdecimal()]
    locations = [word for word in words if not word.isdecimal()]
    if len(locations) > 1:
        raise UsageError(f"{locations[1]!r} is not the id of a record", hint="give ids, and at most one graph's file")
    location = locations[0] if locations else None
    with connected_to(settings_of(database), location) as admin:
        yield admin, graph_in(admin, location), ids


def _wanted(ids: Sequence[int], everything: bool, wanted: RecordFilter) -> RecordFilter:
    if bool(ids) == everything:
        raise UsageError(
            "select the records either by ids or by --all",
            hint="give ids, or --all (with --computation, --reason, …)",
        )
    return wanted if everything else RecordFilter(graph=wanted.graph, ids=tuple(ids))


def _list(
    table: RecordTable, words: Sequence[str], database: str | None, as_json: bool, wanted: RecordFilter, limit: int
) -> None:
    with _opened(words, database) as (admin, graph, _):
        # One more than is shown, to tell whether there are more.
        found = table.rows(admin, wanted.of_graph(graph), limit if as_json else limit + 1)
        unstored = [] if as_json else table.only_counted(admin, wanted.of_graph(graph))
    if as_json:
        print_json(found)
        return
    tables.echo([table.short(row) for row in found[-limit:]])
    if len(found) > limit:
        tables.say(f"these are the newest {limit:,}; -n shows more")
    for row in unstored:
        tables.say(
            f"and {row['not_kept']:,} more of {row['graph']}.{row['computation']} ({row['reason']}) that are counted,"
            " but not stored: see millpy.retention"
        )


def _show(table: RecordTable, number: int, graph: str | None, database: str | None, as_json: bool) -> None:
    with _opened([graph] if graph else [], database) as (admin, _, _):
        found = table.rows(admin, RecordFilter(ids=(number,)), 1)
    if not found:
        raise UsageError(f"there is no {table.word} {number}", hint=f"`millpy {table.command} list` lists them")
    if as_json:
        print_json(found[0])
        return
    for name, value in found[0].items():
        if name != "payload" and value not in (None, ""):
            tables.say(f"{name:>16}: {utc_text(str(value).rstrip()).replace(chr(10), chr(10) + ' ' * 18)}")


def _replay(
    table: RecordTable,
    ids: Sequence[int],
    admin: Admin,
    requested: int,
    wait_s: float,
    *,
    as_json: bool,
    more: Callable[[], tuple[Mapping[str, Any], Sequence[str]]] = lambda: ({}, ()),
) -> int:
    """Say how many of some records were requested, and wait for them; `more` has what else JSON or people get then."""
    if not as_json:
        tables.say(
            f"requested {requested} of {len(ids)} replays"
            + ("" if wait_s or not requested else "; a running worker does them")
        )
        if requested < len(ids):
            tables.say(
                f"the others are requested, settled, no records, or missing: see `millpy {table.command} show ID`"
            )
    states = _await(partial(table.states, admin, ids), wait_s) if ids else {}
    document, lines = more()
    if as_json:
        print_json({"requested": requested, "of": len(ids), "states": states if ids and wait_s else None, **document})
    elif states and wait_s:
        tables.say(_counted(states))
        if states.get("requested"):
            tables.say("some requests still wait: check with `millpy status` that a worker of this graph runs")
    for line in () if as_json else lines:
        tables.say(line)
    if not wait_s:  # another command may have requested them before
        return 0 if not ids or requested or states.get("requested") or states.get("replayed") else EXIT_FAILED
    unsettled = states.get("requested") or states.get("open")
    return 0 if not ids or (not unsettled and (requested or states.get("replayed"))) else EXIT_FAILED


def _late_of_letters(admin: Admin, ids: Sequence[int], wait_s: float) -> tuple[Mapping[str, Any], Sequence[str]]:
    """Return what became of dead letters that were too late for their windows."""
    late = _await(partial(late_of, admin, ids), wait_s) if wait_s else {}
    lines = [f"too late for finished windows: {_counted(late)}"] if late else []
    if late.get("open"):
        lines.append("some could not be added: `millpy late list --json` has the reasons in `detail`")
    return {"into_windows": late}, lines


def _refusals(admin: Admin, ids: Sequence[int], document: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[str]]:
    """Return why late records could not be added to their windows; `document` has what an archive was asked."""
    rows = LATE_RECORDS.rows(admin, RecordFilter(ids=tuple(ids)), AT_ONCE) if ids else []
    reasons = {str(row["detail"]) for row in rows if row["detail"] and row["state"] == "open"}
    reasons.update(document.get("refused", {}).values())
    return document, [f"not added: {reason}" for reason in sorted(reasons)]


def _await(ask: Callable[[], Mapping[str, int]], wait_s: float) -> Mapping[str, int]:
    """Wait at most `wait_s` until every request is settled. Return the number of records by state, as `ask` does."""
    clock = SystemClock()
    until = clock.monotonic() + wait_s
    while (states := ask()).get("requested") and clock.monotonic() < until:
        progress.debug("waiting for the replay: %s", _counted(states))
        asyncio.run(clock.sleep(LOOK_EVERY_S))
    return states


def _counted(states: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))


def _read(payload: str) -> bytes:
    if payload == "-":
        return sys.stdin.buffer.read().removesuffix(b"\n")
    path = Path(payload)
    if not path.is_file():
        raise UsageError(f"there is no file {payload}", hint="--payload takes a file with the corrected record")
    return path.read_bytes().removesuffix(b"\n")


def _chosen(table: RecordTable, admin: Admin, wanted: RecordFilter) -> list[int]:
    return list(wanted.ids) or table.ids(admin, wanted)


def _with_requested(table: RecordTable, admin: Admin, wanted: RecordFilter, chosen: Sequence[int]) -> list[int]:
    """Return what to request, and with --all what was requested before: by a command that was killed, for example."""
    return [*chosen, *([] if wanted.ids else table.ids(admin, replace(wanted, state="requested")))]


def _discard(table: RecordTable, ids: Sequence[int], admin: Admin, *, as_json: bool) -> int:
    gone = table.discard(admin, ids)
    if as_json:
        print_json({"discarded": gone, "of": len(ids)})
    else:
        tables.say(f"discarded {gone} of {len(ids)}; the accounting still counts them")
    return 0 if gone or not ids else EXIT_FAILED


def _check_why(why: str, *, into_window: bool) -> None:
    if why and not into_window:
        raise UsageError("--why belongs to --into-window", hint="give both, or neither")


@dead_letters.command("list")
@handle_errors
def list_dead_letters(
    graph: GraphWord = None,
    computation: ComputationOption = "",
    stream: StreamOption = "",
    reason: ReasonOption = "",
    state: StateOption = "open",
    limit: LimitOption = 50,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List dead letters, the newest last."""
    wanted = RecordFilter(computation=computation, stream=stream, reason=reason, state=state)
    _list(DEAD_LETTERS, [graph] if graph else [], database, as_json, wanted, limit)


@dead_letters.command("show")
@handle_errors
def show_dead_letter(
    number: Annotated[int, typer.Argument(metavar="ID")],
    graph: GraphWord = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one dead letter with its payload and traceback."""
    _show(DEAD_LETTERS, number, graph, database, as_json)


@dead_letters.command("replay")
@handle_errors
def replay_dead_letters(
    words: Words = None,
    everything: AllOption = False,
    computation: ComputationOption = "",
    stream: StreamOption = "",
    reason: ReasonOption = "",
    payload: PayloadOption = "",
    into_window: Annotated[
        bool, typer.Option("--into-window", help="Add a record that comes too late to the row of its finished window.")
    ] = False,
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="The reason, for millpy.corrections.")] = "",
    wait_s: WaitOption = 0.0,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> int:
    """Replay dead letters after a fix, each once and under its original dedupe id."""
    _check_why(why, into_window=into_window)
    with _opened(words or [], database) as (admin, graph, ids):
        wanted = RecordFilter(graph=graph or "", computation=computation, stream=stream, reason=reason)
        wanted = _wanted(ids, everything, wanted)
        chosen = _chosen(DEAD_LETTERS, admin, wanted)
        if payload and len(chosen) != 1:
            raise UsageError(f"--payload replays one record, not {len(chosen)}", hint="give the id of one dead letter")
        mended = _read(payload) if payload else None
        waiting = _with_requested(DEAD_LETTERS, admin, wanted, chosen)
        requested = request_letters(admin, chosen, mended, into_window=into_window, why=why)
        if not into_window:
            return _replay(DEAD_LETTERS, waiting, admin, requested, wait_s, as_json=as_json)
        more = partial(_late_of_letters, admin, waiting, wait_s)
        return _replay(DEAD_LETTERS, waiting, admin, requested, wait_s, as_json=as_json, more=more)


@dead_letters.command("discard")
@handle_errors
def discard_dead_letters(
    words: Words = None,
    everything: AllOption = False,
    computation: ComputationOption = "",
    stream: StreamOption = "",
    reason: ReasonOption = "",
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> int:
    """Discard dead letters; the accounting still counts them."""
    with _opened(words or [], database) as (admin, graph, ids):
        wanted = RecordFilter(graph=graph or "", computation=computation, stream=stream, reason=reason)
        chosen = _chosen(DEAD_LETTERS, admin, _wanted(ids, everything, wanted))
        return _discard(DEAD_LETTERS, chosen, admin, as_json=as_json)


@late.command("list")
@handle_errors
def list_late(
    graph: GraphWord = None,
    computation: ComputationOption = "",
    stream: StreamOption = "",
    state: StateOption = "open",
    limit: LimitOption = 50,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List records that were too late, the newest last."""
    wanted = RecordFilter(computation=computation, stream=stream, state=state)
    _list(LATE_RECORDS, [graph] if graph else [], database, as_json, wanted, limit)


@late.command("show")
@handle_errors
def show_late(
    number: Annotated[int, typer.Argument(metavar="ID")],
    graph: GraphWord = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one late record."""
    _show(LATE_RECORDS, number, graph, database, as_json)


@late.command("replay")
@handle_errors
def replay_late(
    words: Words = None,
    everything: AllOption = False,
    computation: ComputationOption = "",
    stream: StreamOption = "",
    into_window: Annotated[
        bool, typer.Option("--into-window", help="Add each record to the row of the finished window that it missed.")
    ] = False,
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="The reason, for millpy.corrections.")] = "",
    archive: Annotated[
        str,
        typer.Option(
            "--archive", metavar="PLACE", help="Recompute windows whose rows do not say enough from this archive."
        ),
    ] = "",
    wait_s: WaitOption = 0.0,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> int:
    """Replay late records. A record that is still too late for its window stays late, unless it goes --into-window."""
    _check_why(why, into_window=into_window)
    if archive and not into_window:
        raise UsageError("--archive belongs to --into-window", hint="give both, or neither")
    files = [word for word in words or [] if not word.isdecimal()]
    if archive and not files:
        raise UsageError("--archive needs the graph's file, to recompute windows", hint="name it: graph.py")
    with _opened(words or [], database) as (admin, graph, ids):
        wanted = RecordFilter(graph=graph or "", computation=computation, stream=stream)
        wanted = _wanted(ids, everything, wanted)
        chosen = _chosen(LATE_RECORDS, admin, wanted)
        waiting = _with_requested(LATE_RECORDS, admin, wanted, chosen)
        if not into_window:
            requested = request_late(admin, chosen)
            return _replay(LATE_RECORDS, waiting, admin, requested, wait_s, as_json=as_json)
        if archive:
            requested, document = replay_recomputed(admin, files[0], archive, chosen, why)
        else:
            requested, document = request_into_window(admin, chosen, why, {}), {}
        more = partial(_refusals, admin, waiting, document)
        return _replay(LATE_RECORDS, waiting, admin, requested, wait_s, as_json=as_json, more=more)


@late.command("discard")
@handle_errors
def discard_late(
    words: Words = None,
    everything: AllOption = False,
    computation: ComputationOption = "",
    stream: StreamOption = "",
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> int:
    """Discard late records; the accounting still counts them."""
    with _opened(words or [], database) as (admin, graph, ids):
        wanted = RecordFilter(graph=graph or "", computation=computation, stream=stream)
        chosen = _chosen(LATE_RECORDS, admin, _wanted(ids, everything, wanted))
        return _discard(LATE_RECORDS, chosen, admin, as_json=as_json)

"""`millpy status`: workers, sources, steps, accounts and sinks, once or (`--watch`) redrawn at an interval."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from millpy.admin.loaders import utc_text
from millpy.admin.queries import Admin, Row
from millpy.cli import text_table as tables
from millpy.cli.options import (
    READING_S_MAX,
    DatabaseOption,
    GraphArgument,
    JsonOption,
    connected_to,
    graph_in,
    handle_errors,
    settings_of,
    show,
)
from millpy.cli.sections import Section, lay_out
from millpy.cli.watch import Answers, EveryOption, Look, WatchOption, interval_of, watch_answers
from millpy.config.durations import format_duration, format_latency
from millpy.model.time import Instant

HEALTHY = ("running", "ended")


@handle_errors
def status(
    graph: GraphArgument = None,
    watch: WatchOption = False,
    every_s: EveryOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show workers, sources, steps, sinks, accounts, injected records that wait, and silent devices.

    A terminal gets short tables, the rows that need somebody first; a pipe and --json get all columns.
    """
    every = interval_of(watch, every_s)
    if every is not None:
        ask = _documents if as_json else _answers
        watch_answers(graph, database, every, ask, status_sections, as_json=as_json)
    elif as_json or tables.terminal_width() is None:
        show(graph, database, as_json, _documents if as_json else _whole)
    else:
        with connected_to(settings_of(database), graph, READING_S_MAX) as admin:
            answers = _answers(admin, graph_in(admin, graph))
        sections = status_sections(Look(Instant(0), 0.0, answers), None)
        tables.say("\n".join(lay_out([], sections, tables.terminal_width(), None)[1:]))


def _documents(admin: Admin, name: str | None) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {
        "workers": admin.workers(name),
        "sources": admin.sources(name),
        "accounting": admin.accounting(name),
    }
    if sinks := admin.sinks(name):
        found["sinks"] = sinks
    if refused := admin.refused_results(name):
        found["refused_results"] = refused
    if injections := admin.injections(name):
        found["injections"] = injections
    return {**found, "silences": admin.silences(name)}


def _answers(admin: Admin, name: str | None) -> dict[str, list[Row]]:
    return {**_documents(admin, name), "watermarks": admin.watermarks(name)}


def _whole(admin: Admin, name: str | None) -> dict[str, list[Row]]:
    """Return the tables for a pipe: devices as text, and no empty list of silences."""
    found = _documents(admin, name)
    lines: list[Row] = [{**row, "longest_silent": ", ".join(row["longest_silent"])} for row in found.pop("silences")]
    return {**found, "silences": lines} if lines else found


def status_sections(now: Look, before: Look | None) -> list[Section]:
    """Return the sections of a look; with the look before it, also how many records a second there were."""
    rates = Rates(now, before)
    found = [
        _workers(now.answers["workers"]),
        *_refused_results(now.answers.get("refused_results", ())),
        source_section(now, before),
        _steps(now.answers, rates),
        _accounts(now.answers["accounting"]),
        *_sinks(now.answers.get("sinks", ())),
        *_injections(now.answers.get("injections", ())),
        *_silences(now.answers["silences"]),
    ]
    return named_once(found)


def named_once(found: Sequence[Section]) -> list[Section]:
    """Return sections without the column of the graph if all rows have the same."""
    if len({row["graph"] for section in found for row in section.rows}) > 1:
        return list(found)
    return [
        Section(
            section.title,
            [{key: value for key, value in row.items() if key != "graph"} for row in section.rows],
            section.notes,
        )
        for section in found
    ]


class Rates:
    """Records a second between two looks, by what is counted; None where a counter is new or has begun anew."""

    def __init__(self, now: Look, before: Look | None) -> None:
        self._elapsed_s = now.at_s - before.at_s if before is not None else 0.0
        self._before = _counts(before.answers) if before is not None else {}
        self._now = _counts(now.answers)

    def rate(self, *counted: str) -> float | None:
        """Return the rate of a counter, named by its graph and what it belongs to."""
        before, count = self._before.get(counted), self._now.get(counted)
        if before is None or count is None or count < before or self._elapsed_s <= 0:
            return None
        return round((count - before) / self._elapsed_s, 1)


def _counts(answers: Answers) -> dict[tuple[str, ...], int]:
    found: dict[tuple[str, ...], int] = defaultdict(int)
    for row in answers["sources"]:
        found[row["graph"], row["stream"], row["source_partition"]] += row["injected"]
    for row in answers.get("accounting", ()):
        if row["consumer"] is not None:
            found[row["graph"], row["consumer"]] += row["consumed"]
    return found


def _workers(rows: Iterable[Row]) -> Section:
    lines = [
        {
            "graph": row["graph"], "worker": str(row["worker_id"])[:8], "intervals": row["intervals"],
            "state": _state_of_worker(row), "host": row["host"], "pid": row["pid"],
            "only": ", ".join(row["computations"]), "memory": _known(row["memory_bytes"], _megabytes),
            "turn_p99": _known(row["turn_p99_s"], format_latency),
            "commit_p99": _known(row["commit_p99_s"], format_latency),
        }
        for row in rows
    ]  # fmt: skip
    return Section("workers", sorted(lines, key=lambda line: line["state"] == "live"), [] if lines else ["(none)"])


def _state_of_worker(row: Row) -> str:
    if not row["live"]:
        return "lease ended"
    return "draining" if row["drain_requested_at"] else "live"


def _known(value: float | None, shown: Callable[[float], str]) -> str | None:
    return None if value is None else shown(value)


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.0f} MB"


def source_section(now: Look, before: Look | None) -> Section:
    """Return the section of the source partitions."""
    rates, lines, notes = Rates(now, before), [], []
    rows = sorted(now.answers["sources"], key=lambda row: row["state"] in HEALTHY)
    for row in rows:
        graph, stream, partition = row["graph"], row["stream"], row["source_partition"]
        lines.append({
            "graph": graph, "source": stream, "partition": partition, "state": row["state"],
            "records": row["injected"], "per_s": rates.rate(graph, stream, partition),
            "dups": row["duplicate"], "dead": row["dead_lettered"],
        })  # fmt: skip
        if why := row["disconnected_because"]:
            notes.append(f"{stream} {partition}: disconnected since {_utc(row['connection_since'])}: {why}")
        if why := row["paused_because"]:
            notes.append(f"{stream} {partition}: paused since {_utc(row['paused_at'])}: {why}")
    return Section("sources", lines, notes if lines else ["(none)"])


def _utc(time: object) -> str:
    return utc_text(str(time))


def _steps(answers: Answers, rates: Rates) -> Section:
    """Return one line for each step in the order of the graph: how far behind, what came, what waits."""
    sums: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in answers["accounting"]:
        if row["consumer"] is not None:
            of = sums[row["graph"], row["consumer"]]
            for name in ("consumed", "pending", "late", "dead_lettered", "parked"):
                of[name] += row[name] or 0
    behind: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in answers["watermarks"]:
        behind[row["graph"], row["computation"]].append(row)
    lines = [
        {
            "graph": graph, "step": step, "lag": _lag(rows), "records": sum_of["consumed"],
            "per_s": rates.rate(graph, step), "pending": sum_of["pending"], "late": sum_of["late"],
            "dead": sum_of["dead_lettered"], "parked": sum_of["parked"] or None,
        }
        for (graph, step), rows in behind.items()
        if (sum_of := sums.get((graph, step))) is not None
    ]  # fmt: skip
    return Section("steps", lines, [] if lines else ["(none)"])


def _lag(rows: Sequence[Row]) -> str:
    """Return how far the slowest interval of a step is behind the clock."""
    lags: list[timedelta] = [row["lag"] for row in rows if row["lag"] is not None]
    if any(str(row["low_watermark"]) == "-infinity" for row in rows):
        return "no watermark"
    return format_duration(max(lags)) if lags else "ended"


def _accounts(rows: Sequence[Row]) -> Section:
    wrong = [
        {
            "graph": row["graph"],
            "account": row["source_partition"] or row["consumer"] or row["result_table"],
            **{name: row[name] for name in ("injected", "accepted", "duplicate", "produced", "added", "filtered",
                                            "consumed", "late", "dead_lettered", "parked", "pending")},
        }
        for row in rows
        if row["balanced"] is False
    ]  # fmt: skip
    if not wrong:
        return Section("accounts", notes=[f"{len(rows)} of {len(rows)} balanced" if rows else "(none)"])
    return Section("accounts", wrong, [f"{len(wrong)} of {len(rows)} are NOT balanced: run `millpy doctor`"])


def _refused_results(rows: Sequence[Row]) -> list[Section]:
    lines = [{name: row[name] for name in ("graph", "refused", "since", "attempts")} for row in rows]
    notes = [f"{row['refused']}: {row['why']}" for row in rows]
    return [Section("refused results", lines, notes)] if lines else []


def _sinks(rows: Sequence[Row]) -> list[Section]:
    lines = [{name: row[name] for name in row if name != "why"} for row in _trouble_first(rows)]
    notes = [f"{row['sink']}: {row['why']}" for row in _trouble_first(rows) if row["why"]]
    return [Section("sinks", lines, notes)] if lines else []


def _trouble_first(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row["state"] in HEALTHY and not row["refused"])


def _injections(rows: Sequence[Row]) -> list[Section]:
    shown = ("graph", "source", "waiting", "waiting_max", "oldest_at", "open_transactions", "open_since")
    return [Section("injected records", [{name: row[name] for name in shown} for row in rows])] if rows else []


def _silences(rows: Sequence[Row]) -> list[Section]:
    lines: list[Mapping[str, Any]] = [
        {
            "graph": row["graph"], "step": row["computation"], "silent": row["silent_devices"],
            "since": row["silent_since"], "longest": ", ".join(row["longest_silent"]),
        }
        for row in rows
    ]  # fmt: skip
    return [Section("silent devices", lines)] if lines else []

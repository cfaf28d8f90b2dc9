"""The findings of a crash test as one plain value, from which JSON, the terminal's text and the page are made.

All times are seconds from the first record of the crash run.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

import msgspec

from millpy.config.secrets import redacted
from millpy.model.time import Instant, to_datetime
from millpy.testing.crash_test.compare import Difference, RowChange
from millpy.testing.crash_test.nondeterminism import shape_reasons, suspects
from millpy.testing.crash_test.observer import Sample
from millpy.testing.crash_test.options import Options
from millpy.testing.crash_test.session import Findings
from millpy.testing.crash_test.verdict import Judgment, by_table

SAMPLES_MAX = 800
DIFFERENCES_MAX = 200
HEADLINES = {
    Judgment.EXACT: "Exactly once",
    Judgment.DIFFERENT: "Results differ",
    Judgment.UNSTEADY: "Not deterministic",
    Judgment.STUCK: "Did not finish",
}
MEANING = {
    Judgment.EXACT: "No row was lost, doubled or changed: the results equal those of a run without faults.",
    Judgment.DIFFERENT: "Two runs without faults agree with each other; the run with faults differs from them.",
    Judgment.UNSTEADY: (
        "Runs without any fault differ from each other in some values, so a crash test cannot judge those."
        " All other values are right."
    ),
    Judgment.STUCK: "The run with faults did not finish.",
}


class FaultReport(msgspec.Struct, frozen=True):
    """One fault: `over_s` is its own end, `recovered_s` when the system had recovered."""

    number: int
    kind: str
    what: str
    at_s: float
    over_s: float | None
    recovered_s: float | None
    worker: int | None
    owned: int

    @property
    def recovery_s(self) -> float | None:
        """The time from the fault until all intervals were owned again and the records fed before were committed."""
        return None if self.recovered_s is None else self.recovered_s - self.at_s


class ProcessReport(msgspec.Struct, frozen=True):
    """One process in a worker's slot; `ready_s` is when it had registered, None if it never did."""

    worker: int
    from_s: float
    ready_s: float | None
    to_s: float
    how: str
    frozen: tuple[tuple[float, float], ...]


class TakeoverReport(msgspec.Struct, frozen=True):
    """Intervals of one computation that another worker took over."""

    at_s: float
    computation: str
    intervals: int
    from_worker: int | None
    to_worker: int | None


class InputPoint(msgspec.Struct, frozen=True):
    """The numbers of records fed and committed at one time."""

    at_s: float
    fed: int
    committed: int


class RecoveryTimes(msgspec.Struct, frozen=True):
    """Recovery times of one kind of fault, or of all."""

    faults: int
    median_s: float
    longest_s: float


class TableResult(msgspec.Struct, frozen=True):
    """The comparison of one table; `undecided` counts differences of rows that differ without faults, too."""

    name: str
    rows: int
    lost: int
    doubled: int
    changed: int
    undecided: int
    unsteady_columns: tuple[str, ...]
    unsteady_rows: bool


class ChangedRow(msgspec.Struct, frozen=True):
    """One row that differs; values as text."""

    table: str
    change: str
    identity: dict[str, str]
    columns: tuple[str, ...]
    expected: dict[str, str] | None
    found: dict[str, str] | None


class Unsteadiness(msgspec.Struct, frozen=True):
    """The differences of two runs without faults in one table, and their possible causes."""

    table: str
    columns: tuple[str, ...]
    rows: bool
    reasons: tuple[str, ...]
    differences: int
    examples: tuple[ChangedRow, ...]


class SuspectLine(msgspec.Struct, frozen=True):
    """A line of the graph's file that can make runs differ."""

    line: int
    code: str
    why: str


class CrashReport(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of a crash test; see the module for the times."""

    graph: str
    file: str
    command: str
    made_at: datetime
    database: str
    verdict: str
    passed: bool
    headline: str
    meaning: str
    lost: int
    doubled: int
    changed: int
    complaints: tuple[str, ...]
    records: int
    inputs: dict[str, str]
    workers: int
    seed: int
    lease_s: float
    seconds: float
    reference_s: float
    recovery: RecoveryTimes | None
    recovery_by_kind: dict[str, RecoveryTimes]
    faults: tuple[FaultReport, ...]
    takeovers: tuple[TakeoverReport, ...]
    processes: tuple[ProcessReport, ...]
    progress: tuple[InputPoint, ...]
    events: dict[str, int]
    tables: tuple[TableResult, ...]
    differences: tuple[ChangedRow, ...]
    unsteady: tuple[Unsteadiness, ...]
    suspects: tuple[SuspectLine, ...]
    files: str | None


def build(findings: Findings, now_us: Instant) -> CrashReport:
    """Make the report of a finished crash test."""
    verdict, crash, options = findings.verdict, findings.crash, findings.options
    judgment = verdict.judgment
    faults = _faults(findings)
    doubtful = judgment in (Judgment.DIFFERENT, Judgment.UNSTEADY)
    by_kind = {kind: _recovery_times([fault for fault in faults if fault.kind == kind]) for kind in options.faults}
    return CrashReport(
        graph=findings.graph.name,
        file=options.graph,
        command=command_line(options),
        made_at=to_datetime(now_us),
        database=findings.server,
        verdict=str(judgment),
        passed=verdict.passed,
        headline=HEADLINES[judgment],
        meaning=MEANING[judgment],
        lost=verdict.count(RowChange.LOST),
        doubled=verdict.count(RowChange.DOUBLED),
        changed=verdict.count(RowChange.CHANGED),
        complaints=tuple(map(redacted, verdict.faults)),
        records=crash.fed,
        inputs={source.stream: f"{source.origin} ({source.total:,} records)" for source in findings.prepared},
        workers=options.workers,
        seed=options.seed,
        lease_s=options.lease_s,
        seconds=crash.seconds,
        reference_s=findings.references[0].seconds,
        recovery=_recovery_times(faults),
        recovery_by_kind={kind: spread for kind, spread in by_kind.items() if spread is not None},
        faults=tuple(faults),
        takeovers=tuple(_takeovers(findings)),
        processes=tuple(_processes(findings)),
        progress=tuple(InputPoint(s.at - crash.started, s.fed, s.committed) for s in _thin_out(crash.samples)),
        events=dict(crash.events),
        tables=tuple(_tables(findings)),
        differences=tuple(_changed(found) for found in verdict.found[:DIFFERENCES_MAX]),
        unsteady=tuple(_unsteadiness(findings)),
        suspects=tuple(_suspects(options.graph)) if doubtful else (),
        files=None if findings.files is None else str(findings.files),
    )


def command_line(options: Options) -> str:
    """Return the command that repeats the test."""
    words = ["millpy crash-test", options.graph, *(f"--input {path}" for path in options.inputs)]
    if options.generate is not None:
        words.append(f"--generate {options.generate}")
    words += [f"--kills {options.count}", f"--workers {options.workers}", f"--seed {options.seed}"]
    return " ".join([*words, f"--faults {','.join(options.faults)}"])


def _faults(findings: Findings) -> list[FaultReport]:
    start = findings.crash.started

    def seconds_to(at: float | None) -> float | None:
        return None if at is None else at - start

    return [
        FaultReport(
            fault.number,
            str(fault.kind),
            fault.what,
            fault.at - start,
            seconds_to(fault.over),
            seconds_to(fault.recovered),
            None if fault.slot is None else fault.slot + 1,
            fault.owned,
        )
        for fault in findings.crash.struck
    ]


def _processes(findings: Findings) -> list[ProcessReport]:
    crash, start = findings.crash, findings.crash.started
    return [
        ProcessReport(
            process.slot + 1,
            process.started - start,
            crash.registered[process.pid] - start if process.pid in crash.registered else None,
            (crash.ended if process.ended is None else process.ended) - start,
            process.how,
            tuple((a - start, b - start) for a, b in process.frozen),
        )
        for process in crash.processes
    ]


def _recovery_times(faults: Iterable[FaultReport]) -> RecoveryTimes | None:
    times = [fault.recovery_s for fault in faults if fault.recovery_s is not None]
    return RecoveryTimes(len(times), statistics.median(times), max(times)) if times else None


def _takeovers(findings: Findings) -> list[TakeoverReport]:
    workers = {process.pid: process.slot + 1 for process in findings.crash.processes}
    groups: Counter[tuple[float, str, int, int]] = Counter()
    for takeover in findings.crash.takeovers:
        groups[takeover.at, takeover.computation, takeover.from_pid, takeover.to_pid] += 1
    return [
        TakeoverReport(at - findings.crash.started, computation, count, workers.get(before), workers.get(after))
        for (at, computation, before, after), count in groups.items()
    ]


def _thin_out(samples: Sequence[Sample]) -> Sequence[Sample]:
    step = max(1, len(samples) // SAMPLES_MAX)
    return [*samples[:-1:step], *samples[-1:]]


def _tables(findings: Findings) -> list[TableResult]:
    verdict = findings.verdict
    counts, undecided = by_table(verdict.found), by_table(verdict.undecided)
    found = []
    for name, rows in verdict.compared.items():
        count, parts = counts.get(name, Counter()), verdict.unsteady.get(name)
        found.append(
            TableResult(
                name,
                rows,
                count[RowChange.LOST],
                count[RowChange.DOUBLED],
                count[RowChange.CHANGED],
                undecided.get(name, Counter()).total(),
                tuple(sorted(parts.columns)) if parts else (),
                bool(parts and parts.rows),
            )
        )
    return found


def _suspects(location: str) -> Iterator[SuspectLine]:
    for found in suspects(location):
        yield SuspectLine(found.line, redacted(found.code), found.why)


def _unsteadiness(findings: Findings) -> list[Unsteadiness]:
    return [
        Unsteadiness(
            table,
            tuple(sorted(parts.columns)),
            parts.rows,
            tuple(shape_reasons(findings.graph, table)),
            len(parts.differences),
            tuple(_changed(found) for found in parts.differences[:DIFFERENCES_MAX]),
        )
        for table, parts in findings.verdict.unsteady.items()
    ]


def _changed(found: Difference) -> ChangedRow:
    def texts(values: dict[str, object] | None) -> dict[str, str] | None:
        return None if values is None else {name: _text(value) for name, value in values.items()}

    return ChangedRow(
        found.table,
        str(found.change),
        texts(found.identity) or {},
        found.columns,
        texts(found.expected),
        texts(found.found),
    )


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")[:300]
    return str(value)[:300]


def as_json(report: CrashReport) -> bytes:
    """Return the report as JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"

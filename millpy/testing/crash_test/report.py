"""Report: what a crash test has found, as one plain value; JSON is made of it, the terminal's words, and the page.

All times are seconds from the first record of the crash run.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime

import msgspec

from millpy.model.time import Instant, to_datetime
from millpy.secret import redacted
from millpy.testing.crash_test.compare import Change, Difference
from millpy.testing.crash_test.options import Options
from millpy.testing.crash_test.reasons import shape_reasons, suspects
from millpy.testing.crash_test.session import Findings
from millpy.testing.crash_test.verdict import Judgement, by_table
from millpy.testing.crash_test.watch import Sample

SAMPLES_MAX = 800
DIFFERENCES_MAX = 200
HEADLINES = {
    Judgement.EXACT: "Exactly once",
    Judgement.DIFFERENT: "Results differ",
    Judgement.UNSTEADY: "Not deterministic",
    Judgement.STUCK: "Did not finish",
}
MEANING = {
    Judgement.EXACT: "Nothing was lost, nothing doubled, nothing changed: every row is that of a run without faults.",
    Judgement.DIFFERENT: "Two runs without faults agree with each other; the run with faults does not agree with them.",
    Judgement.UNSTEADY: (
        "Runs without any fault do not agree with each other about some values, so a crash test can decide nothing"
        " about those. Everything else is as it should be."
    ),
    Judgement.STUCK: "The run with faults did not come to its end.",
}


class Fault(msgspec.Struct, frozen=True):
    """One fault: `over_s` is its own end, `recovered_s` when the system was whole again."""

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
        """From the fault until all was owned again and what had been fed was committed."""
        return None if self.recovered_s is None else self.recovered_s - self.at_s


class Process(msgspec.Struct, frozen=True):
    """One process of a worker's slot; `ready_s` is when it had announced itself, None if it never did."""

    worker: int
    from_s: float
    ready_s: float | None
    to_s: float
    how: str
    frozen: tuple[tuple[float, float], ...]


class Takeover(msgspec.Struct, frozen=True):
    """Intervals of one computation that came to another worker."""

    at_s: float
    computation: str
    intervals: int
    from_worker: int | None
    to_worker: int | None


class Point(msgspec.Struct, frozen=True):
    """How far the input was."""

    at_s: float
    fed: int
    committed: int


class Spread(msgspec.Struct, frozen=True):
    """Recovery times of one kind of fault, or of all."""

    faults: int
    median_s: float
    longest_s: float


class TableResult(msgspec.Struct, frozen=True):
    """What became of one table."""

    name: str
    rows: int
    lost: int
    doubled: int
    changed: int
    undecided: int
    unsteady_columns: tuple[str, ...]
    unsteady_rows: bool


class Changed(msgspec.Struct, frozen=True):
    """One row that differs; values as text."""

    table: str
    change: str
    identity: dict[str, str]
    columns: tuple[str, ...]
    expected: dict[str, str] | None
    found: dict[str, str] | None


class Unsteadiness(msgspec.Struct, frozen=True):
    """What two runs without faults do not agree about in one table, and why that can be."""

    table: str
    columns: tuple[str, ...]
    rows: bool
    reasons: tuple[str, ...]
    differences: int
    examples: tuple[Changed, ...]


class Line(msgspec.Struct, frozen=True):
    """A line of the graph's file that can make runs differ."""

    line: int
    code: str
    why: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything; see the module."""

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
    recovery: Spread | None
    recovery_by_kind: dict[str, Spread]
    faults: tuple[Fault, ...]
    takeovers: tuple[Takeover, ...]
    processes: tuple[Process, ...]
    progress: tuple[Point, ...]
    events: dict[str, int]
    tables: tuple[TableResult, ...]
    differences: tuple[Changed, ...]
    unsteady: tuple[Unsteadiness, ...]
    suspects: tuple[Line, ...]
    files: str | None


def build(findings: Findings, now_us: Instant) -> Report:
    """The report of a finished crash test."""
    verdict, crash, options = findings.verdict, findings.crash, findings.options
    judgement = verdict.judgement
    faults = _faults(findings)
    doubtful = judgement in (Judgement.DIFFERENT, Judgement.UNSTEADY)
    by_kind = {kind: _spread([fault for fault in faults if fault.kind == kind]) for kind in options.faults}
    return Report(
        graph=findings.graph.name,
        file=options.graph,
        command=command_line(options),
        made_at=to_datetime(now_us),
        database=findings.place,
        verdict=str(judgement),
        passed=verdict.passed,
        headline=HEADLINES[judgement],
        meaning=MEANING[judgement],
        lost=verdict.count(Change.LOST),
        doubled=verdict.count(Change.DOUBLED),
        changed=verdict.count(Change.CHANGED),
        complaints=tuple(map(redacted, verdict.faults)),
        records=crash.fed,
        inputs={source.stream: f"{source.origin} ({source.total:,} records)" for source in findings.prepared},
        workers=options.workers,
        seed=options.seed,
        lease_s=options.lease_s,
        seconds=crash.seconds,
        reference_s=findings.references[0].seconds,
        recovery=_spread(faults),
        recovery_by_kind={kind: spread for kind, spread in by_kind.items() if spread is not None},
        faults=tuple(faults),
        takeovers=tuple(_takeovers(findings)),
        processes=tuple(_processes(findings)),
        progress=tuple(Point(s.at - crash.started, s.fed, s.committed) for s in _thinned(crash.samples)),
        events=dict(crash.events),
        tables=tuple(_tables(findings)),
        differences=tuple(_changed(found) for found in verdict.found[:DIFFERENCES_MAX]),
        unsteady=tuple(_unsteadiness(findings)),
        suspects=tuple(Line(s.line, redacted(s.code), s.why) for s in (suspects(options.graph) if doubtful else ())),
        files=None if findings.files is None else str(findings.files),
    )


def command_line(options: Options) -> str:
    """The command that runs the same again."""
    words = ["millpy crash-test", options.graph, *(f"--input {path}" for path in options.inputs)]
    if options.generate is not None:
        words.append(f"--generate {options.generate}")
    words += [f"--kills {options.count}", f"--workers {options.workers}", f"--seed {options.seed}"]
    return " ".join([*words, f"--faults {','.join(options.faults)}"])


def _faults(findings: Findings) -> list[Fault]:
    start = findings.crash.started

    def since(at: float | None) -> float | None:
        return None if at is None else at - start

    return [
        Fault(
            fault.number,
            str(fault.kind),
            fault.what,
            fault.at - start,
            since(fault.over),
            since(fault.recovered),
            None if fault.slot is None else fault.slot + 1,
            fault.owned,
        )
        for fault in findings.crash.struck
    ]


def _processes(findings: Findings) -> list[Process]:
    crash, start = findings.crash, findings.crash.started
    return [
        Process(
            life.slot + 1,
            life.started - start,
            crash.registered[life.pid] - start if life.pid in crash.registered else None,
            (crash.ended if life.ended is None else life.ended) - start,
            life.how,
            tuple((a - start, b - start) for a, b in life.frozen),
        )
        for life in crash.lives
    ]


def _spread(faults: Iterable[Fault]) -> Spread | None:
    times = [fault.recovery_s for fault in faults if fault.recovery_s is not None]
    return Spread(len(times), statistics.median(times), max(times)) if times else None


def _takeovers(findings: Findings) -> list[Takeover]:
    workers = {life.pid: life.slot + 1 for life in findings.crash.lives}
    groups: Counter[tuple[float, str, int, int]] = Counter()
    for takeover in findings.crash.takeovers:
        groups[takeover.at, takeover.computation, takeover.from_pid, takeover.to_pid] += 1
    return [
        Takeover(at - findings.crash.started, computation, count, workers.get(before), workers.get(after))
        for (at, computation, before, after), count in groups.items()
    ]


def _thinned(samples: Sequence[Sample]) -> Sequence[Sample]:
    step = max(1, len(samples) // SAMPLES_MAX)
    return [*samples[:-1:step], *samples[-1:]]


def _tables(findings: Findings) -> list[TableResult]:
    verdict = findings.verdict
    counts, undecided = by_table(verdict.found), by_table(verdict.undecided)
    found = []
    for name, rows in verdict.compared.items():
        count, wavers = counts.get(name, Counter()), verdict.unsteady.get(name)
        found.append(
            TableResult(
                name,
                rows,
                count[Change.LOST],
                count[Change.DOUBLED],
                count[Change.CHANGED],
                undecided.get(name, Counter()).total(),
                tuple(sorted(wavers.columns)) if wavers else (),
                bool(wavers and wavers.rows),
            )
        )
    return found


def _unsteadiness(findings: Findings) -> list[Unsteadiness]:
    return [
        Unsteadiness(
            table,
            tuple(sorted(wavers.columns)),
            wavers.rows,
            tuple(shape_reasons(findings.graph, table)),
            len(wavers.differences),
            tuple(_changed(found) for found in wavers.differences[:DIFFERENCES_MAX]),
        )
        for table, wavers in findings.verdict.unsteady.items()
    ]


def _changed(found: Difference) -> Changed:
    def texts(values: dict[str, object] | None) -> dict[str, str] | None:
        return None if values is None else {name: _text(value) for name, value in values.items()}

    return Changed(
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


def as_json(report: Report) -> bytes:
    """The report for machines."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"

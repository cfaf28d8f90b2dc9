"""A whole crash test, in order. READ THIS FIRST.

prepare    the input of each source, as lines on disk
reference  one worker, large bundles, all input at once
reference  again, with several workers and small bundles: where the two differ, faults are not the cause
crash      the same input, paced so that it lasts as long as the faults
judge      every result table, late record, dead letter and account
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from millpy.clock import Clock
from millpy.embedded import mosquitto_program
from millpy.errors import UsageError
from millpy.graph import Graph
from millpy.graph.loader import load_graph
from millpy.graph.nodes import StageNode
from millpy.observability.status_line import working
from millpy.testing.crash_test.broker import injectors_over_broker
from millpy.testing.crash_test.databases import DatabaseServer, server_for
from millpy.testing.crash_test.inputs import PreparedInput, prepare
from millpy.testing.crash_test.options import FaultKind, Options
from millpy.testing.crash_test.plan import draw
from millpy.testing.crash_test.run import GraphUnderTest, Trial, TrialOutcome, TrialSettings
from millpy.testing.crash_test.terminal import Display
from millpy.testing.crash_test.verdict import CrashVerdict, judge

SMALL_BUNDLES = 400
"""The number of bundles into which the second reference cuts its input."""
SECOND_S = 4.0
BROKER_RATE_MAX = 1_000.0
"""The highest rate over a broker that saves after every change, in records a second."""
SHARE_OF_CAPACITY = 0.5
"""The crash run is fed at most at this share of the first reference's rate, so that it can catch up after a fault."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything from which a report is made.

    Attributes:
        server: a description of the database server.
        files: where feeds, logs and data are; None if they were removed.
    """

    options: Options
    graph: Graph
    server: str
    prepared: list[PreparedInput]
    references: tuple[TrialOutcome, TrialOutcome]
    crash: TrialOutcome
    verdict: CrashVerdict
    files: Path | None


def crash_test(options: Options, directory: Path, clock: Clock, display: Display) -> Findings:
    """Run a whole crash test.

    Args:
        options: the arguments.
        directory: where the files of this test go; created if missing.
        clock: times everything.
        display: shows the progress.

    Raises:
        UsageError: the graph, its input or the database cannot be used, or the graph fails without any fault.
    """
    graph = load_graph(options.graph)
    graph.spec()
    if FaultKind.BROKER in options.faults:
        refuse_without_broker(graph)
    refuse_without_tables(graph, options)
    refuse_arrival(graph)
    directory.mkdir(parents=True, exist_ok=True)
    files = Path(tempfile.mkdtemp(prefix="run-", dir=directory))
    keep = True  # keep the files of a failure
    try:
        with working("writing the input of each source"):
            prepared = prepare(graph, options, files / "input")
        display.say(", ".join(f"{source.stream}: {source.total:,} records, {source.origin}" for source in prepared))
        with working("creating a database"):
            server = server_for(options.database_url, graph.name, files / "postgres", options.sql)
        try:
            findings = _trials(options, graph, prepared, server, files, clock, display)
            keep = options.keep or not findings.verdict.passed
        finally:
            server.close(keep=keep)
    except (UsageError, KeyboardInterrupt, SystemExit):
        keep = options.keep
        raise
    finally:
        if not keep:
            shutil.rmtree(files, ignore_errors=True)
    return replace(findings, files=files if keep else None)


def _trials(
    options: Options,
    graph: Graph,
    prepared: Sequence[PreparedInput],
    server: DatabaseServer,
    files: Path,
    clock: Clock,
    display: Display,
) -> Findings:
    tested = GraphUnderTest(options.graph, graph, prepared)

    def run(setting: TrialSettings) -> TrialOutcome:
        trial = Trial(tested, setting, server, files, clock, show=display.show, report=display.show_fault)
        with display.trial(setting.name):
            return trial.run()

    records = sum(source.total for source in prepared)
    first = run(TrialSettings(name="reference", workers=1, lease_s=options.lease_s))
    _refuse_failed(first)
    small = {"MILLPY_BUNDLE_RECORDS_MAX": str(max(50, records // SMALL_BUNDLES))}
    several = 3 if options.workers == 2 else 2
    again = TrialSettings(name="reference_2", workers=several, lease_s=options.lease_s, limits=small, over_s=SECOND_S)
    second = run(again)
    _refuse_failed(second)
    plan = draw(options.faults, options.count, options.seed)
    rate = SHARE_OF_CAPACITY * records / first.seconds
    unique = None
    if FaultKind.BROKER in options.faults:
        unique = (first.results.injected - first.results.duplicates) / first.results.injected
        rate = min(rate, BROKER_RATE_MAX)
    setting = TrialSettings(
        name="crash", workers=options.workers, lease_s=options.lease_s, plan=plan, rate_max=rate, unique=unique
    )
    crash = run(setting)
    with working("comparing every row"):
        verdict = judge(
            first.results,
            second.results,
            crash.results,
            fed=crash.fed,
            stuck=crash.stuck,
            redelivers=unique is not None,
        )
    return Findings(options, graph, server.description, list(prepared), (first, second), crash, verdict, files)


def refuse_without_broker(graph: Graph) -> None:
    """Raise unless there is an MQTT source that deduplicates, and a broker that keeps what it has acknowledged.

    Raises:
        UsageError: one of them is missing.
    """
    over_broker = injectors_over_broker(graph)
    if not over_broker:
        raise UsageError("no source of the graph is MQTT", hint="leave `broker` out of --faults")
    for node in over_broker:
        if node.dedupe is None:
            raise UsageError(
                f"{node.name!r} has no Dedupe, but a broker delivers messages twice after a crash",
                hint='deduplicate, Dedupe("id", within=hours(1)), or leave `broker` out of --faults',
            )
    if mosquitto_program() is None:
        raise UsageError(
            "broker faults need mosquitto: the embedded broker forgets its messages when it is killed",
            hint="install mosquitto, or leave `broker` out of --faults",
        )


def refuse_without_tables(graph: Graph, options: Options) -> None:
    """Raise if the graph looks up in tables that an embedded database does not have: its records would wait for ever.

    Raises:
        UsageError: neither a database nor the tables were given.
    """
    names = {table.name for node in graph.nodes if isinstance(node, StageNode) for table in node.tables}
    if names and options.sql is None and options.database_url is None:
        raise UsageError(
            f"the graph looks up in {', '.join(sorted(names))}, and the embedded database has no tables of yours",
            hint="name a file with SQL that makes them: --sql tables.sql",
        )


def refuse_arrival(graph: Graph) -> None:
    """Raise if a source has the arrival as event time: each run has other arrivals, so runs cannot be compared.

    Raises:
        UsageError: it has.
    """
    for node in graph.injectors():
        if node.event_time.arrives:
            raise UsageError(
                f"source {node.name!r} has event_time=EventTime.arrival(): each run has other arrivals",
                hint="test the graph with a field of the records as event time",
            )


def _refuse_failed(outcome: TrialOutcome) -> None:
    if outcome.stuck:
        raise UsageError(
            f"the graph does not finish even without faults: {outcome.stuck}",
            hint="run it with `millpy run` first",
        )
    if outcome.results.unbalanced:
        raise UsageError(f"the accounting of {outcome.results.unbalanced[0]} does not add up without any fault")

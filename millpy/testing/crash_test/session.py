"""Session: the whole of a crash test, in order. READ THIS FIRST.

prepare    what each source is fed, as lines on disk
reference  one worker, large bundles, everything at once
reference  again: several workers, small bundles, fed over a while: what differs is not the faults' doing
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
from millpy.graph_file import load_graph
from millpy.injectors.mqtt import Mqtt
from millpy.progress import working
from millpy.testing.crash_test.display import Display
from millpy.testing.crash_test.inputs import Prepared, injectors, prepare
from millpy.testing.crash_test.options import FaultKind, Options
from millpy.testing.crash_test.place import Place, place_for
from millpy.testing.crash_test.plan import draw
from millpy.testing.crash_test.trial import Outcome, Setting, Trial
from millpy.testing.crash_test.verdict import Verdict, judge

SMALL_BUNDLES = 400
"""The second reference cuts its input into about so many bundles."""
SECOND_S = 4.0
BROKER_RATE_MAX = 1_000.0
"""Records a second over a broker that saves after every change."""
SHARE_OF_CAPACITY = 0.5
"""The crash run is fed at most at this share of the first reference's rate, so that it can catch up after a fault."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that a report tells of.

    Attributes:
        place: the database, in words.
        files: where tapes, logs and data are; None when they were removed.
    """

    options: Options
    graph: Graph
    place: str
    prepared: list[Prepared]
    references: tuple[Outcome, Outcome]
    crash: Outcome
    verdict: Verdict
    files: Path | None


def crash_test(options: Options, directory: Path, clock: Clock, display: Display) -> Findings:
    """Run it all.

    Args:
        options: what was asked for.
        directory: where the files of this test may go; made when missing.
        clock: for everything that is timed.
        display: is told how far it is.

    Raises:
        UsageError: the graph, its input or the database cannot be used, or the graph fails without any fault.
    """
    graph = load_graph(options.graph)
    graph.spec()
    if FaultKind.BROKER in options.faults:
        refuse_without_broker(graph)
    directory.mkdir(parents=True, exist_ok=True)
    files = Path(tempfile.mkdtemp(prefix="run-", dir=directory))
    keep = True  # after a failure there is something to look at
    try:
        with working("writing down what each source is fed"):
            prepared = prepare(graph, options, files / "input")
        display.say(", ".join(f"{source.stream}: {source.total:,} records, {source.origin}" for source in prepared))
        with working("making a place to run in"):
            place = place_for(options.database_url, graph.name, files / "postgres")
        try:
            findings = _trials(options, graph, prepared, place, files, clock, display)
            keep = options.keep or not findings.verdict.passed
        finally:
            place.close(keep=keep)
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
    prepared: Sequence[Prepared],
    place: Place,
    files: Path,
    clock: Clock,
    display: Display,
) -> Findings:
    def run(setting: Setting) -> Outcome:
        trial = Trial(
            options.graph, graph, prepared, setting, place, files, clock, show=display.show, tell=display.tell
        )
        with display.trial(setting.name):
            return trial.run()

    records = sum(source.total for source in prepared)
    first = run(Setting(name="reference", workers=1, lease_s=options.lease_s))
    _refuse_failed(first)
    small = {"MILLPY_BUNDLE_RECORDS_MAX": str(max(50, records // SMALL_BUNDLES))}
    several = 3 if options.workers == 2 else 2
    again = Setting(name="reference_2", workers=several, lease_s=options.lease_s, limits=small, over_s=SECOND_S)
    second = run(again)
    _refuse_failed(second)
    plan = draw(options.faults, options.count, options.seed)
    rate = SHARE_OF_CAPACITY * records / first.seconds
    unique = None
    if FaultKind.BROKER in options.faults:
        unique = (first.results.injected - first.results.duplicates) / first.results.injected
        rate = min(rate, BROKER_RATE_MAX)
    setting = Setting(
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
    return Findings(options, graph, place.described, list(prepared), (first, second), crash, verdict, files)


def refuse_without_broker(graph: Graph) -> None:
    """Broker faults need an MQTT source that deduplicates, and a broker that keeps what it has acknowledged.

    Raises:
        UsageError: says which is missing.
    """
    over_broker = [node for node in injectors(graph) if isinstance(node.source, Mqtt)]
    if not over_broker:
        raise UsageError("no source of the graph is MQTT", hint="leave `broker` out of --faults")
    for node in over_broker:
        if node.dedupe is None:
            raise UsageError(
                f"{node.name!r} has no Dedupe, and a broker delivers messages twice after a crash",
                hint='deduplicate, Dedupe("id", within=hours(1)), or leave `broker` out of --faults',
            )
    if mosquitto_program() is None:
        raise UsageError(
            "broker faults need mosquitto: the other broker that is embedded forgets its messages when it is killed",
            hint="install mosquitto, or leave `broker` out of --faults",
        )


def _refuse_failed(outcome: Outcome) -> None:
    if outcome.stuck:
        raise UsageError(
            f"the graph does not run through even without faults: {outcome.stuck}",
            hint="try it with `millpy run` first",
        )
    if outcome.results.unbalanced:
        raise UsageError(f"the accounting of {outcome.results.unbalanced[0]} does not add up without any fault")

"""`millpy audit --follow`: audit each hour when it is final.

Each audit is a process of its own, `millpy audit` with a range of hours: its Spark takes no memory between audits, and
an audit that fails, or a JVM that dies, leaves this loop as it was. It ends with this process. What is done is in the
database, so a restart repeats at most one range.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpy.admin.audits import closed_hours
from millpy.admin.queries import Admin
from millpy.cli.options import connected_to
from millpy.config.extras import to_install
from millpy.config.settings import Settings
from millpy.errors import ConfigError, MillError
from millpy.graph.loader import load_graph
from millpy.model.time import Instant, to_datetime
from millpy.process.exit import EXIT_FAILED
from millpy.windowing.calendar_windows import longest_us
from millpy.windowing.global_window import GLOBAL_END_US, GLOBAL_START_US

if TYPE_CHECKING:
    from millpy.model.deployment import GraphSpec, TableSpec
    from millpy.observability.audit_metrics import AuditMetrics

log = logging.getLogger(__name__)
LOOK_EVERY_S = 30.0
RETRY_S_MAX = 300.0
AUDIT_S_MAX = 3_600.0
"""An audit that takes longer is killed, and tried again."""
STOP_S_MAX = 8.0
ERROR_CHARACTERS_MAX = 2_000


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine audits which tables, and whether from archives or from what the graph's sources name."""

    engine: str
    tables: tuple[str, ...]
    archived: bool


def choose_engines(spec: GraphSpec, archive: str) -> list[EngineChoice]:
    """Return the engines for a graph's tables: Spark's own windows where they can, else millpy's, in one batch."""
    from millpy.spark.native import native_plans  # imported here: --help does not need Spark
    from millpy.store.archive.reader import archive_of

    native = [plan.table.name for plan in native_plans(spec)[0]] if archive else []
    others = tuple(table.name for table in spec.tables if table.name not in native)
    sources = [computation.name for computation in spec.computations if computation.kind == "injector"]
    archived = bool(archive) and all(archive_of(spec, source) is not None for source in sources)
    found = [EngineChoice("native", (name,), archived=True) for name in native]
    return [*found, EngineChoice("hosted", others, archived)] if others else found


class Auditor:
    """The loop over the closed hours of a graph."""

    def __init__(self, graph: str, settings: Settings, options: Sequence[str], metrics: AuditMetrics | None) -> None:
        self._graph = graph
        self._settings = settings
        self._options = options
        self._metrics = metrics
        self._stopped = threading.Event()
        self._running: subprocess.Popen[str] | None = None
        self._spec = load_graph(graph).spec()
        self._choices = choose_engines(self._spec, settings.archive)
        self._said: dict[EngineChoice, str] = {}

    def stop(self) -> None:
        """End the audit that is running, and the loop; also from a signal handler."""
        self._stopped.set()
        if self._running is not None:
            with suppress(ProcessLookupError):
                self._running.terminate()

    def run(self) -> None:
        """Audit until `stop`. No failure of the database or of an audit ends it."""
        wait_s = 0.0
        while not self._stopped.wait(wait_s):
            failed = False
            for choice in self._choices:
                try:
                    while self.audit_next(choice) and not self._stopped.is_set():
                        self._said.pop(choice, None)
                except (MillError, OSError) as error:
                    failed = not self._stopped.is_set()
                    if failed:
                        self._report(choice, error)
            wait_s = min(RETRY_S_MAX, max(LOOK_EVERY_S, 2 * wait_s)) if failed else LOOK_EVERY_S

    def _report(self, choice: EngineChoice, error: Exception) -> None:
        """Log why an audit failed, once for each reason."""
        if self._metrics is not None:
            self._metrics.failures.inc()
        if self._said.get(choice) != str(error):
            self._said[choice] = str(error)
            log.warning("cannot audit %s yet: %s", ", ".join(choice.tables), error)

    def audit_next(self, choice: EngineChoice) -> bool:
        """Audit the next closed hours that are not audited; return whether there were any."""
        span = self.next_span(choice)
        if span is None or self._stopped.is_set():
            return False
        start, end = (to_datetime(Instant(at)).isoformat() for at in span)
        document = self._audit(choice, ("--from", start, "--to", end))
        if not document["hours_recorded"]:
            raise ConfigError("an audit could not be recorded", hint="log in with the workers' role")
        log.info(
            "audited %s from %s to %s: %d differences", ", ".join(choice.tables), start, end, document["differences"]
        )
        for table in document["tables"]:
            if table["differences"]:
                log.error("%s has %d rows that differ from their history", table["table"], table["differences"])
            if self._metrics is not None:
                self._metrics.add(table["table"], table, span[1])
        return True

    def next_span(self, choice: EngineChoice) -> tuple[int, int] | None:
        """Return the next closed hours of these tables that are not audited, in µs; None for none."""
        with connected_to(self._settings, str(Path(self._graph.partition(":")[0])), doing="") as admin:
            return self._next_span(admin, choice)

    def _next_span(self, admin: Admin, choice: EngineChoice) -> tuple[int, int] | None:
        name = admin.name_of(self._spec.name, self._spec.generation)
        if name is None:
            raise ConfigError(f"{self._spec.name} is not deployed", hint="deploy it")
        archives = [one.name for one in self._spec.computations if one.kind == "archive"] if choice.archived else []
        spans = [
            closed_hours(admin, name, table, reach_us=_reach(self._spec, table), archives=archives)
            for table in self._spec.tables
            if table.name in choice.tables
        ]
        found = [span for span in spans if span is not None]
        return (min(start for start, _ in found), max(end for _, end in found)) if found else None

    def _audit(self, choice: EngineChoice, span: Sequence[str]) -> dict[str, Any]:
        """Run one audit as a process; return what it printed."""
        tables = [word for name in choice.tables for word in ("--table", name)]
        command = [sys.executable, "-m", "millpy", "audit", self._graph, "--engine", choice.engine, *tables, *span]
        if choice.archived:
            command += ["--archive", self._settings.archive]
        command += [*self._options, "--by-service", "--json"]
        pipe = subprocess.PIPE
        reads, writes = os.pipe()  # never written: it ends with this process, and so does the audit
        with os.fdopen(reads, "rb"), os.fdopen(writes, "wb"):
            self._running = subprocess.Popen(command, stdin=reads, stdout=pipe, stderr=pipe, text=True)
            try:
                output, errors = self._running.communicate(timeout=AUDIT_S_MAX)
            except subprocess.TimeoutExpired:
                raise MillError(
                    f"an audit took longer than {AUDIT_S_MAX:.0f} s", hint="give it more memory or cores"
                ) from None
            finally:
                _end(self._running)
                self._running = None
        with suppress(json.JSONDecodeError):
            document: dict[str, Any] = json.loads(output)
            return document
        raise reason_of(errors)


def reason_of(errors: str) -> MillError:
    """Return why an audit failed, by what it wrote to standard error: millpy's own error is the last line."""
    text = errors.strip()
    try:
        found = json.loads(text.rpartition("\n")[2])["error"]
        message, hint, in_spark = found["message"], found["hint"], found["kind"] == MillError.__name__
    except (ValueError, TypeError, KeyError):
        return MillError(text[-ERROR_CHARACTERS_MAX:] or "the audit was killed", hint="see the log")
    # Java's errors have times and numbers in them, by which the same one would look new.
    return MillError(message, hint="`millpy audit` over these hours shows Spark's full error" if in_spark else hint)


def end_with_auditor() -> None:
    """End this process as soon as its standard input ends: with the auditor that started it, even a killed one.

    Otherwise its audit would run on beside the one with which the next auditor repeats it.
    """

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(EXIT_FAILED)

    threading.Thread(target=wait, name="end-with-auditor", daemon=True).start()


def _reach(spec: GraphSpec, table: TableSpec) -> int:
    """Return how long after a record its windows may end."""
    (identity,) = (one.identity for one in spec.computations if one.name == table.computation)
    window = identity.get("window", {})
    if window.get("kind") == "calendar":
        return longest_us(window["unit"])
    if window.get("kind") == "global":
        return GLOBAL_END_US - GLOBAL_START_US
    if window.get("kind") == "session":
        by_key = [gap["us"] for _, gap in (window["by_key"] or {"dict": []})["dict"]]
        return int(max([window["gap_us"], window.get("max_gap_us", 0), *by_key]))
    return int(window.get("size_us", window.get("length_max_us", 0)))


def follow_hours(graph: str, settings: Settings, options: Sequence[str]) -> None:
    """Audit each closed hour of a graph until SIGTERM or SIGINT.

    Args:
        graph: the graph's file.
        settings: the database, the archives' directory, and the address of the metrics, if one is set.
        options: how Spark is started, as options of `millpy audit`.
    """
    with _serving_metrics(graph, settings) as metrics:
        auditor = Auditor(graph, settings, options, metrics)
        before = {
            number: signal.signal(number, lambda *_: auditor.stop()) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            auditor.run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _serving_metrics(graph: str, settings: Settings) -> Iterator[AuditMetrics | None]:
    """Serve metrics over HTTP inside the context."""
    try:
        from millpy.observability.audit_metrics import AuditMetrics, serving
    except ModuleNotFoundError:
        log.info("no metrics: they need the package prometheus-client (%s)", to_install("service"))
        with nullcontext():
            yield None
        return
    metrics = AuditMetrics(load_graph(graph).permanent_name)
    with serving(metrics, settings.http):
        yield metrics


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

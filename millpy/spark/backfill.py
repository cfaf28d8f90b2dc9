"""A backfill: the whole history of a graph through Spark, into a generation from which its workers then continue.

    1. the sessions of sources whose broker keeps the position begin, so that nothing is missed from here on
    2. a streaming query computes the history, and writes tables, late records and dead letters as it goes (`stream`)
    3. state, timers, windows and positions follow; one cut, and the generation is the workers' (`hand_over`)

Each step can be repeated: a backfill that was killed continues in the same working directory.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import SparkSession

from millpy.clock import SystemClock
from millpy.errors import SourceUnavailableError, UsageError
from millpy.graph import InjectorNode
from millpy.graph.loader import load_graph
from millpy.ingest.protocol import Injector, SourceSetup
from millpy.limits import Limits
from millpy.model.deployment import Deployment, permanent_name
from millpy.model.time import Instant, describe, instant
from millpy.sources.files.source import Directory, Files
from millpy.sources.kafka.source import Kafka
from millpy.spark.archive_input import Archive, ArchivedHistory
from millpy.spark.earlier_archive import EarlierArchive
from millpy.spark.hand_over import HandOver
from millpy.spark.job import BatchJob, HostedPlan, make_job
from millpy.spark.stream import StreamPlaces, stream_hosted, summary_of
from millpy.spark.stream_commits import StreamCommits
from millpy.spark.stream_state import write_durably
from millpy.spark.stream_store import StreamStore
from millpy.spark.stream_tables import StreamTables

log = logging.getLogger("millpy.observability.status_line")
EVERY = timedelta(milliseconds=100)
SESSION_S = 15.0
"""How long the session of a source may take to begin."""
SESSION_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class BackfillRequest:
    """A backfill as its user asks for it.

    Attributes:
        graph: the graph's file, or `file.py:name`.
        inputs: files with the history of sources, as for `run`.
        database: the database, as URL, of a role that may deploy.
        work: a new directory that the driver and all executors see under the same name, or that of the same backfill,
            which then continues.
        archive: the directory of all archives, or the URL of an object store. What an earlier generation has archived
            is then the history of all sources but files.
        start: with an archive, read records whose event time is this or later; None for all.
        until: topics that are read themselves are read up to the first message from this time on, and workers continue
            there; None for what there is when the backfill begins.
        may_overlap: whether a source without `Dedupe` may have an input, because no record is in both.
        settle_s: time between the begin of sessions at brokers and the look for the inputs' files, in which what
            writes these files catches up.
        limits: the limits of bundles and caches.
    """

    graph: str
    inputs: Sequence[str] | Mapping[str, str | Sequence[str]] = ()
    database: str = field(kw_only=True, repr=False)
    work: str | Path = field(kw_only=True)
    archive: str | Path | None = field(default=None, kw_only=True)
    start: datetime | None = field(default=None, kw_only=True)
    until: datetime | None = field(default=None, kw_only=True)
    may_overlap: bool = field(default=False, kw_only=True)
    settle_s: float = field(default=0.0, kw_only=True)
    limits: Limits = field(default_factory=Limits, kw_only=True)

    def plan(self) -> HostedPlan:
        """Load the graph, find the inputs' files, and check that it can be handed over.

        Raises:
            UsageError: it cannot.
        """
        now_us = SystemClock().now_us()
        inputs: Any = self.inputs if self.earlier is None else self._archived(self.earlier)
        job = make_job(self.graph, inputs, limits=self.limits, now_us=now_us, streams=True, hands_over=True)
        hosted = HostedPlan(job if self.until is None else self._limited(job, now_us))
        for node in _replaced(hosted):
            if node.dedupe is None and not self.may_overlap:
                raise UsageError(
                    f"source {node.name!r} does not deduplicate: records of its history that come again count twice",
                    hint="give it dedupe=; or say --may-overlap if no record is in both",
                )
        return hosted

    def _limited(self, job: BatchJob, now_us: Instant) -> BatchJob:
        """Return a job that reads topics up to `until`."""
        assert self.until is not None
        until_us = instant(self.until)
        if until_us > now_us:
            raise UsageError(f"--until {self.until} is in the future", hint="name a time that has passed, or now")
        topics = [node for node in job.load_graph().injectors() if isinstance(node.source, Kafka)]
        if not topics:
            raise UsageError(
                "--until is for topics that are read themselves: no source of the graph is one",
                hint="leave it out, and name only the files with the history that is wanted",
            )
        return msgspec.structs.replace(job, until_us=until_us)

    @property
    def earlier(self) -> EarlierArchive | None:
        """The archives to read; None for files."""
        return None if self.archive is None else EarlierArchive(self.database, self.archive, self.start)

    def _archived(self, earlier: EarlierArchive) -> Archive:
        if self.inputs:
            raise UsageError("an archive and inputs exclude each other", hint="name one of them")
        loaded = load_graph(self.graph)
        sources = [node.name for node in loaded.injectors() if not isinstance(node.source, Files | Directory)]
        if not sources:
            raise UsageError(
                "all sources of the graph are files, which a backfill reads as they are", hint="leave out --archive"
            )
        return earlier.listed(loaded.spec(), sources)


def backfill(spark: SparkSession, request: BackfillRequest) -> dict[str, Any]:
    """Compute the history of a graph on Spark, and hand it over to workers.

    The graph is a new one, or a new generation, that workers have not begun; if they run, they wait. `Files`,
    `Directory` and `Kafka` are read as they are, and workers continue behind what has been read. Any other source needs
    an input with its history, and continues where its broker does: records in both count once if the source has
    `Dedupe`.

    Args:
        spark: a session of yours, or that of `millpy.spark.session`.
        request: the graph, its history and the places.

    Returns:
        The accounting and the undone work at the cut, as JSON data.

    Raises:
        UsageError: the graph cannot run as a stream, has been begun, or would count records twice.
        SourceUnavailableError: the session of a source cannot begin.
        TransientError: the database cannot be reached.
    """
    return Backfill(request).run(lambda: nullcontext(spark))


class Backfill:
    """One attempt of a backfill.

    Raises:
        UsageError: see `backfill`.
    """

    def __init__(self, request: BackfillRequest) -> None:
        self._request = request
        self._work = Path(request.work).absolute()
        self._hosted = request.plan()
        self._job = self._work / "job.json"
        if self._job.exists():
            stored = msgspec.json.decode(self._job.read_bytes(), type=BatchJob)
            if stored.text != self._hosted.job.text:
                raise UsageError(
                    f"{request.graph} has changed since the backfill in {self._work} began",
                    hint="undo the change; or begin anew: `millpy drop`, and a new directory",
                )
            self._hosted = HostedPlan(_listed_anew(stored, self._hosted.job.archives))

    def run(self, running: Callable[[], AbstractContextManager[SparkSession]]) -> dict[str, Any]:
        """Run it to its end; `running` starts Spark if it is needed."""
        commits = self._commits()
        with self._store(commits) as store:
            is_sparks = store.open()
            if commits.newest.finished and not is_sparks and store.is_begun():
                return summary_of(self._hosted, commits.newest)  # killed behind the last step
            store.own()
            asyncio.run(_begin_sessions(self._hosted, store.deployment))
        if not commits.newest.finished:
            self._fix_inputs()
            places = StreamPlaces(self._work / "checkpoint", self._work / "output", self._request.database)
            with running() as spark:
                stream_hosted(spark, self._hosted, places, EVERY).wait()
            commits = self._commits()
        log.debug("handing over to workers")
        with self._store(commits) as store:
            store.open()
            store.own()
            StreamTables(store, self._hosted, self._work / "output").open(commits.newest, hands_over=True)
            HandOver(store, self._hosted, commits.newest, commits.state).run()
        return summary_of(self._hosted, commits.newest)

    def _commits(self) -> StreamCommits:
        return StreamCommits(self._work / "checkpoint", self._hosted.query_spec)

    def _store(self, commits: StreamCommits) -> closing[StreamStore]:
        return closing(StreamStore(self._request.database, commits.worker_id, self._hosted))

    def _fix_inputs(self) -> None:
        """Find the inputs' files now that nothing else is missing, and keep to them."""
        if self._job.exists():
            return
        threading.Event().wait(self._request.settle_s)
        if (earlier := self._request.earlier) is not None:
            log.debug("waiting for the archive of %s", earlier.directory)
            earlier.wait(self._hosted.spec, SystemClock())
        self._hosted = self._request.plan()
        ready = self._job.with_suffix(".new")
        ready.unlink(missing_ok=True)
        write_durably(ready, self._hosted.job.encoded().encode())
        ready.rename(self._job)


def _listed_anew(stored: BatchJob, archives: Mapping[str, ArchivedHistory]) -> BatchJob:
    """Return a job whose archives may be in other files by now, because some were merged; the bundles are the same.

    A source partition that had none when the backfill began may have got some since.

    Raises:
        UsageError: another range is asked for than at the beginning.
    """
    for name, before in stored.archives.items():
        if archives[name].first != before.first:
            raise UsageError(
                f"--from is not that with which the backfill began: {describe(Instant(before.first))}",
                hint="start the same command again",
            )
    return msgspec.structs.replace(
        stored,
        archives={
            name: msgspec.structs.replace(
                before,
                files=archives[name].files,
                through={**dict.fromkeys(archives[name].through, 0), **before.through},
            )
            for name, before in stored.archives.items()
        },
    )


def _replaced(hosted: HostedPlan) -> Iterator[InjectorNode]:
    """Yield the sources that have an input."""
    for node in hosted.live_graph.nodes:
        if isinstance(node, InjectorNode) and node.name in hosted.job.replaced:
            yield node


async def _begin_sessions(hosted: HostedPlan, deployment: Deployment) -> None:
    """Let brokers that keep positions begin to queue for the workers; again, that changes nothing."""
    for node in _replaced(hosted):
        if node.source.begins_at() is None:
            for partition in node.source.partitions():
                await _begin_session(node, partition, hosted, deployment)


async def _begin_session(node: InjectorNode, partition: str, hosted: HostedPlan, deployment: Deployment) -> None:
    spec, clock = hosted.spec, SystemClock()
    injector = node.source.connect(
        SourceSetup(
            graph=permanent_name(spec.name, spec.generation),
            generation=spec.generation,
            secret=deployment.secret,
            stream=node.name,
            partition=partition,
            limits=hosted.job.limits,
            clock=clock,
            ready=asyncio.Event(),
            record_type=node.record_type,
            deduplicated=node.dedupe is not None,
        )
    )
    try:
        await injector.open(None)
        async with asyncio.timeout(SESSION_S):
            while not await _answers(injector):
                await clock.sleep(SESSION_POLL_S)
    except TimeoutError:
        raise SourceUnavailableError(
            f"source {node.name!r} does not answer, so nothing would queue what comes until the hand-over",
            hint="start its broker, then start the backfill again",
        ) from None
    finally:
        await injector.close()


async def _answers(injector: Injector) -> bool:
    """Tell whether the source is connected: it has something, or says that it has nothing."""
    return await injector.take() is not None or injector.quiet()

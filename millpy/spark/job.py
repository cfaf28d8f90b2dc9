"""The description of one job on Spark: the graph's file, the history that replaces its sources, and the limits.

It travels to Spark's Python workers as JSON text. A graph is never pickled: every process runs the text of its file, so
classes and functions of the user are those of the file, wherever they run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import msgspec

from millpy.clock import Clock, SystemClock
from millpy.errors import UsageError
from millpy.graph import Graph, InjectorNode, StageNode
from millpy.graph.loader import load_graph
from millpy.hosting.plan import ComputationPlan, Plan, plan
from millpy.limits import Limits
from millpy.model.deployment import GraphSpec
from millpy.model.time import Instant
from millpy.sources.files.file_queue import files_of
from millpy.sources.files.line_reader import Format
from millpy.sources.files.source import Directory, Files
from millpy.sources.kafka.source import Kafka
from millpy.spark.archive_input import Archive, ArchivedHistory, FollowedArchive, FollowedHistory
from millpy.spark.archive_source import ArchivedSource
from millpy.spark.takes import TakeHistory
from millpy.store.memory.database import MemoryDatabase


class SourceHistory(msgspec.Struct, frozen=True):
    """The files that replace a source.

    Attributes:
        files: absolute names, in the order in which they are read.
        format: "json", "csv" or "parquet"; by default each file's suffix decides.
    """

    files: tuple[str, ...]
    format: Format | None = None


class BatchJob(msgspec.Struct, frozen=True):
    """What a process needs to host a part of a graph.

    Attributes:
        graph: the graph's file, or `file.py:name`.
        text: the content of the file.
        histories: source -> the files that replace it.
        limits: the limits of bundles and caches.
        now_us: the processing time of the whole job. It is one instant, so that a repeated task does the same.
        keeps_state: whether tasks return the final state.
        streams: whether it runs on and keeps positions, so that a source need not end.
        archives: source -> the archived files that replace it. A batch takes their bundles as they were; a backfill
            takes their records as if they came again.
        followed: source -> the archive that replaces it in a stream, which takes its bundles as they were.
        takes: stage -> the archived takes by which its bundles are made again, for an exact batch over `archives`.
        hands_over: whether it stops where the sources have nothing more, for workers to continue: the end of a history
            is not that of its source, so windows stay open.
        until_us: when it hands over, topics are read up to the first message from this time on; None for all there is.
    """

    graph: str
    text: str
    histories: dict[str, SourceHistory]
    limits: Limits
    now_us: int
    keeps_state: bool
    streams: bool = False
    archives: dict[str, ArchivedHistory] = {}
    followed: dict[str, FollowedHistory] = {}
    takes: dict[str, TakeHistory] = {}
    hands_over: bool = False
    until_us: int | None = None

    @property
    def clock(self) -> Clock:
        """A clock whose wall time stays at `now_us`."""
        return _StandingClock(Instant(self.now_us))

    @property
    def replaced(self) -> Collection[str]:
        """The sources in whose place something else is read."""
        return self.histories.keys() | self.archives.keys()

    def encoded(self) -> str:
        """Return the job as JSON text."""
        return msgspec.json.encode(self).decode()

    def load_graph(self) -> Graph:
        """Run the graph's file, and replace its sources.

        Raises:
            UsageError: a history is for no source of the graph; or a source without one cannot be read by the job.
        """
        graph = load_graph(self.graph, self.text)
        refuse_lookups(graph)
        if self.streams or self.hands_over:
            refuse_sinks(graph)
        # Neither an archive nor a sink changes a result; a batch sends nothing.
        graph.nodes[:] = [
            node for node in graph.nodes if not (isinstance(node, StageNode) and (node.archives or node.is_sink))
        ]
        sources = {node.name: node for node in graph.nodes if isinstance(node, InjectorNode)}
        for name, history in self.histories.items():
            if name not in sources:
                raise UsageError(f"the graph has no source {name!r}", hint=f"its sources are: {', '.join(sources)}")
            sources[name].source = Files(*history.files, format=history.format)
        if self.streams:
            for name, archived in self.archives.items():
                sources[name].source = ArchivedSource(name, sources[name].source, archived)
        for name, archive in self.followed.items():
            sources[name].source = FollowedArchive(archive, sources[name].source.partitions())
        for node in sources.values():
            if node.name in self.followed:
                continue
            if self.streams:
                _check_streams(node)
            elif not node.source.ends() and node.name not in self.archives:
                raise UsageError(
                    f"source {node.name!r} does not end, so a batch cannot read it",
                    hint=f"name the files with its history: --input {node.name}=FILES",
                )
            node.source.validate(node.record_type)
        return graph


def refuse_lookups(graph: Graph) -> None:
    """Refuse a graph that looks up in SQL tables.

    Raises:
        UsageError: it does. A table has no history, so old records would get the rows of today.
    """
    for node in graph.nodes:
        if isinstance(node, StageNode) and node.tables:
            raise UsageError(
                f"step {node.name!r} looks up in table {node.tables[0].name}, so Spark cannot compute the graph: the"
                " table as it was then is not stored, and old records would get the rows of today",
                hint="run workers; or join the results of a graph without lookups with the table, in Spark",
            )


def refuse_sinks(graph: Graph) -> None:
    """Refuse a graph with sinks as a stream or as the beginning of a generation.

    Raises:
        UsageError: it has one: what leaves would leave by Spark's attempts, or not at all.
    """
    for node in graph.nodes:
        if isinstance(node, StageNode) and node.is_sink:
            raise UsageError(
                f"step {node.name!r} is a sink, so Spark cannot compute the graph as a generation: it sends nothing",
                hint="run workers; or give the sink a graph of its own, which reads the results",
            )


def _check_streams(node: InjectorNode) -> None:
    """Check that a source keeps its position by itself, so that it can be committed with all else."""
    if not isinstance(node.source, Files | Directory | Kafka | ArchivedSource):
        raise UsageError(
            f"source {node.name!r} is neither files nor Kafka, so it cannot be streamed on Spark",
            hint=f"run it on workers; or name files: --input {node.name}=FILES",
        )
    node.source.check()


class _StandingClock(SystemClock):
    def __init__(self, now_us: Instant) -> None:
        self._now_us = now_us

    def now_us(self) -> Instant:
        return self._now_us


class HostedPlan:
    """A job's graph with the ids that a first deployment gives, which are the same in every process.

    Attributes:
        database: the empty database that has given the ids.
    """

    def __init__(self, job: BatchJob) -> None:
        graph = job.load_graph()
        self.job = job
        self.spec = graph.spec()
        self.database = MemoryDatabase()
        self.plan: Plan = plan(graph, self.database.deploy(self.spec), job.limits)
        self.ranks = {interval_id: rank for rank, interval_id in enumerate(self.plan.by_interval)}
        """Interval id -> its place in the order of steps: producers before consumers."""

    @cached_property
    def live_graph(self) -> Graph:
        """The graph as workers run it: with its own sources, and with archives."""
        return load_graph(self.job.graph, self.job.text)

    @property
    def query_spec(self) -> GraphSpec:
        """The graph that a streaming query must keep: for a hand-over the live one, as its inputs are found later."""
        return self.live_graph.spec() if self.job.hands_over else self.spec

    def computation(self, name: str) -> ComputationPlan:
        """Return a computation by its name."""
        return next(computation for computation in self.plan if computation.name == name)


@lru_cache(maxsize=2)
def plan_of(job: str) -> HostedPlan:
    """Return the plan of a job given as JSON text; a process makes it once."""
    return HostedPlan(msgspec.json.decode(job, type=BatchJob))


def make_job(
    graph: str,
    inputs: Sequence[str] | Mapping[str, str | Sequence[str]] | Archive,
    *,
    limits: Limits,
    now_us: Instant,
    state: bool = False,
    streams: bool = False,
    hands_over: bool = False,
) -> BatchJob:
    """Describe a job.

    Args:
        graph: the graph's file, or `file.py:name`.
        inputs: names and patterns of files: of the only source (`["data/*.csv"]`), or by source; or archives.
        limits: the limits of bundles and caches.
        now_us: the processing time.
        state: whether to return the final state.
        streams: whether the job runs on, batch by batch.
        hands_over: whether a stream stops where its sources have nothing more.

    Raises:
        UsageError: a file or source does not exist, an input does not say its source, an archive lacks records, or the
            graph has lookups or watermarks by site, or the arrival as event time without an archive.
    """
    path = Path(graph.partition(":")[0])
    loaded = load_graph(graph)
    refuse_lookups(loaded)
    _refuse_sites(loaded)
    if isinstance(inputs, Archive):
        text = path.read_text(encoding="utf-8")
        if streams and not hands_over:
            return BatchJob(graph, text, {}, limits, now_us, state, streams, followed=inputs.followed(loaded))
        archives = inputs.histories(loaded)
        takes = inputs.takes(loaded, archives) if inputs.exact else {}
        return BatchJob(graph, text, {}, limits, now_us, state, streams, archives, takes=takes, hands_over=hands_over)
    _refuse_arrival(loaded)
    sources = [node.name for node in loaded.injectors()]
    named: dict[str, list[str]] = {}
    for name, paths in _by_source(inputs, sources):
        named.setdefault(name, []).extend(paths)
    histories = {name: SourceHistory(tuple(_expanded(paths))) for name, paths in named.items()}
    text = path.read_text(encoding="utf-8")
    return BatchJob(graph, text, histories, limits, now_us, state, streams, hands_over=hands_over)


def _refuse_sites(graph: Graph) -> None:
    """Refuse a graph with watermarks by site: archives do not have them, and checkpoints on Spark name no producers."""
    for node in graph.injectors():
        if node.event_time.watermark_by is not None:
            raise UsageError(
                f"source {node.name!r} has watermark_by={node.event_time.watermark_by!r}, which Spark cannot run",
                hint="run the graph on workers",
            )


def _refuse_arrival(graph: Graph) -> None:
    """Refuse a graph whose event time is the arrival: only an archive has recorded it."""
    for node in graph.injectors():
        if node.event_time.arrives:
            raise UsageError(
                f"source {node.name!r} has event_time=EventTime.arrival(), and files do not tell when a record arrived",
                hint="read an archive, which has recorded it: --archive; or run the graph on workers",
            )


def _by_source(
    inputs: Sequence[str] | Mapping[str, str | Sequence[str]], sources: Sequence[str]
) -> Iterator[tuple[str, Sequence[str]]]:
    if isinstance(inputs, Mapping):
        for name, paths in inputs.items():
            yield name, [paths] if isinstance(paths, str) else paths
        return
    for text in [inputs] if isinstance(inputs, str) else inputs:
        name, is_named, paths = text.partition("=")
        if is_named and (name in sources or not _files_of(text)):
            yield name, [paths]
        elif len(sources) == 1:
            yield sources[0], [text]
        else:
            raise UsageError(
                f"input {text!r} does not say for which source it is",
                hint=f"SOURCE=FILES; sources: {', '.join(sources)}",
            )


def _expanded(paths: Sequence[str]) -> Iterator[str]:
    for path in paths:
        found = _files_of(path)
        if not found:
            raise UsageError(f"no file matches {path!r}", hint=f"name existing files; relative to {Path.cwd()}")
        yield from found


def _files_of(path: str) -> list[str]:
    return [str(Path(name).absolute()) for name in files_of(str(path), lambda *_: None)]

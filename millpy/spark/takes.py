"""The archived takes of stages: what each of their bundles has consumed, for a batch that makes the bundles again.

A take names bundles of other intervals, so they are read up to a consistent cut: every bundle that one of the takes
names is archived itself, or made by a take before the cut. Behind the cut a worker may have done more than is archived.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from millpy.errors import UsageError
from millpy.graph import Graph, StageNode
from millpy.model.take import StepInput, Take
from millpy.model.time import INSTANT_MIN, Instant, describe
from millpy.store.archive.parquet import EVENT_TIME, PARTITION, SEQ
from millpy.store.archive.reader import ArchiveReader, archive_of, bundles_of, partitions_of
from millpy.store.archive.storage import parquet_file

_ROWS = 1_024
FIELDS = [field.name for field in msgspec.structs.fields(Take)]


class TakeHistory(msgspec.Struct, frozen=True):
    """The archived takes of a stage.

    Attributes:
        files: full names.
        through: interval of the stage, by its place -> the number of the last bundle that is made again.
        later: interval of the stage -> the producers that it did not have from the beginning.
    """

    files: tuple[str, ...]
    through: dict[str, int]
    later: dict[str, list[str]] = {}


@dataclass(frozen=True, slots=True)
class ArchivedTake:
    """A take with its bundle number and the processing time of the step."""

    bundle: int
    now_us: Instant
    take: Take
    input: StepInput


def takes_of(files: Sequence[str], place: str) -> Iterator[ArchivedTake]:
    """Yield the takes of an interval in their order; one file at a time is in memory."""
    of_file: dict[str, int] = {}
    for bundle in bundles_of(files, place):
        of_file.setdefault(bundle.file, bundle.seq)
    for name in of_file:
        table = parquet_file(name).read(columns=[*FIELDS, PARTITION, SEQ, EVENT_TIME])
        table = table.filter(pc.equal(table[PARTITION], place)).sort_by(SEQ)
        for batch in table.to_batches(_ROWS):
            numbers, times = batch[SEQ].to_pylist(), batch[EVENT_TIME].to_pylist()
            takes = msgspec.convert(batch.select(FIELDS).to_pylist(), list[Take])
            for number, at, take in zip(numbers, times, takes, strict=True):
                consumed = msgspec.json.decode(take.input, type=StepInput)
                yield ArchivedTake(number, Instant(at), take, consumed)


@dataclass(frozen=True, slots=True)
class RunPlaces:
    """Where a consumer takes the bundles of one producer: 20 bytes for each of its runs with records.

    Attributes:
        ends: number of the last bundle of each run, ascending.
        bundles: the consumer's bundle that took it.
        runs: its place among the runs of that bundle.
    """

    ends: npt.NDArray[np.int64]
    bundles: npt.NDArray[np.int64]
    runs: npt.NDArray[np.int32]

    def find(self, seq: int) -> tuple[int, int] | None:
        """Return the consumer's bundle that took a bundle, and the run; None if no take up to the cut did."""
        at = int(np.searchsorted(self.ends, seq))
        return None if at == len(self.ends) else (int(self.bundles[at]), int(self.runs[at]))


def run_places(history: TakeHistory, consumer: str, producers: Collection[str]) -> dict[str, RunPlaces]:
    """Return where a consumer takes the bundles of each producer."""
    found: dict[str, list[tuple[int, int, int]]] = {producer: [] for producer in producers}
    through = history.through.get(consumer, 0)
    for each in takes_of(history.files, consumer) if through else ():
        if each.bundle > through:
            break
        for place, run in enumerate(each.input.runs):
            if run.records and run.producer in found:
                found[run.producer].append((run.newest, each.bundle, place))
    return {producer: _places(runs) for producer, runs in found.items()}


def _places(runs: list[tuple[int, int, int]]) -> RunPlaces:
    columns = np.array(runs, np.int64).reshape(len(runs), 3)
    return RunPlaces(columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].astype(np.int32))


def take_histories(
    graph: Graph, readers: Mapping[str, ArchiveReader], through: Mapping[str, int]
) -> dict[str, TakeHistory]:
    """Return the takes of all stages, up to a consistent cut.

    Args:
        graph: the graph.
        readers: stage -> the archive of its takes.
        through: source partition, by its place -> the number of its last archived bundle.

    Raises:
        UsageError: takes are missing, or one was made by more than what is archived.
    """
    reached = dict(through)
    found = {}
    for node in graph.nodes:
        if not isinstance(node, StageNode) or node.archives:
            continue
        files = tuple(readers[node.name].find_all(readers[node.name].files))
        places = {f"{node.name}/{index}" for index in range(node.intervals)}
        if strangers := partitions_of(files, node.name) - places:
            raise UsageError(
                f"takes of {min(strangers)} are archived, which the graph does not have",
                hint="name the file of the graph that was archived",
            )
        producers = _producers(node)
        own, later = {}, {}
        for place in sorted(places):
            own[place], joined = _cut(files, place, reached, producers)
            if joined:
                later[place] = joined
        reached |= own
        found[node.name] = TakeHistory(files, own, later)
    return found


def _producers(node: StageNode) -> set[str]:
    """Return the places of the intervals that a stage reads."""
    found: set[str] = set()
    for taken in node.inputs:
        of = taken.producer
        names = map(str, range(of.intervals)) if isinstance(of, StageNode) else of.source.partitions()
        found |= {f"{of.name}/{name}" for name in names}
    return found


def _cut(
    files: Sequence[str], place: str, reached: Mapping[str, int], producers: Collection[str]
) -> tuple[int, list[str]]:
    """Return the last bundle that can be made again from what its producers have reached, and who joined later."""
    last, is_cut = 0, False
    named: set[str] = set()
    later: set[str] = set()
    watermark = INSTANT_MIN
    for each in takes_of(files, place):
        if begun := [run for run in each.input.joined if run.through]:
            raise UsageError(
                f"{place.partition('/')[0]} was added to the running graph, behind bundle {begun[0].through} of"
                f" {begun[0].producer}: what came before is not its input",
                hint="leave out --exact",
            )
        later |= {run.producer for run in each.input.joined}
        named |= {run.producer for run in (*each.input.runs, *each.input.moved)} | later
        watermark = max(watermark, Instant(each.take.watermark))
        if strangers := named - set(producers):
            raise UsageError(
                f"takes of {place} name {min(strangers)}, which it does not read in this file",
                hint="name the file of the graph that was archived, with all source partitions that it had",
            )
        if is_cut:
            continue
        what = f"bundle {each.bundle} of {place}, at {describe(each.now_us)},"
        if each.bundle != last + 1:
            raise UsageError(
                f"the take of bundle {last + 1} of {place} is not archived",
                hint="takes are needed from the first bundle on; leave out --exact",
            )
        if each.take.unarchived:
            raise UsageError(
                f"{what} was made by more than what is archived: {_UNARCHIVED[each.take.unarchived]}",
                hint="leave out --exact",
            )
        if any(run.newest > reached.get(run.producer, 0) for run in each.input.runs):
            is_cut = True
            continue
        last = each.bundle
    if watermark > INSTANT_MIN:  # it would not have moved with a producer that has done nothing
        later |= set(producers) - named
    return last, sorted(later)


_UNARCHIVED = {
    "replay": "it replayed dead letters or late records",
    "release": "an operator released a parked key",
    "refused": "the database refused some of its records",
    "lookup": "an earlier version of the graph looked its records up in a table",
}


def take_archives(graph: Graph) -> dict[str, str]:
    """Return stage -> the archive of its takes.

    Raises:
        UsageError: the graph does not archive takes.
    """
    spec = graph.spec()
    found = {}
    for node in graph.nodes:
        if isinstance(node, StageNode) and not node.archives:
            archive = None if node.takes is None else archive_of(spec, node.takes.name)
            if archive is None:
                raise UsageError(
                    f"graph {graph.name!r} does not archive takes",
                    hint="declare it with archive_takes(); or leave out --exact",
                )
            found[node.name] = archive.name
    return found

"""Erasing a key from an archive, beside workers and archivers that run.

The archive's interval is taken over, as a worker does that skips for it, so an archiver that is writing finds its grant
stale and continues behind the erasure. Each file is then replaced in one fenced statement; the old one is garbage.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from uuid import UUID

import msgspec

from millpy.clock import SystemClock, random_id
from millpy.errors import ArchiveUnavailableError, StaleSequencerError, UsageError
from millpy.graph import Graph, StageNode
from millpy.limits import Limits
from millpy.model.checkpoint import Grant
from millpy.model.keys import Key, key_from_text
from millpy.store.archive.erasure import without_key
from millpy.store.postgres.archiving import ArchiveInto, ArchivingStore
from millpy.store.protocol import Event, WorkerInfo


@dataclass(frozen=True, slots=True)
class Erasure:
    """What an erasure has done.

    Attributes:
        archive: the archive.
        files: number of files that had records of the key.
        records: number of these records.
    """

    archive: str
    files: int
    records: int


async def erase_key(graph: Graph, archive: str, key: str, url: str, into: ArchiveInto, limits: Limits) -> Erasure:
    """Erase what an archive has of a key. An erasure that was cut off continues when it is run again.

    Args:
        graph: the deployed graph.
        archive: the name of the archive; empty for the only one.
        key: the key, as text or as JSON.
        url: the database.
        into: where the archiver writes.
        limits: the lease.

    Raises:
        UsageError: there is no such archive, or the text is not a key of it.
        StaleSequencerError: another process has taken the archive over.
    """
    node = _archive_in(graph, archive)
    wanted = _key_of(key, node)
    fields = {taken.producer.name: taken.fields for taken in node.inputs}
    worker_id = random_id()
    async with ArchivingStore(url, into, SystemClock(), limits=limits) as store:
        deployed = await store.deploy(graph.spec())
        info = WorkerInfo(
            worker_id, deployed.graph_id, deployed.version, (node.name,), host=socket.gethostname(), pid=os.getpid()
        )
        await store.register(info, limits.lease_ttl_s)
        grants = await store.seize(worker_id, [i.interval_id for i in deployed.intervals_of(node.name)])
        beats = asyncio.create_task(_keep_lease(store, worker_id, limits))
        try:
            if len(grants) < node.intervals:
                raise _taken_over(node.name)
            await store.read(grants, state_rows_max=1)  # settles what the archiver has left
            found = await _erase_in_all(store, grants, beats, fields, wanted)
            await store.delete_garbage()
            done = Erasure(node.name, len(found), sum(found))
            await store.record_events(deployed.graph_id, [Event("archive_erased", asdict(done))])
        except StaleSequencerError as error:
            raise _taken_over(node.name) from error
        finally:
            beats.cancel()
            with suppress(Exception):
                await store.release(worker_id, grants)
                await store.unregister(worker_id)
    return done


async def _erase_in_all(
    store: ArchivingStore,
    grants: Sequence[Grant],
    beats: asyncio.Task[None],
    fields: Mapping[str, tuple[str, ...]],
    key: Key,
) -> list[int]:
    """Replace each file that has records of a key; return how many each of them had.

    Raises:
        StaleSequencerError: another process has taken the archive over.
    """
    found, examined, is_whole = list[int](), set[str](), False
    while not is_whole:  # a file that is gone may be in another one now
        is_whole = True
        for grant, path in [(one, path) for one in grants for path in await store.listed(one)]:
            if path in examined:
                continue
            if beats.done():
                await beats  # raises what has failed
                raise _taken_over(path.split("/")[1])
            examined.add(path)
            erased = await _erase_in(store, grant, path, fields, key)
            is_whole &= erased is not None
            if erased:
                found.append(erased)
    return found


async def _erase_in(
    store: ArchivingStore, grant: Grant, path: str, fields: Mapping[str, tuple[str, ...]], key: Key
) -> int | None:
    """Replace a file by one without a key; return how many records it had. None if retention has deleted the file."""
    try:
        name = await asyncio.to_thread(store.find, grant, path)
        found = await asyncio.to_thread(without_key, name, fields, key)
    except (ArchiveUnavailableError, FileNotFoundError):
        if path in await store.listed(grant):
            raise
        return None
    if found is None:
        return 0
    before = await store.replace(grant, path, *found)
    if before is not None:
        return before - found[1]
    if path in await store.listed(grant):
        raise _taken_over(path.split("/")[1])
    return None


async def _keep_lease(store: ArchivingStore, worker_id: UUID, limits: Limits) -> None:
    """Renew the lease until it is lost: a file in an object store may take longer than a lease."""
    while await store.heartbeat(worker_id, limits.lease_ttl_s):
        await SystemClock().sleep(limits.heartbeat_s)


def _archive_in(graph: Graph, name: str) -> StageNode:
    archives = [node for node in graph.nodes if isinstance(node, StageNode) and node.archives]
    found = [node for node in archives if name in ("", node.name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(node.name for node in archives)
    if not found:
        raise UsageError(
            f"graph {graph.name!r} has no archive {name}".rstrip(), hint=f"its archives: {names or 'none'}"
        )
    raise UsageError(f"graph {graph.name!r} has several archives", hint=f"name one with --of: {names}")


def _key_of(text: str, node: StageNode) -> Key:
    types = node.inputs[0].key_types
    try:
        return key_from_text(text, types)
    except msgspec.DecodeError:
        if types == (str,):
            return text
        raise UsageError(
            f"{text!r} is not a key of {node.name}",
            hint=f"give JSON: its key is {', '.join(of.__name__ for of in types)}; several fields are a list",
        ) from None


def _taken_over(archive: str) -> StaleSequencerError:
    return StaleSequencerError(f"another process has taken over {archive}", hint="run the command again: it continues")

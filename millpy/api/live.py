"""Live updates for any number of viewers, from one connection that listens and one poll.

A notification of a worker, or LOOK_S without one, makes the poll ask; never twice within PAUSE_S. What has changed goes
to every viewer as a server-sent event. A viewer that connects gets the present state first, so that nothing is missed
in between, and so that one whose buffer has overflowed, and who was disconnected, connects again.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from millpy.admin.json_output import json_text
from millpy.admin.notices import NoticeListener
from millpy.admin.queries import Admin, Row
from millpy.api.answers import answer_shared, check_graph, described
from millpy.api.authentication import Gate, Viewer, bearer_of
from millpy.api.database import Databases
from millpy.api.events import sentences
from millpy.api.new_events import NewEvents, events_after
from millpy.api.parameters import GraphName
from millpy.api.problems import ProblemError, busy
from millpy.clock import Clock
from millpy.errors import MillError

log = logging.getLogger(__name__)
LOOK_S = 1.0
PAUSE_S = 0.5
SLOW_S = 5.0
"""What costs more is asked for less often."""
BEAT_S = 10.0
SAMPLES_MAX = 120
SERIES_MAX = 2_000
VIEWERS_MAX = 1_000
CROWD = 20
"""With more viewers, answers to what many of them ask for are kept for a moment."""
BUFFER_BYTES_MAX = 1_000_000
EVENTS_MAX = 100
PROGRESS = """
SELECT graph, computation, count(*) AS intervals, count(*) FILTER (WHERE live) AS live, sum(bundle)::bigint AS bundles,
       min(input_watermark) AS input_watermark, min(low_watermark) AS low_watermark,
       round(extract(epoch FROM max(lag)))::bigint AS lag_s
  FROM millpy.watermarks GROUP BY graph, computation ORDER BY graph, computation
"""
WORKERS = """
SELECT graph, worker_id, host, pid, live, intervals, version, registered_at, drain_requested_at
  FROM millpy.workers
 ORDER BY live DESC, registered_at DESC, worker_id LIMIT 200
"""
SOURCES = """
SELECT graph, stream, state, count(*) AS partitions, sum(injected)::bigint AS injected,
       sum(dead_lettered)::bigint AS dead_lettered
  FROM millpy.sources GROUP BY graph, stream, state ORDER BY graph, stream, state
"""
ACCOUNTS = """
SELECT graph, count(*) AS accounts, count(*) FILTER (WHERE NOT balanced) AS unbalanced FROM millpy.accounting
 GROUP BY graph ORDER BY graph
"""
COUNTS = """
SELECT graph, stream, coalesce(consumer, '') AS consumer,
       sum(coalesce(consumed, injected))::bigint AS records, sum(pending)::bigint AS pending
  FROM millpy.accounting WHERE result_table IS NULL AND (consumer IS NOT NULL OR source_partition IS NOT NULL)
 GROUP BY graph, stream, consumer ORDER BY graph, stream, consumer LIMIT :series_max
"""
LATENCIES = """
SELECT graph, max(turn_p50_s) AS turn_p50, max(turn_p99_s) AS turn_p99, max(commit_p50_s) AS commit_p50,
       max(commit_p99_s) AS commit_p99
  FROM millpy.workers WHERE live GROUP BY graph
"""
LATENCY_NAMES = ("turn_p50", "turn_p99", "commit_p50", "commit_p99")
CHANNELS = "SELECT channel FROM millpy.descriptions ORDER BY channel"
router = APIRouter(tags=["live"])


@dataclass(frozen=True, slots=True)
class SeriesSample:
    """What the database had at a time.

    Attributes:
        at: monotonic seconds.
        counts: rows of COUNTS.
        progress: rows of PROGRESS.
        latencies: rows of LATENCIES.
    """

    at: float
    counts: list[Row]
    progress: list[Row]
    latencies: list[Row]


class ViewerStream:
    """The chunks that one viewer has not been sent, bounded in bytes."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._bytes = 0
        self._news = asyncio.Event()
        self.ended = False

    def put(self, chunk: bytes) -> None:
        """Add a chunk; end the stream if the viewer is too slow for it."""
        self._bytes += len(chunk)
        if self._bytes > BUFFER_BYTES_MAX:
            self._chunks.clear()
            self.end()
            return
        self._chunks.append(chunk)
        self._news.set()

    def end(self) -> None:
        """End the stream."""
        self.ended = True
        self._news.set()

    async def chunks(self, first: bytes) -> AsyncIterator[bytes]:
        """Yield chunks until the stream ends; a comment when there is nothing, so that dead connections show."""
        yield first
        while not self.ended:
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._news.wait()
            except TimeoutError:
                yield b": no news\n\n"
                continue
            self._news.clear()
            while self._chunks and not self.ended:
                chunk = self._chunks.popleft()
                self._bytes -= len(chunk)
                yield chunk


class Hub:
    """Looks at the database for all viewers, and keeps the last minutes of some numbers.

    Args:
        databases: the lanes.
        clock: the clock.
    """

    def __init__(self, databases: Databases, clock: Clock) -> None:
        self._lane = databases.reading
        self._clock = clock
        self._listener = NoticeListener(databases.reading.admin.url)
        self._streams: set[ViewerStream] = set()
        self._state: dict[str, str] = {}
        self._samples: tuple[SeriesSample, ...] = ()  # replaced whole, in a thread
        self._channels: list[str] = []
        self._new_events = NewEvents()
        self._noticed = asyncio.Event()
        self._stopped = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to look."""
        self._tasks = [asyncio.create_task(self._look_often()), asyncio.create_task(self._listen())]

    async def stop(self) -> None:
        """End all streams, and stop looking."""
        self._stopped.set()
        self._noticed.set()
        for stream in self._streams:
            stream.end()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()

    def check_room(self) -> None:
        """Check that another viewer may connect.

        Raises:
            ProblemError: there are VIEWERS_MAX of them.
        """
        if len(self._streams) >= VIEWERS_MAX:
            raise busy()

    def connect(self) -> ViewerStream:
        """Return a stream for a viewer, who has to be disconnected."""
        stream = ViewerStream()
        self._streams.add(stream)
        self._lane.is_crowded = len(self._streams) > CROWD
        return stream

    def disconnect(self, stream: ViewerStream) -> None:
        """Forget a viewer."""
        self._streams.discard(stream)
        self._lane.is_crowded = len(self._streams) > CROWD

    def present(self) -> bytes:
        """Return the present state as events."""
        return b"".join(_event(topic, text) for topic, text in self._state.items())

    async def missed(self, number: int) -> bytes:
        """Return the events since the last one that a viewer was sent, who connects again; some may come again.

        Args:
            number: the `Last-Event-ID`.
        """
        settled = max(number, self._new_events.settled)

        def read(admin: Admin) -> list[Row]:
            with admin.together() as connected:
                return sentences(connected, list(events_after(connected, number, EVENTS_MAX)))

        try:
            events = await self._lane.run(read, None)
        except (ProblemError, MillError):
            return b""  # the stream continues: its client would only connect again
        return _event("events", json_text(events, indent=0), settled) if events else b""

    def series(self, graph: str) -> dict[str, Any]:
        """Return the numbers of a graph over the last minutes."""
        samples = self._samples  # a thread may replace them
        names: dict[tuple[str, str], None] = {}
        counts: list[dict[tuple[str, str], Row]] = []
        lags: list[dict[str, int | None]] = []
        latencies: list[Row] = []
        for sample in samples:
            own = {(row["stream"], row["consumer"]): row for row in sample.counts if row["graph"] == graph}
            names.update(dict.fromkeys(own))
            counts.append(own)
            lags.append({row["computation"]: row["lag_s"] for row in sample.progress if row["graph"] == graph})
            latencies.append(next((row for row in sample.latencies if row["graph"] == graph), {}))
        times = [sample.at for sample in samples]
        computations = dict.fromkeys(name for lag in lags for name in lag)
        return {
            "ages_s": [round(self._clock.monotonic() - at, 1) for at in times],
            "records": [
                {
                    "stream": name[0],
                    "consumer": name[1] or None,
                    "rate": _rates(times, [count.get(name) for count in counts]),
                    "pending": [None if name not in count else count[name]["pending"] for count in counts],
                }
                for name in names
            ],
            "lag_s": {name: [lag.get(name) for lag in lags] for name in computations},
            "latency_s": {name: [latency.get(name) for latency in latencies] for name in LATENCY_NAMES},
        }

    async def _look_often(self) -> None:
        looked_at = slow_at = -SLOW_S
        while not self._stopped.is_set():
            await self._await_notice(LOOK_S)
            await self._pause(looked_at + PAUSE_S - self._clock.monotonic())
            looked_at = self._clock.monotonic()
            slow = looked_at - slow_at >= SLOW_S
            if not slow and not self._streams:
                continue
            try:
                news = await self._lane.run(self._look_once, None, slow=slow)
            except Exception as error:  # whatever it is, viewers are not to wait for ever
                self._tell("trouble", json_text({"detail": "the database does not answer"}, indent=0))
                known = isinstance(error, (MillError, ProblemError))
                log.warning("cannot look at the database: %s", error, exc_info=None if known else error)
                continue
            slow_at = looked_at if slow else slow_at
            again = self._state.pop("trouble", None) is not None
            for topic, text in ({**self._state, **news} if again else news).items():
                self._tell(topic, text, again=again)

    async def _await_notice(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._noticed.wait()
        except TimeoutError:
            pass
        self._noticed.clear()

    async def _pause(self, seconds: float) -> None:
        if seconds > 0:
            try:
                async with asyncio.timeout(seconds):
                    await self._stopped.wait()
            except TimeoutError:
                pass

    def _look_once(self, admin: Admin, *, slow: bool) -> Mapping[str, str]:
        with admin.together() as connected:
            return self._look(connected, slow=slow)

    def _look(self, admin: Admin, *, slow: bool) -> Mapping[str, str]:
        """Read what is news, in a thread; only one call runs at a time."""
        progress = admin.ask(PROGRESS)
        found: dict[str, Any] = {"progress": progress, "workers": admin.ask(WORKERS)}
        if slow:
            found["sources"] = admin.ask(SOURCES)
            found["accounts"] = admin.ask(ACCOUNTS)
            self._channels = [row["channel"] for row in admin.ask(CHANNELS)]
            counts = admin.ask(COUNTS, series_max=SERIES_MAX)
            sample = SeriesSample(self._clock.monotonic(), counts, progress, admin.ask(LATENCIES))
            self._samples = (*self._samples, sample)[-SAMPLES_MAX:]
        if events := self._new_events.read(admin, EVENTS_MAX):
            found["events"] = sentences(admin, events)
        self._new_events.passed()
        return {topic: json_text(rows, indent=0) for topic, rows in found.items()}

    async def _listen(self) -> None:
        while not self._stopped.is_set():
            try:
                if await asyncio.to_thread(self._listener.wait, self._channels, 1.0):
                    self._noticed.set()
            except MillError:
                await self._pause(LOOK_S)
            except Exception:
                log.exception("cannot listen to the database")
                await self._pause(LOOK_S)

    def _tell(self, topic: str, text: str, *, again: bool = False) -> None:
        if self._state.get(topic) == text and not again:  # after trouble, what is as before says that it has ended
            return
        if topic != "events":  # a viewer that connects reads those before from the list of events
            self._state[topic] = text
        chunk = _event(topic, text, self._new_events.settled if topic == "events" else None)
        for stream in list(self._streams):
            stream.put(chunk)


def _event(topic: str, text: str, number: int | None = None) -> bytes:
    """Return a server-sent event; a client that connects again sends back `number`, up to which it has all events."""
    identity = "" if number is None else f"id: {number}\n"
    return f"event: {topic}\n{identity}data: {text}\n\n".encode()


def _rates(times: list[float], rows: list[Row | None]) -> list[float | None]:
    """Return the records per second between samples; None at the first one, and where a number is missing."""
    found: list[float | None] = [None] if rows else []
    for place in range(1, len(rows)):
        before, after = rows[place - 1], rows[place]
        elapsed_s = times[place] - times[place - 1]
        known = before is not None and after is not None and elapsed_s > 0
        found.append(round(max(after["records"] - before["records"], 0) / elapsed_s, 3) if known else None)  # type: ignore[index]
    return found


def hub_of(request: Request) -> Hub:
    """Return the hub of the app that serves a request."""
    found: Hub = request.app.state.hub
    return found


LIVE = described({}, "Server-sent events")
LIVE[200] = {"description": "Server-sent events", "content": {"text/event-stream": {"schema": {"type": "string"}}}}


@router.get("/v1/live", responses=LIVE, response_class=StreamingResponse)
async def watch(request: Request, caller: Viewer) -> Response:
    """Send server-sent events: the present state, then each change.

    Topics: `progress` (watermarks of computations), `workers`, `sources`, `accounts`, `events` (those since the last
    ones), `trouble`. A stream that is read too slowly ends; connect again. With the header `Last-Event-ID`, as browsers
    send it, the newest 100 events since then come after the present state; some of them may come a second time.
    """
    if caller.principal.database_role is not None:
        raise ProblemError(HTTPStatus.FORBIDDEN, "a user with a role of the database cannot see other users' graphs")
    hub = hub_of(request)
    gate: Gate = request.app.state.gate
    bearer = bearer_of(request)
    hub.check_room()
    before = request.headers.get("last-event-id", "")

    async def chunks() -> AsyncIterator[bytes]:
        stream = hub.connect()  # here, since a client that has gone before the first chunk does not run this block
        clock = asyncio.get_running_loop().time
        checked_at = clock()
        try:
            missed = await hub.missed(int(before)) if re.fullmatch("[0-9]{1,18}", before) else b""
            async for chunk in stream.chunks(hub.present() + missed):
                if clock() - checked_at >= BEAT_S:
                    checked_at = clock()
                    await gate.caller(request, bearer, caller.session or None)
                yield chunk
        except (ProblemError, MillError):
            return  # the token was revoked, or the database does not say: the answer to the next request says which
        finally:
            hub.disconnect(stream)

    return StreamingResponse(chunks(), media_type="text/event-stream")


@router.get("/v1/graphs/{graph}/series", responses=described({"type": "object"}, "Series"), response_class=Response)
async def list_series(request: Request, caller: Viewer, graph: GraphName) -> Response:
    """Show rates, backlogs, watermark lags and latencies of the last ten minutes, a sample every five seconds or so.

    The latencies are those of turns and commits of the slowest live worker, each over the minute before its last
    heartbeat.
    """
    if caller.principal.database_role is not None:
        raise ProblemError(HTTPStatus.FORBIDDEN, "a user with a role of the database cannot see the whole graph")
    hub = hub_of(request)

    def read(admin: Admin) -> dict[str, Any]:
        check_graph(admin, graph)
        return hub.series(graph)

    return await answer_shared(request, caller, read)

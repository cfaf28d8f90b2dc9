"""SIGKILL and SIGSTOP of a worker around requests to a receiver that fails now and then: repeats are known and few."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from millpy.hosting.failpoints import Failpoint
from tests.crash.cases.killing import spring
from tests.crash.cases.sources import trap
from tests.crash.checks import Fault, differences
from tests.crash.sinks import BOUND, NUMBER, Total, _counted, write
from tests.crash.world import Case, World
from tests.webhook_receiver import Received, WebhookReceiver

GRAPH = Path(__file__).parents[1] / "webhook_graph.py"
POINTS = ("before", "arrived", "answered", "sent")
SOME_FAIL: Sequence[dict[str, Any]] = [
    {}, {"status": 503}, {}, {"reset": True, "stored": True}, {"reset": True}, {}, {}, {"status": 500, "stored": True}
]  # fmt: skip
FAILURES = 2
"""Requests of SOME_FAIL that were stored and not answered."""
NTH = 12
INTERVALS = 2


def cases() -> Iterator[Case]:
    """Each point of a request, and of a worker, with and without batches."""
    for batch in ("", "json"):
        variant = batch or "single"
        for point in POINTS:
            yield Case(f"SIGKILL around a request, {point}", variant, partial(around_request, point=point, batch=batch))
            freeze = partial(around_request, point=point, batch=batch, frozen=True)
            yield Case(f"SIGSTOP beyond the lease around a request, {point}", variant, freeze)
        for failpoint in Failpoint:
            yield Case(
                f"SIGKILL at {failpoint}, with a webhook", variant, partial(at_point, point=failpoint, batch=batch)
            )
        yield Case("the receiver killed and restarted", variant, partial(receiver_killed, batch=batch))


class Scene:
    """The input and the receiver of one case."""

    def __init__(self, world: World, batch: str, number: int) -> None:
        source = world.directory / "readings.ndjson"
        expected = write(source, 1, number)
        self.receiver = world.stack.enter_context(WebhookReceiver(world.directory))
        self.environment = {"CRASH_INPUT": str(source), "HOOK_URL": self.receiver.url, "HOOK_BATCH": batch}
        self.how: dict[str, Any] = {"graph": GRAPH, "bundle_records_max": 7, "environment": self.environment}
        world.oracle = lambda: hook_faults(expected, self.receiver.stored())

    def trapped(self, text: str) -> dict[str, Any]:
        return self.how | {"environment": self.environment | {"HOOK_TRAP": text}}


def around_request(world: World, point: str, batch: str, *, frozen: bool = False, number: int = NUMBER) -> None:
    """Kill or freeze a worker before, in or behind a request, or before its progress is recorded; another continues."""
    scene = Scene(world, batch, number)
    plan = [*SOME_FAIL, *[{}] * (NTH - len(SOME_FAIL))]
    text = f"{point}:{3 if point == 'sent' else NTH}:{'stop' if frozen else 'kill'}"
    if point == "arrived":
        plan.append({"signal": int(signal.SIGSTOP if frozen else signal.SIGKILL), "stored": True})
        text = ""
    scene.receiver.plan(*plan)
    one = world.worker(**scene.trapped(text))
    world.let_another_finish(one, frozen=frozen, **scene.how)
    count = repeated(scene.receiver.stored())
    assert count <= (1 + FAILURES) * INTERVALS * BOUND, f"{count} messages came again"
    world.notes.append(f"{count} repeats")


def at_point(world: World, point: Failpoint, batch: str, number: int = NUMBER) -> None:
    """Kill a worker at a point of its cycle."""
    scene = Scene(world, batch, number)
    one = world.worker(**scene.how, failpoint=trap(point))
    spring(one, point)
    recovery = world.await_killed(one)
    again = world.worker(**scene.how)
    recovery.wait(watched=again)
    world.await_finished(again)
    assert repeated(scene.receiver.stored()) <= INTERVALS * BOUND


def receiver_killed(world: World, batch: str, number: int = NUMBER) -> None:
    """Kill the receiver twice between requests."""
    scene = Scene(world, batch, number)
    worker = world.worker(**scene.how)
    for nth in (1, 2):
        worker.await_while_running(lambda nth=nth: len(scene.receiver.received()) >= 30 * nth, "requests arrive")
        scene.receiver.kill()
        world.kills += 1
        scene.receiver.start()
    world.await_finished(worker)


def hook_faults(expected: Any, stored: Sequence[Received]) -> list[Fault]:
    """Compare what has arrived, without repeats, with what must have; check that ids name one content each."""
    bodies: dict[str, bytes] = {}
    ids: dict[tuple[str, int], str] = {}
    got: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for request in stored:
        if request.id in bodies:
            assert bodies[request.id] == request.body, f"{request.id} has two bodies"
            continue
        bodies[request.id] = request.body
        interval = request.id.split("-")[2]
        read = msgspec.json.decode(request.body)
        totals = [msgspec.convert(record, Total) for record in (read if isinstance(read, list) else [read])]
        assert len(totals) == len(request.positions)
        for position, total in zip(request.positions, totals, strict=True):
            assert (interval, position) not in ids, f"{position} came as {ids[interval, position]} and as {request.id}"
            ids[interval, position] = request.id
            got[total.device].append((total.number, total.total))
    for interval in {interval for interval, _ in ids}:
        positions = sorted(position for other, position in ids if other == interval)
        assert positions == list(range(len(positions))), "positions have gaps"
    return differences("webhook", _counted(got), _counted(expected))


def repeated(stored: Sequence[Received]) -> int:
    """Return how many messages came again."""
    return sum(len(request.positions) for request in stored) - sum(
        map(len, {r.id: r.positions for r in stored}.values())
    )

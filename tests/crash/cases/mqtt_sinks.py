"""SIGKILL and SIGSTOP of workers while messages leave for an MQTT broker, and a broker that is restarted.

Nothing is lost or out of order. What comes again has its id, and is at most one send of each interval for each fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from millpy.embedded import EmbeddedBroker, mosquitto_program
from millpy.hosting.failpoints import Failpoint
from tests.crash.cases.killing import spring
from tests.crash.cases.sources import trap
from tests.crash.harness import await_true
from tests.crash.mqtt_sinks import BOUND, INTERVALS, POINTS, Subscriber
from tests.crash.sinks import NUMBER, write
from tests.crash.world import Case, Skipped, World

GRAPH = Path(__file__).parents[1] / "mqtt_sink_graph.py"
SETTINGS = {"graph": GRAPH, "bundle_records_max": 7}


def cases() -> Iterator[Case]:
    """Each point of a worker and of a send; and the broker."""
    for point in Failpoint:
        yield Case(f"SIGKILL at {point}, with an MQTT sink", "", partial(at_point, point=point))
    for point in POINTS:
        for qos in (1, 2):
            yield Case(f"SIGKILL in a send to MQTT, {point}", f"QoS {qos}", partial(in_send, point=point, qos=qos))
        yield Case(
            f"SIGSTOP beyond the lease in a send to MQTT, {point}", "", partial(in_send, point=point, frozen=True)
        )
    yield Case("MQTT broker restarted twice, with a sink", "", broker_restarted)


class Scene:
    """The input, a broker and a subscriber of one case."""

    def __init__(self, world: World, *, number: int = NUMBER, qos: int = 1) -> None:
        if mosquitto_program() is None:
            raise Skipped("mosquitto is not installed")
        source = world.directory / "readings.ndjson"
        expected = write(source, 1, number)
        self.broker = world.stack.enter_context(EmbeddedBroker(world.directory / "broker"))
        self.subscriber = world.stack.enter_context(Subscriber(self.broker.port))
        environment = {"CRASH_INPUT": str(source), "SINK_PORT": str(self.broker.port), "SINK_QOS": str(qos)}
        self.how: dict[str, Any] = SETTINGS | {"environment": environment}
        world.oracle = lambda: self.subscriber.faults(expected)

    def trapped(self, point: str, *, frozen: bool) -> dict[str, Any]:
        text = f"{point}:{POINTS[point]}:{'stop' if frozen else 'kill'}"
        return self.how | {"environment": {**self.how["environment"], "SINK_TRAP": text}}

    def check_repeats(self, faults: int, *, least: int = 0) -> None:
        """What has come again is no more than the documentation says."""
        repeated = self.subscriber.repeated
        assert least <= repeated <= faults * INTERVALS * BOUND, f"{repeated} messages came again"


def at_point(world: World, point: Failpoint) -> None:
    """Kill a worker at a point of its cycle."""
    scene = Scene(world)
    one = world.worker(**scene.how, failpoint=trap(point))
    spring(one, point)
    recovery = world.await_killed(one)
    again = world.worker(**scene.how)
    recovery.wait(watched=again)
    world.await_finished(again)
    scene.check_repeats(1)


def in_send(world: World, point: str, *, frozen: bool = False, qos: int = 1, number: int = NUMBER) -> None:
    """Kill or freeze a worker inside a send; another one takes over."""
    scene = Scene(world, number=number, qos=qos)
    one = world.worker(**scene.trapped(point, frozen=frozen))
    world.let_another_finish(one, frozen=frozen, **scene.how)
    # The last send is acknowledged, and its progress not recorded yet.
    scene.check_repeats(1, least=1 if point == "acknowledged" else 0)


def broker_restarted(world: World) -> None:
    """Stop the broker in the midst of sends, twice; it keeps what it has acknowledged."""
    scene = Scene(world, qos=2)
    worker = world.worker(**scene.how)
    for number in (200, 600):
        await_true(lambda number=number: len(scene.subscriber.got) >= number, f"{number} messages", 60)
        scene.broker.stop()
        world.kills += 1
        scene.broker.start()
    world.await_finished(worker)
    scene.check_repeats(2)

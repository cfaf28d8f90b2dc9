"""The crash matrix itself: a case that goes wrong is a violation of this case, and quick workers are no fault."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiokafka.errors import KafkaConnectionError

from millpy.embedded import EmbeddedPostgres
from millpy.hosting.failpoints import Failpoint
from tests.crash.cases.killing import spring
from tests.crash.conftest import Survives
from tests.crash.world import Case, Inputs, World, play
from tests.forked import fork_millpy
from tests.kafka_server import KafkaServer


def test_an_error_of_a_kafka_client_is_a_violation_of_its_case(
    tmp_path: Path, postgres: EmbeddedPostgres, inputs: Inputs
) -> None:
    def run(world: World) -> None:
        raise KafkaConnectionError("the broker was killed")

    (fault,) = play(Case("Kafka", "away", run), tmp_path, postgres, inputs).faults

    assert fault.kind == "violation"
    assert "the broker was killed" in fault


def test_a_worker_that_ends_before_its_tenth_turn_is_killed_at_its_release(survives: Survives) -> None:
    def run(world: World) -> None:
        victim = world.worker(failpoint=f"{Failpoint.BEFORE_RELEASE}:1:kill", bundle_records_max=100_000)
        victim.process.wait(60)
        spring(victim, Failpoint.BEFORE_RELEASE)
        recovery = world.await_killed(victim)
        again = world.worker()
        recovery.wait(watched=again)
        world.await_finished(again)

    survives(Case("SIGKILL at before_release", "in few turns", run))


def test_cases_wait_for_a_broker_that_a_case_beside_them_has_killed(tmp_path: Path) -> None:
    server = KafkaServer(tmp_path / "never started")
    waiting = threading.Thread(target=server.await_running)
    waiting.start()

    waiting.join(0.1)
    assert waiting.is_alive()
    server._runs.set()
    waiting.join(60)

    assert not waiting.is_alive()


def test_cases_side_by_side_each_begin_their_own_processes(tmp_path: Path) -> None:
    def refused_command(number: int) -> str:
        return fork_millpy(tmp_path, f"no-{number}").communicate(60)[1]

    with ThreadPoolExecutor(8) as pool:
        refusals = list(pool.map(refused_command, range(64)))

    assert all(f"no-{number}'" in refusal for number, refusal in enumerate(refusals)), refusals

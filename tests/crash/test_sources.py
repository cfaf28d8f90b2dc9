"""A broker's reader is killed around a commit: its input is acknowledged only after it. All points: `make crash`."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpy.embedded import EmbeddedPostgres, mosquitto_program
from millpy.hosting.failpoints import Failpoint
from tests.crash.cases.database_sources import INJECTED, TABLE, database_case
from tests.crash.cases.sources import HORIZON_S, kafka_case, mqtt_case
from tests.crash.conftest import Survives
from tests.crash.world import Inputs, play
from tests.kafka_server import KafkaServer

CANARIES = Path(__file__).with_name("canaries")


def test_messages_of_an_uncommitted_turn_are_redelivered(survives: Survives) -> None:
    verdict = survives(mqtt_case(Failpoint.BEFORE_COMMIT))

    assert verdict.kills == 1


def test_redelivered_messages_of_a_committed_turn_count_once(survives: Survives) -> None:
    verdict = survives(mqtt_case(Failpoint.AFTER_COMMIT))

    assert verdict.notes[-1] != "0 came again"


def test_committed_messages_redelivered_beyond_the_horizon_count_once(survives: Survives) -> None:
    verdict = survives(mqtt_case(Failpoint.AFTER_COMMIT, horizon_s=HORIZON_S))

    assert verdict.notes[-1] != "0 came again"


def test_offsets_of_an_uncommitted_turn_are_read_again(survives: Survives, kafka: KafkaServer) -> None:
    verdict = survives(kafka_case(Failpoint.BEFORE_COMMIT, server=kafka))

    assert verdict.kills == 1


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("what", [INJECTED, TABLE])
@pytest.mark.parametrize("point", [Failpoint.AFTER_FENCE, Failpoint.AFTER_COMMIT])
def test_reader_of_postgres_is_killed_around_a_commit(survives: Survives, what: str, point: Failpoint) -> None:
    verdict = survives(database_case(point, what))

    assert verdict.kills == 1


@pytest.mark.skipif(mosquitto_program() is None, reason="mosquitto is not installed")
def test_worker_that_acknowledges_before_it_commits_is_caught(
    tmp_path: Path, postgres: EmbeddedPostgres, inputs: Inputs
) -> None:
    case = mqtt_case(Failpoint.BEFORE_COMMIT, CANARIES / "acknowledges_first.py")
    verdict = play(case, tmp_path, postgres, inputs)

    assert verdict.count("lost"), verdict.faults
    assert verdict.count("doubled") == 0


def test_worker_that_keeps_offsets_apart_from_its_commits_is_caught(
    tmp_path: Path, postgres: EmbeddedPostgres, inputs: Inputs, kafka: KafkaServer
) -> None:
    case = kafka_case(Failpoint.BEFORE_COMMIT, CANARIES / "keeps_offsets_apart.py", kafka)
    verdict = play(case, tmp_path, postgres, inputs)

    assert verdict.count("lost"), verdict.faults
    assert verdict.count("doubled") == 0

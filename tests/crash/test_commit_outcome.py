"""Connections lost around COMMIT or silent, and a database that dies: outcomes are resolved, nothing happens twice."""

from __future__ import annotations

import pytest

from tests.crash.cases import find, network
from tests.crash.conftest import Survives
from tests.crash.world import Case

AROUND_COMMIT = [
    case
    for case in network.cases()
    if case.variant == "one worker" and any(fault in case.fault for fault, *_ in network.ANSWERS)
]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("case", AROUND_COMMIT, ids=lambda case: case.name)
def test_lost_answer_to_commit(survives: Survives, case: Case) -> None:
    survives(case)


@pytest.mark.parametrize("fault", ["cut", "stalled, then cut"])
def test_connections_cut_and_stalled(survives: Survives, fault: str) -> None:
    survives(find(f"network: {fault}", "one worker"))


def test_worker_stalled_past_its_lease_changes_nothing(survives: Survives) -> None:
    survives(find("network: stalled past the lease", "two workers"))


def test_worker_recovers_when_its_connections_never_answer(survives: Survives) -> None:
    survives(find("network: connections silent for ever", "one worker"))


def test_database_killed_and_restarted(survives: Survives) -> None:
    verdict = survives(find("PostgreSQL killed and restarted", "two workers"))

    assert verdict.kills == 2

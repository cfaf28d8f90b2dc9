"""Partitions that a feed gains are deployed once, and not again when that was refused."""

from __future__ import annotations

import pytest

from millpy.errors import UsageError
from millpy.model.deployment import ComputationSpec, DeployedInterval, GraphSpec
from millpy.runtime.source_growth import GainedPartitionsError, SourceGrowth

SPEC = GraphSpec("g", (ComputationSpec("readings", "injector", ("t/0",)), ComputationSpec("sums", "stage")), (), (), ())
DEPLOYED = [DeployedInterval(7, "readings", 0, None, "t/0")]


def test_partitions_that_are_not_deployed_yet_are_added_to_the_spec() -> None:
    growth, woken = SourceGrowth(), list[str]()
    gained = growth.reporter("readings", DEPLOYED, lambda: woken.append("now"))

    assert gained(["t/0"])
    growth.check()
    assert gained(["t/0", "t/1"])

    with pytest.raises(GainedPartitionsError, match="readings: 2 partitions"):
        growth.check()
    assert woken == ["now"]
    assert [found.partitions for found in growth.applied_to(SPEC).computations] == [("t/0", "t/1"), ()]
    growth.check()


def test_partitions_that_cannot_be_deployed_are_not_gained_again() -> None:
    growth = SourceGrowth()
    gained = growth.reporter("readings", DEPLOYED, lambda: None)
    gained(["t/0", "t/1"])
    growth.applied_to(SPEC)

    assert growth.refuse(UsageError("taken back"))

    assert not gained(["t/0", "t/1"])
    assert growth.applied_to(SPEC) == SPEC
    assert not growth.refuse(UsageError("something else"))

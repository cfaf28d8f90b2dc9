"""A worker is frozen past its lease, even between fence and COMMIT: others take over, its next commit is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpy.embedded import EmbeddedPostgres
from millpy.hosting.failpoints import Failpoint
from tests.crash.cases.freezing import freeze_and_thaw
from tests.crash.cases.killing import INJECTOR
from tests.crash.checks import faults
from tests.crash.world import Inputs, World


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("only", ["", INJECTOR], ids=["anything", "injector"])
@pytest.mark.parametrize("point", [Failpoint.BEFORE_COMMIT, Failpoint.AFTER_FENCE])
def test_frozen_worker_changes_nothing(
    tmp_path: Path, postgres: EmbeddedPostgres, inputs: Inputs, point: Failpoint, only: str
) -> None:
    with World(tmp_path, postgres, inputs) as world:
        frozen, _ = freeze_and_thaw(world, point, only)
        found = [*faults(world.url, inputs.expected), *world.found()]
        refused = world.connect().execute("SELECT count(*) FROM mill.events WHERE kind = 'fence_refused'").fetchone()

    assert found == []
    assert frozen.reached(Failpoint.BEFORE_COMMIT) > frozen.reached(Failpoint.AFTER_COMMIT), (
        "what it began did not succeed"
    )
    if point is Failpoint.BEFORE_COMMIT:
        assert refused is not None and refused[0] >= 1, frozen.log
    else:
        assert "Error" in frozen.log  # its transaction was ended for it

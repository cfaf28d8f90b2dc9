"""A prepared statement that a pooler has lost is no broken invariant."""

from __future__ import annotations

import psycopg
import pytest

from millpy.errors import TransientError
from millpy.store.postgres.connection import STALE_PLAN
from millpy.store.postgres.errors import translate, translate_commit


@pytest.mark.parametrize("state", STALE_PLAN)
def test_lost_prepared_statement_is_tried_again(state: str) -> None:
    error = psycopg.errors.lookup(state)("prepared statement")

    assert isinstance(translate(error), TransientError)
    assert isinstance(translate_commit(error, commit_sent=True), TransientError)

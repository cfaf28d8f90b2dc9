"""A reader that waits less than its limit: its statement is cancelled, and its connection serves others as before."""

from __future__ import annotations

import time

import pytest

from millpy.admin.queries import Admin
from millpy.errors import SlowQueryError


def test_a_statement_is_cancelled_within_its_time_and_the_next_has_the_limit_again(database_url: str) -> None:
    admin = Admin(database_url, statement_s_max=60, connections_max=1)
    began = time.monotonic()
    with pytest.raises(SlowQueryError) as refused:
        admin.limit_to(0.2).ask("SELECT pg_sleep(30)")
    took_s = time.monotonic() - began

    assert refused.value.message == "the query takes too long"
    assert took_s < 20
    assert admin.ask("SHOW statement_timeout") == [{"statement_timeout": "1min"}]
    assert admin.ask("SELECT CAST(pg_sleep(0.5) AS text) AS slept") == [{"slept": ""}]
    admin.close()


def test_statements_have_a_time_together(database_url: str) -> None:
    admin = Admin(database_url, statement_s_max=60, connections_max=1)
    with admin.together() as connected:
        limited = connected.limit_to(1.5)
        assert limited.ask("SELECT CAST(pg_sleep(0.2) AS text) AS slept") == [{"slept": ""}]
        began = time.monotonic()
        with pytest.raises(SlowQueryError):
            limited.ask("SELECT pg_sleep(1.4)")
        took_s = time.monotonic() - began
        with pytest.raises(SlowQueryError):
            limited.ask("SELECT pg_sleep(0.2)")

    assert took_s < 1.4
    admin.close()

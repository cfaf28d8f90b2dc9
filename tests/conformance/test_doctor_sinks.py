"""The doctor on sinks: rights of statements, and messages that are refused."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import psycopg
import pytest
from psycopg import sql

from millpy import EventTime, Graph, seconds
from millpy.admin import doctor_statements
from millpy.admin.diagnosis import read_facts
from millpy.admin.doctor_sinks import judge_sinks
from millpy.admin.doctor_statements import examine_statements
from millpy.clock import SystemClock
from millpy.limits import Limits
from millpy.model.finding import Severity
from millpy.testing import ManualSource
from tests.conformance.store_builders import World
from tests.conformance.store_outbox_suite import filled, refused, report
from tests.conformance.test_postgres_store import world

__all__ = ["world"]
TABLE = "CREATE SCHEMA app; CREATE TABLE app.hot (device text, value double precision)"
INSERT = "INSERT INTO app.hot VALUES (%(device)s, %(value)s) -- 100 %%"


class Reading(msgspec.Struct):
    device: str
    at: int
    value: float


def graph_of(*statements: str) -> Graph:
    graph = Graph("plant")
    event_time = EventTime("at", unit="s", max_disorder=seconds(0))
    readings = graph.inject("readings", ManualSource(), schema=Reading, event_time=event_time)
    for number, statement in enumerate(statements):
        readings.to_sql(statement, key="device", name=f"to_app_{number}")
    return graph


def test_a_statement_that_the_workers_may_not_run_is_an_error_and_none_is_run(database_url: str) -> None:
    graph = graph_of(INSERT, "SELECT app.nothing()", "CALL app.proc(%(device)s)")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(TABLE)
        role = f"worker_{abs(hash(database_url))}"
        connection.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(role)))
        try:
            found = list(examine_statements(database_url, graph, role))
            assert [one.severity for one in found] == [Severity.ERROR, Severity.ERROR, Severity.NOTE]
            assert f"{role} may not run its statement: permission denied for schema app" in found[0].found
            grants = "GRANT USAGE ON SCHEMA app TO {0}; GRANT INSERT ON app.hot TO {0}"
            connection.execute(sql.SQL(grants).format(sql.Identifier(role)))
            found = list(examine_statements(database_url, graph, role))
            assert (found[0].severity, found[0].found) == (Severity.OK, f"to_app_0: {role} may run its statement")
            assert "nothing() does not exist" in found[1].found
            assert connection.execute("SELECT count(*) FROM app.hot").fetchall() == [(0,)]
        finally:
            connection.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(role)))
    (found_as_owner,) = examine_statements(database_url, graph_of(INSERT), None)
    assert found_as_owner.severity is Severity.OK


def test_a_statement_whose_table_is_locked_is_not_waited_for(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(doctor_statements.LIMITS, "lock_timeout", "50")
    with psycopg.connect(database_url) as connection:
        connection.execute(TABLE)
        connection.commit()
        connection.execute("LOCK TABLE app.hot IN ACCESS EXCLUSIVE MODE")

        (found,) = examine_statements(database_url, graph_of(INSERT), None)

    assert (found.severity, found.check) == (Severity.WARNING, "sink")
    assert found.found == "to_app_0: its statement was not checked: canceling statement due to lock timeout"


async def test_a_parked_key_of_a_sink_is_among_the_parked_keys(world: World, database_url: str) -> None:
    owner = await world.owner()
    interval = await filled(world, owner)
    await owner.store.record_delivered([report(owner, interval, 5, refused(1, parked=True), refused(2, 0))])
    with psycopg.connect(database_url, autocommit=True) as connection:
        parked = connection.execute("SELECT key, records, detail, failing_record, ticket FROM millpy.parked").fetchall()
        ((number, because),) = connection.execute(
            "SELECT number, refused_because FROM millpy.refused_messages WHERE state = 'parked'"
        ).fetchall()
    assert parked == [('"a"', 2, because, "1", 1)]
    assert number == 1


@pytest.mark.parametrize("parked", [0, 2])
def test_the_doctor_says_what_is_refused_and_what_to_do(database_url: str, parked: int) -> None:
    facts = read_facts(database_url, SystemClock())
    with psycopg.connect(database_url) as connection:
        ((now,),) = connection.execute("SELECT clock_timestamp()").fetchall()
    row = {"graph": "g", "sink": "out", "messages": 0, "bytes": 0, "waits_s": None, "disconnected": 0, "refused": 5,
           "refused_since": now, "refused_because": "no such topic", "parked_keys": parked}  # fmt: skip
    (found,) = judge_sinks(replace(facts, sinks=[row]), Limits())
    assert found.severity is Severity.WARNING
    assert "g.out: the other side refuses messages since" in found.found
    assert ("2 keys are parked" in found.found) == bool(parked)
    assert "millpy parked release" in found.action
    (released,) = judge_sinks(replace(facts, sinks=[row | {"refused_because": None}]), Limits())
    assert "UTC: they were released, and are sent again; 5 messages" in released.found

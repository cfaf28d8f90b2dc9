"""Statements of a deployment change the folded rows that they are about, and no others beside them."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from millpy.store.postgres.arrays import Bigints, Texts, register_arrays
from millpy.store.postgres.statements import statement
from tests.conformance.store_builders import Owner

A, B = '"a"', '"b"'


def store(
    connection: psycopg.Connection[Any], interval: int, kind: str, namespace: str, key: str, value: object
) -> None:
    connection.execute(
        "INSERT INTO mill.keyed (interval_id, kind, namespace, key, subkey, key_hash, fire_at, bundle, value)"
        " VALUES (%s, %s, %s, %s, '0/60', 7, 0, 1, %s)",
        [interval, kind, namespace, key, json.dumps(value)],
    )


def stored(connection: psycopg.Connection[Any]) -> set[tuple[Any, ...]]:
    return set(connection.execute("SELECT interval_id, kind, namespace, key FROM mill.keyed").fetchall())


def test_migrated_state_replaces_the_cells_of_its_keys_alone(owner: Owner, database_url: str) -> None:
    first, second = (interval.interval_id for interval in owner.deployment.intervals_of("sums"))
    with psycopg.connect(database_url) as connection:
        for place in (
            (first, "state", "total", A), (first, "state", "count", A), (first, "state", "total", B),
            (first, "timer", "event", A), (first, "window", "", A), (second, "state", "total", A),
        ):  # fmt: skip
            store(connection, *place, {})
        before = stored(connection)

        register_arrays(connection)
        gone = {"interval": first, "key_hashes": Bigints([7, 8]), "keys": Texts([A, B])}
        connection.execute(statement("delete_state"), gone)

        assert before - stored(connection) == {(first, "state", "total", A), (first, "state", "count", A)}


@pytest.mark.parametrize(("record", "shorter"), [({"a": 1, "b": 2}, {"a": 1}), ([1, 2], [1])])
def test_parked_records_of_other_streams_keep_the_fields_that_one_stream_loses(
    owner: Owner, database_url: str, record: object, shorter: object
) -> None:
    deployment = owner.deployment
    (alarms,) = deployment.intervals_of("alarms")
    own, other = (
        str(deployment.subscription_ids[stream, "alarms", n]) for n, stream in enumerate(("readings", "sums"))
    )
    with psycopg.connect(database_url) as connection:
        for subscription in (own, other):
            store(connection, alarms.interval_id, "parked", subscription, A, {"record": record})

        asked = {"graph_id": deployment.graph_id, "stream": "readings", "names": ["a"], "kept": 1}
        connection.execute(statement("shorten_parked"), asked)

        found = dict(connection.execute("SELECT namespace, value::jsonb -> 'record' FROM mill.keyed").fetchall())
    assert found == {own: shorter, other: record}

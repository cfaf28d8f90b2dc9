"""PostgreSQL accepts every delta document that encodes, and returns it unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings

from millpy.model.checkpoint import Delta
from millpy.model.delta import decode_document, encode_document
from tests.property.test_delta import deltas

STATEMENT = """
    SELECT given.document::jsonb::text,
           array(SELECT k.name #>> '{}' FROM json_array_elements(given.document::json) AS d(part),
                                             json_array_elements(d.part -> 'key') AS k(name)),
           array(SELECT v.cell ->> 0 FROM json_array_elements(given.document::json) AS d(part),
                                          json_array_elements(d.part -> 'value') AS v(cell))
      FROM (SELECT %s::text AS document) AS given
"""


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database_url, autocommit=True) as opened:
        yield opened


# The connection keeps nothing from one example to the next.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(delta=deltas())
def test_encoded_values_survive_jsonb(connection: psycopg.Connection, delta: Delta) -> None:
    (document, keys, values) = connection.execute(STATEMENT, [encode_document(delta).decode()]).fetchone() or ()

    returned = decode_document(document)

    assert [part.keys for part in returned] == [part.keys for part in delta]
    assert [part.subkeys for part in returned] == [part.subkeys for part in delta]
    assert [part.fire_ats for part in returned] == [part.fire_ats for part in delta]
    assert [parsed(part.values) for part in returned] == [parsed(part.values) for part in delta]
    assert len(keys) == len(values) == sum(len(part) for part in delta)


def parsed(values: list[bytes | None]) -> list[object]:
    """Values without regard to white space and the order of members; 1e20 and 100000000000000000000 are equal."""
    exactly = json.JSONDecoder(parse_int=Decimal, parse_float=Decimal).decode
    return ["tombstone" if value is None else [exactly(value.decode())] for value in values]

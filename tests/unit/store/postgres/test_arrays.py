"""Binary arrays are what PostgreSQL's own client library makes of the same values."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import numpy as np
import psycopg
import pytest
from psycopg.adapt import Transformer
from psycopg.pq import Format

from millpy.store.postgres.arrays import Bigints, Booleans, Byteas, Doubles, PgArray, Texts, Timestamps, Uuids
from millpy.store.postgres.statements import statements


def decoded(array: PgArray) -> list[Any]:
    loader = psycopg.adapters.get_loader(array.array_oid, Format.BINARY)
    assert loader is not None
    return loader(array.array_oid, Transformer()).load(array.encoded)  # type: ignore[no-any-return]


UUID_1 = UUID(int=1)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Bigints, [1, None, -(2**63), 2**63 - 1]),
        (Bigints, []),
        (Doubles, [0.1, None, float("inf"), -0.0]),
        (Booleans, [True, None, False]),
        (Byteas, [b"", None, b"\x00\xff"]),
        (Texts, ["", None, 'ä, "quoted"']),
        (Uuids, [UUID_1, None]),
    ],
)
def test_values_and_nulls_survive(kind: Any, values: list[Any]) -> None:
    assert decoded(kind(values)) == values


@pytest.mark.parametrize(
    ("kind", "values"),
    [(Bigints, np.array([1, -5], np.int64)), (Doubles, np.array([0.5, 2.0])), (Timestamps, np.array([0, 7], np.int64))],
)
def test_packing_by_numpy_gives_the_same_bytes(kind: Any, values: Any) -> None:
    assert kind(values).encoded == kind(values.tolist()).encoded


def test_statements_are_sent_without_comments() -> None:
    assert len(statements()) > 50
    assert not any(b"--" in text for text in statements().values())

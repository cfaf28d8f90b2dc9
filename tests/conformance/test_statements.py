"""Every named statement is used, says what zero rows mean, and PREPAREs on a freshly migrated database."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest

from millpy.embedded import EmbeddedPostgres
from millpy.store.postgres.arrays import Bigints, Booleans, Byteas, Jsonbs, PgArray, Texts, Timestamps
from millpy.store.postgres.statements import statements
from tests.databases import fresh_database

PACKAGE = Path(__file__).resolve().parents[2] / "millpy"
NAMED = re.compile(rb"%\((\w+)\)s")
# What the client sends as arrays of other types than bigint[]; scalars are inferred.
TEXTS = (
    "documents records ends checksums streams computations consumer_names keys reasons details tracebacks positions "
    "partitions kinds wires namespaces subkeys paths counters"
).split()
BYTEAS = ("payloads", "ids", "times")
OF_OUTBOXES: Mapping[str, Mapping[str, type[PgArray]]] = {
    "record_delivered": {
        "refused_in": Bigints, "positions": Bigints, "records": Byteas, "checksums": Bigints, "whys": Texts,
        "accepted_in": Bigints, "accepted": Bigints,
    },
    "settle_refused": {"positions": Bigints},
}  # fmt: skip


def type_oid(name: str, statement: str) -> int:
    """The type that the client declares for a parameter; 0 lets the server infer it."""
    if name == "graph_version" and statement == "hold_grants":
        return 0
    if name == "starts":
        return Timestamps.array_oid
    if name == "details" and statement == "append_events":
        return Jsonbs.array_oid
    if statement == "register_worker" or name in ("slots", "key_fields", "names", "types"):
        return 0
    if statement == "append_archive_files" and name == "partitions":
        return Jsonbs.array_oid
    if statement in ("renew_lease", "replace_file", "report_lookup_table"):  # one row: every parameter is a scalar
        return 0
    if name == "retracts":
        return Booleans.array_oid
    if name in OF_OUTBOXES.get(statement, {}):
        return OF_OUTBOXES[statement][name].array_oid
    if name in BYTEAS:
        return Byteas.array_oid
    if name in TEXTS:
        return Texts.array_oid
    return Bigints.array_oid if name.endswith("s") and name not in SINGULAR else 0


SINGULAR = (
    "ttl_s",
    "epoch_s",
    "epoch_bytes",
    "bytes_max",
    "piece_bytes",
    "segments_max",
    "state_rows_max",
    "now_us",
    "kept_s",
    "after_s",
    "settled_kept_s",
    "settled_s",
    "allowed_lateness_us",
    "before_us",
    "longer_us",
    "retention_us",
    "partition_us",
    "accumulators",
)


@pytest.fixture(scope="module")
def migrated(postgres: EmbeddedPostgres) -> Iterator[psycopg.Connection[Any]]:
    """A connection to a database that no test changes."""
    with fresh_database(postgres) as name, psycopg.connect(postgres.url(name), autocommit=True) as connection:
        yield connection


@pytest.mark.parametrize("name", sorted(name for name, text in statements().items() if not text.startswith(b"LOCK")))
def test_statement_prepares(name: str, migrated: psycopg.Connection[Any]) -> None:
    places: dict[str, bytes] = {}
    numbered = NAMED.sub(
        lambda found: places.setdefault(found[1].decode(), b"$%d" % (len(places) + 1)), statements()[name]
    )

    result = migrated.pgconn.prepare(b"", numbered, [type_oid(parameter, name) for parameter in places])

    assert result.error_message.decode() == ""


def package_source() -> str:
    """All Python of the package: the store, the doctor and the readers of `millpy.admin` name statements."""
    return "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))


def test_every_statement_is_used() -> None:
    code = package_source()

    assert [name for name in statements() if f'statement("{name}")' not in code] == []


def test_every_statement_used_exists() -> None:
    code = package_source()

    assert sorted(set(re.findall(r'statement\("(\w+)"\)', code)) - set(statements())) == []

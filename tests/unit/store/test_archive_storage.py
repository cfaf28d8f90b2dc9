"""A directory and an object store do the same for an archive, and say what is wrong with them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millpy.errors import ArchiveUnavailableError, MillError, UsageError
from millpy.store.archive import object_storage
from millpy.store.archive.storage import OWNER, claim_place, parquet_file, parquet_metadata, storage_at
from tests.s3_server import KEY, SECRET, S3Server

PENDING, FINAL = "plant/readings/.pending/hour=1970-01-01T00,a.parquet", "plant/readings/hour=1970-01-01T00/a.parquet"


def parquet(rows: int, metadata: int) -> pa.Buffer:
    sink, table = pa.BufferOutputStream(), pa.table({"n": range(rows)})
    with pq.ParquetWriter(sink, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"millpy": "x" * metadata})
    return sink.getvalue()


@pytest.mark.parametrize("kind", ["directory", "file URL", "object store"])
def test_file_appears_whole_moves_once_and_is_found_by_both_of_its_names(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    places: dict[str, Callable[[], str]] = {
        "directory": lambda: str(tmp_path / "a b"),
        "file URL": (tmp_path / "a b").as_uri,
        "object store": lambda: request.getfixturevalue("bucket") + "/pre/fix/",
    }
    storage = storage_at(places[kind]())

    assert (storage.list_files("plant"), storage.exists(PENDING)) == ([], False)
    storage.create(PENDING, parquet(100, metadata=200_000))
    assert storage.list_files("plant/readings/.pending") == storage.list_files("") == [PENDING]
    found = storage.full_name(PENDING)
    storage.move(PENDING, FINAL)
    storage.move(PENDING, FINAL)
    assert storage.list_files("plant") == [FINAL]
    for name in (found, storage.full_name(FINAL)):
        assert parquet_file(name).read()["n"].to_pylist() == list(range(100))
        assert parquet_metadata(name).num_rows == 100
    storage.create(PENDING, parquet(1, metadata=1))  # an archiver that died between the copy and its delete
    storage.move(PENDING, FINAL)
    assert storage.list_files("") == [FINAL]
    assert parquet_metadata(storage.full_name(FINAL)).num_rows == 1
    for _ in range(2):
        storage.delete(FINAL)
    assert not list(tmp_path.rglob("hour=*")), "an empty folder"
    with pytest.raises(FileNotFoundError):
        parquet_file(found)
    with pytest.raises(ArchiveUnavailableError):
        storage.move(PENDING, FINAL)
    assert storage.list_files("") == []


@pytest.mark.parametrize("kind", ["directory", "object store"])
def test_place_belongs_to_the_database_that_came_first(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place = str(tmp_path) if kind == "directory" else request.getfixturevalue("bucket")
    for _ in range(2):
        claim_place(place, "7/1")

    with pytest.raises(UsageError, match="has the archives of another database") as error:
        claim_place(place, "7/2")

    assert OWNER in error.value.hint
    assert storage_at(place).list_files("") == [OWNER]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (f"s3://{KEY}:{SECRET}@bucket/x", "has more than a bucket and a prefix"),
        (f"abfs://{KEY}:{SECRET.partition('/')[0]}@account/x", "has more than a bucket and a prefix"),
        ("s3://bucket/x?region=eu", "has more than a bucket and a prefix"),
        ("s3://", "is no place for an archive"),
        ("memory://plant/x", "is no place for an archive"),
        ("simplecache::s3://bucket/x", "is no place for an archive"),
        ("ship://bucket", "Protocol not known: ship"),
        ("gs://bucket", "an archive at gs:// needs a package that is not installed: .*gcsfs"),
    ],
)
def test_url_of_no_object_store_is_refused_without_its_secrets(url: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as error:
        storage_at(url)

    assert SECRET not in error.value.message + error.value.hint


def test_store_that_is_away_or_frozen_is_an_error_within_a_bound_and_loses_nothing(
    s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = storage_at(bucket)
    storage.create(PENDING, parquet(1, metadata=1))
    monkeypatch.setattr(object_storage, "REQUEST_S_MAX", 1.0)

    def refused(reason: str) -> None:
        started = time.monotonic()
        with pytest.raises(ArchiveUnavailableError, match=reason) as error:
            storage.move(PENDING, FINAL)
        assert time.monotonic() - started < 10
        assert not isinstance(error.value, UsageError)
        assert SECRET not in str(error.value)

    s3.freeze()
    try:
        refused("FSTimeoutError")
    finally:
        s3.thaw()
    storage.move(PENDING, FINAL)
    assert storage.list_files("") == [FINAL]
    with pytest.raises(MillError, match="does not exist"):
        storage_at(f"{bucket}-of-nobody").create(PENDING, parquet(1, metadata=1))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setitem(object_storage._OPTIONS["s3"], "skip_instance_cache", True)
    storage = storage_at(bucket)
    refused("Could not connect|FSTimeoutError")


def test_a_folder_that_empties_loses_no_file_that_is_published_at_that_moment(tmp_path: Path) -> None:
    storage, content = storage_at(str(tmp_path)), pa.py_buffer(b"x")

    def publish_and_delete(name: str) -> int:
        for number in range(300):
            pending, final = (path.replace("a.parquet", f"{name}{number}.parquet") for path in (PENDING, FINAL))
            storage.create(pending, content)
            storage.move(pending, final)
            assert storage.exists(final)
            assert all(path.endswith(".parquet") for path in storage.list_files("plant"))
            storage.delete(final)
        return 1

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(publish_and_delete, "abcd")) == 4
    assert storage.list_files("plant") == []

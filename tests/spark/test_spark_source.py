"""The Spark data source over a real server and a real Spark: same rows as SQL, each once, also while they change."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import Row, SparkSession

from millpy.embedded import EmbeddedPostgres
from millpy.errors import ConfigError, StoreUnavailableError
from millpy.spark import read_table, session
from millpy.spark.java import java_home
from millpy.spark.pieces import Bounds, plan, read
from millpy.spark.tables import Condition, describe

ROWS = 30_000
EVERYTHING: Bounds = (None, None)
TABLE = """
CREATE SCHEMA plant;
CREATE TABLE plant.hourly (
    device text, window_start timestamptz, window_end timestamptz, n bigint NOT NULL, mean double precision, ok boolean,
    raw bytea, extra jsonb, PRIMARY KEY (device, window_start, window_end));
INSERT INTO plant.hourly
SELECT 'Gerät-' || i % 300, to_timestamp(i / 300 * 3600), to_timestamp(i / 300 * 3600 + 3600), i,
       CASE WHEN i % 10 > 0 THEN i * 0.5 END, i % 2 = 0, decode(lpad(to_hex(i % 256), 2, '0'), 'hex'),
       jsonb_build_object('i', i)
  FROM generate_series(0, 29999) AS i;
ANALYZE plant.hourly;
CREATE VIEW plant.hourly_status AS SELECT * FROM plant.hourly;
CREATE TABLE plant.none (a bigint PRIMARY KEY);
"""


@pytest.fixture(scope="module")
def url(postgres: EmbeddedPostgres) -> str:
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute("DROP DATABASE IF EXISTS spark WITH (FORCE)")
        connection.execute("CREATE DATABASE spark")
    with psycopg.connect(postgres.url("spark"), autocommit=True) as connection:
        connection.execute(TABLE)
    return postgres.url("spark")


def test_every_row_is_read_once_with_its_values_and_types(spark: SparkSession, url: str) -> None:
    frame = read_table(spark, "plant.hourly", partitions=3, database_url=url)
    with psycopg.connect(url) as connection:
        expected = connection.execute(
            "SELECT count(*), sum(n)::bigint, sum(mean), count(mean), count(*) FILTER (WHERE ok) FROM plant.hourly"
        ).fetchone()

    found = frame.selectExpr("count(*)", "sum(n)", "sum(mean)", "count(mean)", "count_if(ok)").collect()
    (one,) = frame.where("device = 'Gerät-7' and n = 7").collect()

    assert [tuple(row) for row in found] == [expected]
    assert frame.rdd.getNumPartitions() == 3
    assert dict(frame.dtypes)["window_start"] == "timestamp"
    assert one == Row(
        device="Gerät-7",
        window_start=dt.datetime(1970, 1, 1, tzinfo=dt.UTC).replace(tzinfo=None),
        window_end=dt.datetime(1970, 1, 1, 1, tzinfo=dt.UTC).replace(tzinfo=None),
        n=7,
        mean=3.5,
        ok=False,
        raw=b"\x07",
        extra='{"i": 7}',
    )


START = dt.datetime(1970, 1, 3, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("options", "condition"),
    [
        ({"start": START, "end": START + dt.timedelta(hours=5)},
         "window_start >= '1970-01-03Z' AND window_start < '1970-01-03 05:00Z'"),
        ({"keys": {"device": ["Gerät-1", "Gerät-2"]}}, "device IN ('Gerät-1', 'Gerät-2')"),
        ({"keys": {"device": []}}, "false"),
    ],
)  # fmt: skip
def test_the_database_answers_for_keys_and_times(
    spark: SparkSession, url: str, options: dict[str, Any], condition: str
) -> None:
    found = read_table(spark, "plant.hourly", database_url=url, **options).selectExpr("count(*)", "sum(n)").collect()
    with psycopg.connect(url) as connection:
        expected = connection.execute(
            f"SELECT count(*), sum(n)::bigint FROM plant.hourly WHERE {condition}"  # type: ignore[arg-type]
        ).fetchone()

    assert [tuple(row) for row in found] == [expected]


def test_a_filter_of_one_query_is_not_kept_for_the_next(spark: SparkSession, url: str) -> None:
    frame = read_table(spark, "plant.hourly", database_url=url)

    assert frame.where("n = 5").count() == 1
    assert frame.count() == ROWS
    assert frame.where("n = 5").union(frame.where("n in (6, 7)")).count() == 3


def test_only_the_requested_columns_are_read(spark: SparkSession, url: str) -> None:
    frame = read_table(spark, "plant.hourly", columns=["n", "device"], database_url=url)

    assert frame.columns == ["n", "device"]
    assert frame.selectExpr("sum(n)").first() == Row(ROWS * (ROWS - 1) // 2)
    assert read_table(spark, "plant.none", database_url=url).count() == 0


@pytest.mark.parametrize("planned", [True, False], ids=["in pieces as planned", "in one that is too large"])
def test_a_row_that_moves_during_the_read_is_read_once(url: str, planned: bool) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS plant.moving")
        connection.execute("CREATE TABLE plant.moving (LIKE plant.hourly INCLUDING ALL)")
        connection.execute("INSERT INTO plant.moving TABLE plant.hourly")
    table = describe(url, "plant", "moving")
    schema = table.arrow_schema(["device", "n"])
    found: list[int] = []
    (bounds,) = plan(url, table, ["device", "n"], (), partitions=1, batch_rows=2_000) if planned else [EVERYTHING]
    with psycopg.connect(url, autocommit=True) as connection:
        pieces = read(url, table, schema, (), bounds, batch_rows=2_000)
        for number, piece in enumerate(pieces):
            found += piece.column("n").to_pylist()
            # Every row gets a new version elsewhere on disk: read ones behind the reader, others before it.
            connection.execute(
                "UPDATE plant.moving SET extra = %s WHERE n %% 5 = %s", (f'{{"at": {number}}}', number % 5)
            )
            if number % 5 == 4:
                connection.execute("VACUUM plant.moving")

    assert sorted(found) == list(range(ROWS))


def test_ranges_cover_every_key_and_cut_about_evenly(url: str) -> None:
    table = describe(url, "plant", "hourly")
    schema = table.arrow_schema(["n"])
    counts = []
    for bounds in plan(url, table, ["n"], (), partitions=4, batch_rows=2_000):
        counts.append([len(piece) for piece in read(url, table, schema, (), bounds, batch_rows=2_000)])

    assert [len(pieces) for pieces in counts] == [4, 4, 4, 4]
    assert sum(map(sum, counts)) == ROWS
    assert max(map(sum, counts)) < ROWS / 2


def test_no_statement_holds_a_snapshot_for_long(url: str) -> None:
    table = describe(url, "plant", "hourly")
    pieces = read(url, table, table.arrow_schema(["n"]), (), EVERYTHING, batch_rows=100)
    next(pieces)
    with psycopg.connect(url) as connection:
        (held,) = connection.execute(  # type: ignore[misc]
            "SELECT count(*) FROM pg_stat_activity WHERE datname = 'spark'"
            " AND (backend_xmin IS NOT NULL OR state <> 'idle') AND pid <> pg_backend_pid()"
            " AND backend_type = 'client backend'"
        ).fetchone()

    assert held == 0
    pieces.close()  # type: ignore[attr-defined]


SLOW = """
CREATE TABLE plant.quick AS SELECT i::bigint FROM generate_series(1, 1200) AS i;
ALTER TABLE plant.quick ADD PRIMARY KEY (i);
CREATE FUNCTION plant.sleep(bigint) RETURNS text STABLE COST 100000 LANGUAGE sql AS 'SELECT pg_sleep(0.001)::text';
CREATE VIEW plant.slow AS SELECT i, plant.sleep(i) AS s FROM plant.quick;
CREATE FUNCTION plant.schlaf(bigint) RETURNS text STABLE COST 100000 LANGUAGE plpgsql AS $$
BEGIN
    RETURN pg_sleep(0.001)::text;
EXCEPTION WHEN query_canceled THEN
    RAISE EXCEPTION 'storniere Anfrage wegen Zeitüberschreitung der Anfrage' USING ERRCODE = '57014';
END $$;
CREATE VIEW plant.langsam AS SELECT i, plant.schlaf(i) AS s FROM plant.quick;
"""


@pytest.fixture(scope="module")
def with_slow_views(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(SLOW)


@pytest.mark.usefixtures("with_slow_views")
@pytest.mark.parametrize("name", ["slow", "langsam"], ids=["in English", "in German"])
def test_a_piece_that_takes_too_long_is_read_again_with_fewer_rows(url: str, name: str) -> None:
    table = describe(url, "plant", name, ["i"])
    schema = table.arrow_schema(["i", "s"])

    pieces = list(read(url, table, schema, (), EVERYTHING, batch_rows=1_000, piece_s_max=0.8))

    assert [i for piece in pieces for i in piece.column("i").to_pylist()] == list(range(1, 1_201))
    assert max(map(len, pieces)) < 1_000
    with pytest.raises(StoreUnavailableError, match="takes too long"):
        list(read(url, table, schema, (), EVERYTHING, batch_rows=1_000, piece_s_max=0.01))


GUARDED = """
CREATE TABLE plant.guarded AS SELECT i::bigint AS k FROM generate_series(1, 60000) AS i;
ALTER TABLE plant.guarded ADD PRIMARY KEY (k);
ALTER TABLE plant.guarded ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
CREATE FUNCTION plant.nap(bigint) RETURNS text STABLE LANGUAGE sql AS 'SELECT pg_sleep(0.0002)::text';
CREATE POLICY slowly ON plant.guarded USING (plant.nap(k) IS NOT NULL);
CREATE FUNCTION plant.sleep() RETURNS text STABLE LANGUAGE sql AS 'SELECT pg_sleep(60)::text';
CREATE ROLE guarded LOGIN;
GRANT USAGE ON SCHEMA plant TO guarded;
GRANT SELECT ON plant.guarded TO guarded;
ANALYZE plant.guarded;
"""


@pytest.mark.usefixtures("with_slow_views")
def test_a_slow_sample_is_repeated_with_fewer_blocks(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(GUARDED)
    guarded = url.replace("//millpy@", "//guarded@")
    table = describe(guarded, "plant", "guarded")

    some = plan(guarded, table, ["k"], (), partitions=3, batch_rows=50_000, sample_s_max=1.5)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("ALTER POLICY slowly ON plant.guarded USING (plant.sleep() IS NOT NULL)")
    none = plan(guarded, table, ["k"], (), partitions=3, batch_rows=50_000, sample_s_max=0.5)

    assert len(some) == 3
    assert none == [EVERYTHING]


def test_quotes_and_backslashes_in_keys_are_only_text(url: str) -> None:
    odd = ["a'b", "a\\", "'; DROP TABLE plant.odd; --", 'x"y', "ü"]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE plant.odd (k text PRIMARY KEY)")
        connection.cursor().executemany("INSERT INTO plant.odd VALUES (%s)", [(k,) for k in odd])
    table = describe(url, "plant", "odd")
    schema = table.arrow_schema(["k"])

    pieces = read(url, table, schema, (), EVERYTHING, batch_rows=1)
    found = [k for piece in pieces for k in piece.column("k").to_pylist()]
    one = [Condition("k", "= ANY", (odd[2],))]
    (only,) = read(url, table, schema, one, EVERYTHING, batch_rows=10)

    assert sorted(found) == sorted(odd)
    assert only.column("k").to_pylist() == [odd[2]]


@pytest.mark.parametrize(
    ("schema", "name", "message", "hint"),
    [
        ("plant", "daily", "no table plant.daily", "hourly, "),
        ("nowhere", "daily", "no table nowhere.daily", "none"),
        ("plant", "hourly_status", "no primary key", "read plant.hourly"),
    ],
)
def test_error_for_an_unreadable_table_names_readable_ones(
    url: str, schema: str, name: str, message: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        describe(url, schema, name)

    assert hint in raised.value.hint


def test_an_unknown_column_and_a_wrong_option_are_named(spark: SparkSession, url: str) -> None:
    with pytest.raises(AnalysisException, match="no column 'nix'"):
        read_table(spark, "plant.hourly", columns=["nix"], database_url=url)
    with pytest.raises(AnalysisException, match="without a zone"):
        spark.read.format("millpy").options(url=url, table="plant.hourly", **{"from": "2026-11-21T00:00:00"}).load()
    with pytest.raises(AnalysisException, match="option keys"):
        spark.read.format("millpy").options(url=url, table="plant.hourly", keys="device=a").load()
    with pytest.raises(AnalysisException, match="option partitions is 'many'"):
        spark.read.format("millpy").options(url=url, table="plant.hourly", partitions="many").load()


def test_a_misspelt_option_is_refused_with_the_right_name(spark: SparkSession, url: str) -> None:
    reader = spark.read.format("millpy").options(url=url, table="plant.hourly", Keys='{"device": ["Gerät-1"]}')

    assert reader.load().count() == 100  # Spark's options are of any case
    with pytest.raises(AnalysisException, match=r"(?s)no option 'columnz'.*did you mean columns\?"):
        spark.read.format("millpy").options(url=url, table="plant.hourly", columnz="n").load()
    with pytest.raises(AnalysisException, match=r"(?s)no option 'where'.*there are: table, path, url"):
        spark.read.format("millpy").options(url=url, table="plant.hourly", where="n = 1").load()


def test_the_embedded_database_is_read_by_the_file_of_its_graph(
    spark: SparkSession, postgres: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".millpy").mkdir()
    (tmp_path / ".millpy" / "postgres").symlink_to(postgres.directory)
    graph = tmp_path / "plant.py"
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute("CREATE TABLE public.embedded AS SELECT i::bigint AS k FROM generate_series(1, 7) AS i")
        connection.execute("ALTER TABLE public.embedded ADD PRIMARY KEY (k)")
        monkeypatch.setenv("MILLPY_DATABASE_URL", "postgresql://nowhere.invalid/other")
        assert read_table(spark, "public.embedded", graph=graph).selectExpr("sum(k)").first() == Row(28)
        connection.execute("DROP TABLE public.embedded")
    reader = spark.read.format("millpy").option("graph", str(graph))

    with pytest.raises(AnalysisException, match=r"there is no embedded database in .*elsewhere"):
        reader.option("graph", str(tmp_path / "elsewhere" / "plant.py")).load("public.embedded")
    with pytest.raises(AnalysisException, match="name two databases"):
        reader.option("url", postgres.url()).load("public.embedded")


def test_a_view_is_read_by_the_key_that_is_named(spark: SparkSession, url: str) -> None:
    frame = read_table(spark, "plant.hourly_status", key=["device", "window_start"], columns=["n"], database_url=url)

    assert frame.selectExpr("count(*)", "sum(n)").first() == Row(ROWS, ROWS * (ROWS - 1) // 2)
    with pytest.raises(ConfigError, match="no column 'nix'"):
        describe(url, "plant", "hourly_status", ["nix"])


def test_a_second_session_reads_from_its_own_database(
    spark: SparkSession, url: str, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MILLPY_DATABASE_URL", "JAVA_HOME"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # so that it is as before afterwards
    session(database_url=database_url)
    with pytest.raises(AnalysisException, match=r"there is no table plant\.hourly"):
        read_table(spark, "plant.hourly")
    session(database_url=url)

    assert read_table(spark, "plant.hourly").count() == ROWS
    assert spark.read.format("millpy").option("table", "plant.hourly").load().count() == ROWS
    session(database_url=database_url)
    with pytest.raises(AnalysisException, match=r"there is no table plant\.hourly"):
        spark.read.format("millpy").load("plant.hourly")


def test_no_plan_and_no_error_contains_a_password(spark: SparkSession, url: str) -> None:
    with_password = url.replace("//millpy@", "//millpy:geheim@")
    assert "geheim" in with_password
    frame = read_table(spark, "plant.hourly", database_url=with_password).where("n > 3")

    assert "millpy" in (plan := frame._jdf.queryExecution().toString())
    assert "geheim" not in plan
    with pytest.raises(AnalysisException, match="does not answer") as raised:
        read_table(spark, "plant.hourly", database_url=with_password.replace("host=/", "host=/nowhere/"))
    assert "geheim" not in str(raised.value)


def test_an_unsuitable_java_is_replaced_by_the_one_in_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(java.parent))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    found = java_home() / "bin" / "java"
    done = subprocess.run(
        ["/bin/sh", found, "--add-modules=jdk.incubator.vector", "-version"], capture_output=True, text=True, check=True
    )

    assert found.is_relative_to(tmp_path)
    assert 'version "21' in done.stderr


def test_a_foreign_directory_is_not_used_as_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"millpy-java-{os.getuid()}").symlink_to(elsewhere)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    with pytest.raises(ConfigError, match="belongs to another user") as raised:
        java_home()

    assert "TMPDIR" in raised.value.hint
    assert [*elsewhere.iterdir()] == []


def test_without_any_java_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)

    with pytest.raises(ConfigError, match="there is no Java") as raised:
        java_home()

    assert "[spark]" in raised.value.hint

"""A changed graph beside the old one, and the switch: under running workers, with one frozen, killed in the middle."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from millpy.admin.queries import Row
from millpy.admin.results import written_since
from millpy.errors import GraphError
from millpy.graph import Graph
from millpy.hosting.failpoints import Failpoint
from tests.commands import millpy as run
from tests.crash.graph_files import DEVICES, END, GRAPH, MIDDLE, done, drop, forgotten, one, rows, sums
from tests.crash.harness import Worker, await_true
from tests.forked import fork_millpy

NEXT = (
    GRAPH.replace('Graph("factory")', 'Graph("factory", generation=2)')
    .replace("minutes(1)", "minutes(2)")
    .replace('total=Sum("value")', 'total=Sum("value"), high=Max("value")')
)
RESULTS = (
    "SELECT device, n, total::int8 FROM {}.minutes WHERE window_start < to_timestamp(240) ORDER BY window_start, 1"
)
HAVING = """
SELECT c.relname FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid
 WHERE c.relnamespace = 'mill'::regnamespace AND c.relkind = 'r' AND NOT c.relispartition AND a.attname = '{}'
"""
EVERY_MINUTE = [row for start in range(0, END, 60) for row in sums(start, start + 60)]
EVERY_TWO = [row for start in range(0, END, 120) for row in sums(start, start + 120)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with two generations of one graph on disk, and a feed."""
    (tmp_path / "feed").mkdir()
    (tmp_path / "old.py").write_text(GRAPH)
    (tmp_path / "new.py").write_text(NEXT)
    monkeypatch.chdir(tmp_path)  # where commands of this process look for the feed, too
    return tmp_path


def consumed(url: str, name: str, count: int) -> Callable[[], bool]:
    """Wait for a number of records, until every stage knows the progress of their source."""
    watermarks = (
        "SELECT count(DISTINCT low_watermark) FROM mill.intervals JOIN mill.computations AS c USING (computation_id)"
        f" JOIN mill.graphs AS g ON g.graph_id = c.graph_id WHERE g.name = '{name}'"
    )
    query = f"SELECT coalesce(sum(consumed), 0) FROM millpy.accounting WHERE graph = '{name}' AND consumer IS NOT NULL"
    deployed = f"SELECT count(*) FROM mill.graphs WHERE name = '{name}'"
    return lambda: one(url, deployed) == 1 and one(url, query) == count and one(url, watermarks) == 1


def did(url: str, *arguments: str) -> str:
    """Run a command that must succeed; return its output."""
    return run(*arguments, "--database", url)


def refused(url: str, *arguments: str, status: int = 2) -> str:
    """Return the output of a refused command: one line with the reason and one with the hint."""
    said = run(*arguments, "--database", url, status=status)
    assert said.count("\n") == 2, said
    return said


def both_deployed(url: str) -> None:
    for file in ("old.py", "new.py"):
        did(url, "deploy", file)


def test_switch_under_running_workers_loses_and_doubles_nothing(place: Path, database_url: str) -> None:
    drop(place, 0, MIDDLE)
    with Worker(place, database_url, place, graph=place / "old.py") as old:
        old.await_while_running(consumed(database_url, "factory", MIDDLE * DEVICES), "the first part")
        with Worker(place, database_url, place, graph=place / "new.py") as new:
            new.await_while_running(
                consumed(database_url, "factory_2", MIDDLE * DEVICES), "it starts from the beginning"
            )
            drop(place, MIDDLE, 150)
            out = did(database_url, "switch", "factory", "2", "--anyway")
            assert "generation 2 of graph factory is the current one" in out
            drop(place, 150, END)
            drop(place, 1_000, 1_001)
            new.await_while_running(consumed(database_url, "factory", (END + 1) * DEVICES), "all of it")
            old.await_while_running(
                consumed(database_url, "factory_1", (END + 1) * DEVICES), "the old one runs on, too"
            )

    assert rows(database_url, RESULTS.format("factory")) == EVERY_TWO
    assert rows(database_url, RESULTS.format("factory_1")) == EVERY_MINUTE
    assert forgotten(database_url, "factory.minutes") == forgotten(database_url, "factory_1.minutes") == []
    assert rows(database_url, "SELECT DISTINCT is_final FROM factory.minutes_status WHERE n = 120") == [(True,)]
    assert one(database_url, "SELECT count(*) FROM pg_namespace WHERE nspname = 'factory_2'") == 0
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []
    reported = rows(database_url, "SELECT graph, detail FROM millpy.events WHERE kind = 'switched' ORDER BY 1")
    noted = {"from": 1, "to": 2, "by": "millpy"}
    assert reported == [("factory", noted), ("factory_1", noted)]


@pytest.mark.parametrize("point", [Failpoint.BEFORE_COMMIT, Failpoint.AFTER_FENCE])
def test_worker_that_was_frozen_during_the_switch_writes_nothing_into_the_table_of_another(
    place: Path, database_url: str, point: Failpoint
) -> None:
    both_deployed(database_url)
    drop(place, 0, END)
    drop(place, 1_000, 1_001)
    with Worker(place, database_url, place, graph=place / "old.py", failpoint=f"{point}:3:stop") as old:
        old.await_frozen()
        did(database_url, "switch", "factory", "2", "--anyway")
        with Worker(place, database_url, place, graph=place / "new.py") as new:
            new.await_while_running(consumed(database_url, "factory", (END + 1) * DEVICES), "all of it")
            old.thaw()
            old.await_while_running(consumed(database_url, "factory_1", (END + 1) * DEVICES), "all of it, in its place")

    assert rows(database_url, RESULTS.format("factory")) == EVERY_TWO
    assert rows(database_url, RESULTS.format("factory_1")) == EVERY_MINUTE
    assert forgotten(database_url, "factory.minutes") == forgotten(database_url, "factory_1.minutes") == []
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []


def test_switch_that_is_killed_changes_nothing(place: Path, database_url: str) -> None:
    both_deployed(database_url)
    before = rows(database_url, "SELECT name, generation, version FROM mill.graphs ORDER BY 1")
    with psycopg.connect(database_url) as reader:
        reader.execute("SELECT * FROM factory.minutes")  # its table cannot be moved until this has ended
        killed = fork_millpy(place, "switch", "factory", "2", "--database", database_url)
        waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'ALTER TABLE%'"
        await_true(lambda: one(database_url, waits + " AND wait_event_type = 'Lock'") == 1, "it is in the middle")
        killed.kill()
        done(killed)
    await_true(lambda: one(database_url, waits) == 0, "the server has noticed")

    assert rows(database_url, "SELECT name, generation, version FROM mill.graphs ORDER BY 1") == before
    assert "nothing of yours depends on them" in did(database_url, "switch", "factory", "2")
    did(database_url, "switch", "factory", "1")
    assert rows(database_url, "SELECT name, generation FROM mill.graphs ORDER BY 1") == [
        ("factory", 1),
        ("factory_2", 2),
    ]
    assert "is already the current one" in did(database_url, "switch", "factory", "1")


def test_switch_to_a_generation_that_has_not_caught_up_is_refused(place: Path, database_url: str) -> None:
    drop(place, 0, END)
    both_deployed(database_url)
    with Worker(place, database_url, place, graph=place / "old.py") as old:
        old.await_while_running(consumed(database_url, "factory", END * DEVICES), "the feed")

    assert "generation 2 has no watermark yet" in refused(database_url, "switch", "factory", "2")
    assert "no generation 3" in refused(database_url, "switch", "factory", "3")
    assert "there are: 1 (current), 2" in refused(database_url, "switch", "factory", "3")
    assert "no graph 'mill' is deployed" in refused(database_url, "switch", "mill", "1")
    assert "hint: millpy switch factory 2" in refused(database_url, "switch", "factory_2", "2")
    (place / "new.py").write_text(NEXT.replace("sorted=True", "max_disorder=timedelta(seconds=100)"))
    did(database_url, "deploy", "new.py")
    with Worker(place, database_url, place, graph=place / "new.py") as new:
        new.await_while_running(consumed(database_url, "factory_2", END * DEVICES), "the feed")
    assert "generation 2 is 100 s behind generation 1" in refused(database_url, "switch", "factory", "2")
    did(database_url, "switch", "factory", "2", "--anyway", "--dry-run")
    assert one(database_url, "SELECT generation FROM mill.graphs WHERE name = 'factory'") == 1
    did(database_url, "switch", "factory", "2", "--anyway")


def test_new_generation_gives_no_role_more_rights(place: Path, database_url: str) -> None:
    did(database_url, "migrate", "--roles")
    did(database_url, "deploy", "old.py")
    with psycopg.connect(database_url, autocommit=True) as connection:
        for statement in (
            "REVOKE SELECT ON factory.minutes, factory.minutes_history FROM millpy_reader",
            "GRANT SELECT (device, n) ON factory.minutes TO millpy_reader",
            "ALTER TABLE factory.minutes ENABLE ROW LEVEL SECURITY",
            "CREATE POLICY \"one's\" ON factory.minutes FOR SELECT TO millpy_reader USING (device = 'd1' OR n < 0)",
            "CREATE INDEX by_size ON factory.minutes (n)",
            "CREATE VIEW public.mine AS SELECT device, n FROM factory.minutes",
        ):
            connection.execute(statement)
    did(database_url, "deploy", "new.py")

    asked = "SELECT has_column_privilege('millpy_reader', '{}.minutes', '{}', 'SELECT')"
    for schema in ("factory", "factory_2"):
        assert [one(database_url, asked.format(schema, column)) for column in ("n", "total")] == [True, False]
        assert one(database_url, f"SELECT has_table_privilege('millpy_worker', '{schema}.minutes', 'INSERT')")
    assert not one(database_url, asked.format("factory_2", "high"))
    assert not one(database_url, "SELECT has_table_privilege('millpy_reader', 'factory_2.minutes_history', 'SELECT')")
    policies = "SELECT tablename, policyname, roles, cmd, qual FROM pg_policies WHERE schemaname = '{}' ORDER BY 1, 2"
    found = rows(database_url, policies.format("factory"))
    assert len(found) == 3
    assert rows(database_url, policies.format("factory_2")) == found
    secured = "SELECT relrowsecurity FROM pg_class WHERE oid = 'factory_2.minutes'::regclass"
    assert one(database_url, secured)

    rows_changed = "GRANT SELECT (total) ON factory.minutes TO millpy_reader"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(rows_changed)
    complaint = refused(database_url, "switch", "factory", "2")
    assert "millpy_reader may SELECT column 'total'" in complaint
    assert "--rights" in complaint
    out = did(database_url, "switch", "factory", "2", "--rights", "current")
    assert "view public.mine still reads it" in out
    assert "index by_size of table minutes stays with it" in out
    assert one(database_url, asked.format("factory", "total"))
    assert not one(database_url, asked.format("factory", "high"))
    assert one(database_url, "SELECT has_schema_privilege('millpy_reader', 'factory_1', 'USAGE')")


def test_workers_can_write_to_a_generation_beside_one_without_tables(place: Path, database_url: str) -> None:
    did(database_url, "migrate", "--roles")
    without = GRAPH.replace("FixedWindows(minutes(1))", 'FixedWindows(minutes(1)), name="sums"')
    (place / "old.py").write_text(without.replace('.to_table("minutes", history=True)', ""))
    both_deployed(database_url)
    usage = "SELECT has_schema_privilege('{}', '{}', 'USAGE')"
    assert one(database_url, usage.format("millpy_worker", "factory_2"))

    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("REVOKE USAGE ON SCHEMA factory_2 FROM millpy_reader")
    did(database_url, "switch", "factory", "2", "--rights", "current")
    assert one(database_url, usage.format("millpy_worker", "factory"))
    assert not one(database_url, usage.format("millpy_reader", "factory")), "nobody sees more"


def test_generations_are_switched_and_dropped_in_schemas_made_by_an_administrator(
    place: Path, database_url: str
) -> None:
    did(database_url, "migrate", "--roles")
    schemas = ("factory", "factory_1", "factory_2")
    with psycopg.connect(database_url, autocommit=True) as connection:
        for schema in schemas:
            connection.execute(f"CREATE SCHEMA {schema}")
            connection.execute(f"GRANT ALL ON SCHEMA {schema} TO millpy_owner")
    both_deployed(database_url)
    did(database_url, "switch", "factory", "2")
    did(database_url, "drop", "factory_1", "--yes")

    tables = "SELECT schemaname FROM pg_tables WHERE tablename = 'minutes'"
    assert rows(database_url, tables) == [("factory",)]
    left = "SELECT nspname::text FROM pg_namespace WHERE nspname LIKE 'factory%' ORDER BY 1"
    assert tuple(row[0] for row in rows(database_url, left)) == schemas


def test_row_policy_that_cannot_be_copied_hides_the_rows(place: Path, database_url: str) -> None:
    did(database_url, "deploy", "old.py")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE auditor")
        connection.execute("GRANT USAGE ON SCHEMA factory TO auditor")
        connection.execute("GRANT SELECT ON factory.minutes TO auditor")
        connection.execute("CREATE POLICY few ON factory.minutes TO auditor USING (total < 10)")
        connection.execute("ALTER TABLE factory.minutes ENABLE ROW LEVEL SECURITY")
    (place / "new.py").write_text(NEXT.replace("total=Sum", "amount=Sum"))
    assert "policy 'few'" in did(database_url, "deploy", "new.py")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO factory_2.minutes (device, window_start, window_end, n, pane_index, pane_timing, late_count,"
            " interval_id, bundle) VALUES ('d', now(), now(), 1, 0, 'on_time', 0, 1, 1)"
        )
        connection.execute("SET ROLE auditor")
        assert connection.execute("SELECT device FROM factory_2.minutes").fetchall() == []

    for rights in ((), ("--rights", "current")):
        assert "policy 'few'" in refused(database_url, "switch", "factory", "2", *rights)
    did(database_url, "switch", "factory", "2", "--rights", "new")


def test_dropped_generation_leaves_nothing_and_cannot_be_deployed_again(place: Path, database_url: str) -> None:
    drop(place, 0, END)
    (place / "feed" / "bad.ndjson").write_bytes(b"this is no record\n")
    both_deployed(database_url)
    with Worker(place, database_url, place, graph=place / "old.py") as old:
        old.await_while_running(consumed(database_url, "factory", END * DEVICES), "the feed")
        with Worker(place, database_url, place, graph=place / "new.py") as new:
            new.await_while_running(consumed(database_url, "factory_2", END * DEVICES), "the feed")
            assert "is the current one" in refused(database_url, "drop", "factory", "--yes")
            assert "no graph 'mine'" in refused(database_url, "drop", "mine", "--yes")
            did(database_url, "switch", "factory", "2")
            old.await_while_running(lambda: "starting again" in old.log, "the old one knows")
            live = "SELECT count(*) FROM millpy.workers WHERE graph = 'factory_1' AND live"
            old.await_while_running(lambda: one(database_url, live) == 1, "it is registered again")
            assert "cannot drop graph 'factory_1': live workers run it" in refused(
                database_url, "drop", "factory_1", "--yes"
            )
            old.drain()
            old.await_finished()
            ids = [
                row[0] for row in rows(database_url, "SELECT interval_id FROM mill.places WHERE graph = 'factory_1'")
            ]
            others = rows(database_url, RESULTS.format("factory"))
            with psycopg.connect(database_url, autocommit=True) as connection:
                connection.execute("CREATE VIEW public.mine AS SELECT * FROM factory_1.minutes")
                assert "views read" in refused(database_url, "drop", "factory_1", "--yes")
                connection.execute("DROP VIEW public.mine")
            dropped = json.loads(did(database_url, "drop", "factory_1", "--yes", "--json"))
            assert (dropped["tables"], dropped["dead_letters"]) == (["minutes", "minutes_history"], 1)
            drop(place, 1_000, 1_001)
            new.await_while_running(consumed(database_url, "factory", (END + 1) * DEVICES), "the new one runs on")

    for column in ("interval_id", "consumer", "producer"):
        for (table,) in rows(database_url, HAVING.format(column)):
            left = one(
                database_url, f"SELECT count(*) FROM mill.{table} WHERE {column} IN ({', '.join(map(str, ids))})"
            )
            assert left == 0, table
    assert one(database_url, "SELECT count(*) FROM pg_namespace WHERE nspname = 'factory_1'") == 0
    assert rows(database_url, RESULTS.format("factory"))[: len(others)] == others
    err = refused(database_url, "deploy", "old.py", status=1)
    assert "generation 1 no longer is" in err
    assert "generation=3" in err


def test_worker_that_registers_while_a_drop_begins_is_seen(place: Path, database_url: str) -> None:
    both_deployed(database_url)
    registers = (
        "INSERT INTO mill.workers (worker_id, graph_id, graph_version, computations, host, pid, lease_deadline,"
        " lease_s)"
        " SELECT gen_random_uuid(), graph_id, version, '{}', 'h', 1, now() + interval '1 hour', 3600"
        " FROM mill.graphs WHERE name = 'factory_2'"
    )
    with psycopg.connect(database_url) as worker:
        worker.execute(registers)
        dropping = fork_millpy(place, "drop", "factory_2", "--yes", "--database", database_url)
        await_true(lambda: waiting(database_url) == 1, "the drop waits")
    status, _, err = done(dropping)
    assert (status, "cannot drop graph 'factory_2': live workers run it: 1" in err) == (2, True), err


def test_follower_reports_that_a_table_was_switched(place: Path, database_url: str) -> None:
    both_deployed(database_url)
    with psycopg.connect(database_url, autocommit=True) as connection:  # a name alone is the current one's
        connection.execute(
            "INSERT INTO factory.minutes (device, window_start, window_end, n, pane_index, pane_timing, late_count,"
            " interval_id, bundle) VALUES ('d', now(), now(), 1, 0, 'on_time', 0, 1, 1)"
        )
    assert json.loads(did(database_url, "windows", "--json"))["table"] == "factory.minutes"
    command = [sys.executable, "-m", "millpy", "windows", "minutes", "--follow", "--json", "--database", database_url]
    following = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert following.stdout is not None
    assert json.loads(following.stdout.readline())["device"] == "d"
    did(database_url, "switch", "factory", "2")
    out, err = following.communicate(timeout=60)
    assert (following.returncode, out) == (1, ""), (out, err)
    assert "factory.minutes now belongs to another generation" in err


@pytest.mark.parametrize("change", [("total=", "amount="), ('"minutes"', '"hours"')], ids=["column", "table"])
def test_follower_that_waited_for_a_switch_does_not_query_the_old_table(
    place: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str]
) -> None:
    (place / "new.py").write_text(NEXT.replace(*change))
    both_deployed(database_url)

    def after_a_switch(*asked: Any) -> list[Row]:
        did(database_url, "switch", "factory", "2")
        return written_since(*asked)

    monkeypatch.setattr("millpy.cli.windows.written_since", after_a_switch)
    complaint = refused(database_url, "windows", "factory.minutes", "--follow", status=1)
    assert "factory.minutes now belongs to another generation" in complaint


def test_commit_that_cannot_be_terminated_is_reported_with_its_owner(
    place: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millpy.store.postgres.deployment.live_changes.HEADER_ATTEMPTS", 1)
    both_deployed(database_url)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "WITH w AS (INSERT INTO mill.workers (worker_id, graph_id, graph_version, computations, host, pid,"
            " lease_deadline) SELECT gen_random_uuid(), graph_id, version, '{}', 'mill-7', 4711,"
            " now() - interval '1 minute' FROM mill.graphs WHERE name = 'factory' RETURNING worker_id, graph_id)"
            " UPDATE mill.intervals AS i SET worker_id = w.worker_id FROM w WHERE i.graph_id = w.graph_id"
        )
    with psycopg.connect(database_url) as frozen:
        frozen.execute("SELECT FROM mill.intervals FOR UPDATE")
        complaint = refused(database_url, "switch", "factory", "2", status=1)
    assert "worker 4711 on mill-7 holds it" in complaint


def test_right_granted_by_two_roles_is_copied_once(place: Path, database_url: str) -> None:
    did(database_url, "deploy", "old.py")
    with psycopg.connect(database_url) as connection:
        for statement in (
            "CREATE ROLE first_hand",
            "CREATE ROLE second_hand",
            "GRANT USAGE ON SCHEMA factory TO first_hand, second_hand",
            "GRANT SELECT ON factory.minutes TO second_hand",
            "GRANT SELECT ON factory.minutes TO first_hand WITH GRANT OPTION",
            "SET ROLE first_hand",
            "GRANT SELECT ON factory.minutes TO second_hand WITH GRANT OPTION",
        ):
            connection.execute(statement)
    try:
        did(database_url, "deploy", "new.py")
        did(database_url, "switch", "factory", "2")
    finally:
        with psycopg.connect(database_url) as connection:
            connection.execute("DROP OWNED BY first_hand, second_hand CASCADE")
            connection.execute("DROP ROLE first_hand, second_hand")


@pytest.mark.parametrize("generation", [0, -1, 2**31, "2", True, 2.0, None], ids=repr)
def test_generation_beyond_the_databases_integers_is_refused_with_a_reason(generation: Any) -> None:
    with pytest.raises(GraphError, match=f"invalid generation {generation!r}"):
        Graph("factory", generation=generation)


def waiting(url: str) -> int:
    """Sessions that wait for a lock."""
    asked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return int(one(url, asked))


def test_switch_and_deployment_cannot_give_one_name_to_two_graphs(place: Path, database_url: str) -> None:
    (place / "first.py").write_text(GRAPH.replace('"factory"', '"factory_1"'))
    did(database_url, "deploy", "old.py")
    with psycopg.connect(database_url) as holding:
        holding.execute("LOCK TABLE mill.graphs IN SHARE MODE")  # both look for names, neither can take its own
        files = ("new.py", "first.py")
        both = [fork_millpy(place, "deploy", file, "--database", database_url) for file in files]
        await_true(lambda: waiting(database_url) == 2, "both are at it")
    ended = [done(process) for process in both]
    assert sorted(status for status, _, _ in ended) == [0, 2], ended
    assert sum("is the name of another graph" in err for _, _, err in ended) == 1, ended


def test_switch_lists_what_else_refers_to_the_old_table(place: Path, database_url: str) -> None:
    did(database_url, "deploy", "old.py")
    with psycopg.connect(database_url, autocommit=True) as connection:
        for statement in (
            "CREATE PUBLICATION sent FOR TABLE factory.minutes",
            "CREATE STATISTICS factory.counted ON device, n FROM factory.minutes",
            "CREATE RULE told AS ON DELETE TO factory.minutes DO ALSO NOTIFY told",
            "CREATE FUNCTION public.rows() RETURNS bigint BEGIN ATOMIC SELECT count(*) FROM factory.minutes; END",
            "CREATE TABLE public.alarms (device text, a timestamptz, b timestamptz,"
            " CONSTRAINT known FOREIGN KEY (device, a, b) REFERENCES factory.minutes)",
        ):
            connection.execute(statement)
    did(database_url, "deploy", "new.py")
    out = did(database_url, "switch", "factory", "2", "--dry-run")
    found = (
        "publication sent",
        "statistics counted",
        "rule told",
        "function public.rows()",
        "foreign key known (public.alarms)",
    )
    for words in found:
        assert f"{words} of table minutes stays with it" in out


def test_switch_does_not_move_tables_onto_users_tables(place: Path, database_url: str) -> None:
    both_deployed(database_url)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA factory_1")
        connection.execute("CREATE VIEW factory_1.minutes_status AS SELECT 1")
    assert "factory_1.minutes_status exists already" in refused(database_url, "switch", "factory", "2")


@pytest.mark.parametrize("ending", ["status", "pkey"])
def test_result_table_with_a_reserved_name_is_refused(place: Path, database_url: str, ending: str) -> None:
    second = f'keyed.window(FixedWindows(minutes(2))).aggregate(n=Count()).to_table("minutes_{ending}")\n'
    (place / "old.py").write_text(GRAPH + second)
    for more in ((), ("--dry-run",)):
        complaint = refused(database_url, "deploy", "old.py", *more)
        assert f"'minutes_{ending}' has a name that is reserved for 'minutes'" in complaint
    (place / "old.py").write_text(GRAPH)
    did(database_url, "deploy", "old.py")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA factory_2")
        connection.execute(f"CREATE TABLE factory_2.minutes_{ending} (n int)")
    assert f"minutes_{ending}" in (said := refused(database_url, "deploy", "new.py"))
    assert "rename the result table" in said


def test_file_of_an_undeployed_generation_does_not_match_another_one(place: Path, database_url: str) -> None:
    both_deployed(database_url)
    (place / "next.py").write_text(NEXT.replace("generation=2", "generation=3"))
    for command in ("status", "watermarks", "windows", "events"):
        complaint = refused(database_url, command, "next.py")
        assert "generation 3 of graph 'factory' is not deployed" in complaint
        assert "there are: factory, factory_2" in complaint


def test_doctor_reports_that_a_generation_without_workers_can_be_dropped(place: Path, database_url: str) -> None:
    both_deployed(database_url)
    did(database_url, "switch", "factory", "2")
    said = [finding for finding in json.loads(did(database_url, "doctor", "--json")) if finding["check"] == "graph"]
    actions = {finding["found"].partition(":")[0]: finding["action"] for finding in said}
    assert actions["factory"] == "start a worker: millpy run, with the file of factory"
    assert actions["factory_1"].startswith("start a worker with the file of generation 1;")
    assert actions["factory_1"].endswith("millpy drop factory_1")


def test_generation_whose_table_was_dropped_can_be_replaced_and_dropped(place: Path, database_url: str) -> None:
    both_deployed(database_url)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("DROP TABLE factory.minutes CASCADE")
    assert "a result table is gone" in refused(database_url, "windows", "factory.minutes")
    did(database_url, "switch", "factory", "2")
    assert '"factory_1.minutes" does not exist' in refused(database_url, "switch", "factory", "1")
    did(database_url, "drop", "factory_1", "--yes")
    assert one(database_url, "SELECT count(*) FROM factory.minutes") == 0


def test_names_of_generations_are_not_given_twice(place: Path, database_url: str) -> None:
    (place / "other.py").write_text(GRAPH.replace('"factory"', '"factory_2"'))
    (place / "first.py").write_text(GRAPH.replace('"factory"', '"factory_1"'))
    did(database_url, "deploy", "old.py")
    did(database_url, "deploy", "other.py")
    assert "'factory_2' is the name of another graph" in refused(database_url, "deploy", "new.py")
    did(database_url, "drop", "factory_2", "--yes")
    did(database_url, "deploy", "new.py")
    for file in ("other.py", "first.py"):
        assert "is the name of another graph, or of a generation" in refused(database_url, "deploy", file)
    found = json.loads(did(database_url, "graphs", "--json"))["graphs"]
    assert [(g["graph"], g["generation"], g["current"]) for g in found] == [
        ("factory", 1, True),
        ("factory_2", 2, False),
    ]

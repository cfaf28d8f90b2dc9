"""--json: every command has it, prints one document, and words its errors as one object."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from millpy.cli.app import app
from millpy.embedded import EmbeddedPostgres
from millpy.model.checkpoint import Kind
from millpy.store.postgres.store import PostgresStore
from tests.commands import millpy, run_millpy
from tests.conformance.store_builders import Owner, a_graph, entries
from tests.databases import fresh_database

ROOT = Path(__file__).resolve().parents[2]
WITHOUT: dict[str, str] = {}
"""Commands that have no --json, and why."""
ELSEWHERE = {
    "demo": "minutes: no test runs it",
    "crash-test": "a minute: tests/e2e/test_crash_test.py reads its document",
    "test": "no database: tests/unit/testing/test_transcript_reader.py reads its document",
    "archive": "tests/crash/test_archive.py reads its document",
    "report": "Spark: tests/spark/test_report.py reads its document",
    "audit": "Spark: tests/spark/test_audit.py reads its document",
    "repair": "Spark: tests/spark/test_audit.py reads its document",
    "spark run": "Spark: tests/spark/test_batch.py reads its document",
    "backfill": "Spark: tests/spark/test_backfill.py reads its document",
    "db": "tests/crash/test_db_command.py reads its document",
    "service files": "tests/unit/test_service_command.py reads its document",
    "service install": "tests/unit/test_service_command.py reads its document",
    "service uninstall": "tests/unit/test_service_command.py runs it",
    "correct": "tests/conformance/test_corrections.py reads its document",
    "analytics": "Spark: tests/spark/test_analytics.py reads its document",
    "workers drain": "a live worker: tests/crash/test_drain.py reads its document",
    "ui": "it serves until a signal ends it: tests/conformance/test_page_command.py reads its document",
    "api": "it serves until a signal ends it: tests/conformance/test_api.py",
}
"""Commands whose document other tests read, and where."""
QUESTION = "SELECT 1 AS one, now() AS at"
# In this order on the example project; a command may stand more than once.
ASKED = (
    ("init", "made"),
    ("migrate",),
    ("deploy", "graph.py", "--dry-run"),
    ("deploy", "graph.py"),
    ("run",),
    ("windows",),
    ("sql", QUESTION),
    ("state", "temperature_1m"),
    ("status",),
    ("watermarks",),
    ("watermarks", "--explain", "temperature_1m"),
    ("watermarks", "--disorder"),
    ("events",),
    ("corrections",),
    ("sources", "list"),
    ("fleet",),
    ("doctor",),
    ("dead-letters", "list"),
    ("dead-letters", "show", "1"),
    ("dead-letters", "replay", "--all"),
    ("dead-letters", "discard", "1"),
    ("late", "list"),
    ("late", "show", "1"),
    ("late", "replay", "1"),
    ("late", "discard", "1"),
    ("sources", "resume", "readings"),
    ("graphs",),
    ("token", "create", "vera"),
    ("token", "list"),
    ("token", "revoke", "vera"),
    ("switch", "plant", "1"),
    ("drop", "plant", "--dry-run"),
    ("parked", "list"),
    ("parked", "release", "sums", "--key", "a"),
    ("parked", "discard", "sums"),
)


def commands(group: TyperGroup, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, by its words."""
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands(command, *path, name)
        else:
            yield (*path, name), command


ALL = dict(commands(typer.main.get_command(app)))


@pytest.fixture(scope="module")
def project(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The example project, with a database that is to be migrated; the tests' directory and environment."""
    directory = tmp_path_factory.mktemp("json") / "plant"
    millpy("init", str(directory))
    with fresh_database(postgres, "template1") as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLPY_DATABASE_URL", postgres.url(name))
        patch.chdir(directory)
        yield directory


async def park(url: str) -> None:
    """Let keys be parked, and a source be paused."""
    async with PostgresStore(url) as store:
        owner = Owner(store, await store.deploy(a_graph()))
        await owner.register()
        await owner.claim()
        for interval, key in zip(owner.deployment.intervals_of("sums"), "ab", strict=True):
            parked = entries(Kind.PARKED, "key", (key, {"ticket": 3, "parked_at": 0}))
            await owner.commit(owner.checkpoint(interval, delta=(parked,)))
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO mill.pauses (interval_id, bundle, reason)"
            " SELECT interval_id, 1, 'too much' FROM mill.places WHERE graph = 'plant' AND kind = 'injector'"
        )


def documents(project: Path) -> dict[tuple[str, ...], Any]:
    """What each command prints."""
    found = {}
    for words in ASKED:
        if words[:2] == ("sources", "resume"):
            asyncio.run(park(os.environ["MILLPY_DATABASE_URL"]))
        done = subprocess.run(
            [sys.executable, "-m", "millpy", *words, "--json"], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) if words == ("run",) else CliRunner().invoke(app, [*words, "--json"])  # fmt: skip
        status = done.returncode if isinstance(done, subprocess.CompletedProcess) else done.exit_code
        assert status == 0, (words, done.stdout, done.stderr)
        found[words] = json.loads(done.stdout)
    return found


def test_every_command_has_a_json_option() -> None:
    without = {" ".join(path) for path, command in ALL.items() if "--json" not in options(command)}

    assert without == WITHOUT.keys()


def options(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts}


def test_every_command_prints_one_json_document(project: Path) -> None:
    found = documents(project)

    asked = {path for words in ASKED for path in ALL if words[: len(path)] == path}
    assert {" ".join(path) for path in ALL.keys() - asked} == WITHOUT.keys() | ELSEWHERE.keys()
    assert found["init", "made"]["wrote"] == ["graph.py", "readings.ndjson", "README.md", ".gitignore"]
    assert found["migrate",] == {"revision": "0004", "applied": ["0001", "0002", "0003", "0004"], "roles": None}
    assert found["deploy", "graph.py"]["deployed"] == 1
    assert [source["injected"] for source in found["run",]["sources"]] == [372]
    assert found["sql", QUESTION][0]["one"] == 1
    assert found["dead-letters", "replay", "--all"] == {"requested": 1, "of": 1, "states": None}
    assert found["dead-letters", "discard", "1"] == {"discarded": 1, "of": 1}
    assert found["sources", "resume", "readings"] == {"graph": "plant", "stream": "readings", "resumed": 1}
    assert found["parked", "release", "sums", "--key", "a"]["keys"] == 1
    assert found["parked", "discard", "sums"] == {
        "graph": "factory", "computation": "sums", "key": None, "discarded": True, "keys": 1
    }  # fmt: skip


NEEDED = {"sql": ["SELECT 1"], "state": ["x"], "report": ["a.b"], "deploy": ["graph.py"], "audit": ["x.py"],
          "repair": ["x.py", "--table", "x"],
          "correct": ["a.b", "--window", "k=1", "--set", "n=1", "--why", "x"],
          "crash-test": ["graph.py"], "test": ["x.yaml"],
          "dead-letters show": ["1"], "dead-letters replay": ["1"], "dead-letters discard": ["1"], "late show": ["1"],
          "late replay": ["1"], "late discard": ["1"], "parked release": ["x"], "parked discard": ["x"],
          "switch": ["x", "1"], "drop": ["x"], "sources resume": ["x"],
          "token create": ["x"], "token revoke": ["x"]}  # fmt: skip
SPEAKS_TO_NO_DATABASE = ("init", "demo", "spark", "db", "service")


@pytest.mark.parametrize("path", [path for path in ALL if path[0] not in SPEAKS_TO_NO_DATABASE], ids=" ".join)
def test_an_error_is_one_json_object_with_the_same_exit_status(
    path: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    millpy("init", str(tmp_path / "plant"))
    monkeypatch.chdir(tmp_path / "plant")
    command = [*path, *NEEDED.get(" ".join(path), []), "--database", "postgresql://me@127.0.0.1:1/none"]

    status, output = run_millpy(*command)
    same_status, line = run_millpy(*command, "--json")

    (error,) = json.loads(line.splitlines()[-1]).values()
    assert status == same_status == error["exit_status"] != 0
    assert output.splitlines()[-2:] == [f"millpy: {error['message']}", f"  hint: {error['hint']}"]


@pytest.mark.parametrize("words", [("statsu",), ("status", "--nope"), ("state",), ("windows", "-n", "x")], ids=" ".join)
def test_a_usage_error_is_one_json_object(words: tuple[str, ...]) -> None:
    status, output = run_millpy(*words, "--json")

    assert status == 2
    assert json.loads(output)["error"]["kind"] == "UsageError"

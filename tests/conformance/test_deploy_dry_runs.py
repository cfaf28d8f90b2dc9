"""`millpy deploy --dry-run` finds what the database refuses, says it as the deployment does, and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.commands import millpy, millpy_json
from tests.crash.graph_files import GRAPH, rows

HIGH = GRAPH.replace('total=Sum("value")', 'total=Sum("value"), high=Max("value")')
MORE = GRAPH + 'keyed.window(FixedWindows(minutes(2))).aggregate(n=Count()).to_table("two_minutes")\n'
STORED = """
SELECT version, description, (SELECT count(*) FROM mill.events), (SELECT count(*) FROM mill.computations),
       (SELECT array_agg(attname ORDER BY attnum) FROM pg_attribute
         WHERE attrelid = to_regclass('factory.minutes') AND attnum > 0 AND NOT attisdropped)
  FROM mill.graphs
"""


class Files:
    """Graph files of one directory, and the database that they are deployed to."""

    def __init__(self, place: Path, url: str) -> None:
        self.place, self.url = place, url

    def deploy(self, graph: str, *words: str, url: str = "", status: int = 0) -> str:
        path = self.place / "factory.py"
        path.write_text(graph)
        return millpy("deploy", str(path), *words, "--database", url or self.url, status=status)

    def run(self, *statements: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)  # type: ignore[call-overload]

    def stored(self) -> list[tuple[Any, ...]]:
        return rows(self.url, STORED)


@pytest.fixture
def files(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Files:
    (tmp_path / "feed").mkdir()
    monkeypatch.chdir(tmp_path)
    return Files(tmp_path, database_url)


def test_a_dry_run_changes_nothing(files: Files) -> None:
    assert "nothing was changed (--dry-run)" in files.deploy(GRAPH, "--dry-run")
    assert files.stored() == []
    files.deploy(GRAPH)
    before = files.stored()

    out = files.deploy(HIGH, "--dry-run")
    assert "version 1, would change" in out
    assert "nothing was changed (--dry-run)" in out

    assert files.stored() == before
    assert "version 2 is deployed" in files.deploy(HIGH)


def test_a_reset_of_a_sink_says_that_it_loses_messages(files: Files) -> None:
    graph = GRAPH + 'source.to_webhook("https://hooks.example/{device}", key="device", name="hooks")\n'
    files.deploy(graph)

    said = "the messages of hooks that are not delivered are deleted"
    assert said in files.deploy(graph, "--reset", "hooks", "--dry-run")
    assert said in files.deploy(graph, "--reset", "hooks", "--reset", "minutes")
    assert said not in files.deploy(graph, "--reset", "minutes")


@pytest.mark.parametrize(
    ("deployed", "changed", "words", "obstacle"),
    [
        (HIGH, GRAPH, ("--back",), "CREATE VIEW public.mine AS SELECT high FROM factory.minutes"),
        (GRAPH, MORE, (), "CREATE TABLE factory.two_minutes (n int)"),
    ],
    ids=["a view of the user", "a table of the user"],
)
def test_a_dry_run_says_what_the_deployment_would(
    files: Files, deployed: str, changed: str, words: tuple[str, ...], obstacle: str
) -> None:
    files.deploy(deployed)
    files.run(obstacle)
    before = files.stored()

    tried = files.deploy(changed, *words, "--dry-run", status=2)

    assert files.stored() == before
    assert files.deploy(changed, *words, status=2) == tried
    assert obstacle.split()[2].partition(".")[2] in tried


def test_a_dry_run_in_json_has_the_changes(files: Files) -> None:
    files.deploy(GRAPH)
    path = str(files.place / "factory.py")
    Path(path).write_text(MORE)
    found = millpy_json("deploy", path, "--dry-run", "--database", files.url)
    assert (found["refused"], found["deployed"], bool(found["changes"])) == (False, 1, True)


def test_a_dry_run_needs_the_rights_of_the_deployment(files: Files) -> None:
    millpy("migrate", "--roles", "--database", files.url)
    files.deploy(GRAPH)
    as_reader = files.url.replace("//millpy@", "//millpy_worker@")

    assert "role millpy_worker may not deploy" in files.deploy(HIGH, "--dry-run", url=as_reader, status=2)


def test_a_dry_run_waits_for_a_commit_for_a_moment_only(files: Files) -> None:
    files.deploy(GRAPH)
    with psycopg.connect(files.url) as committing:
        committing.execute("SELECT FROM mill.intervals FOR UPDATE")
        assert "nothing was changed: try again" in files.deploy(HIGH, "--dry-run", status=1)
        committing.execute("SELECT 1")  # its session was not ended

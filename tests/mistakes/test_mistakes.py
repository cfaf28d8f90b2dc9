"""Makes each mistake of docs/mistakes.md; the output must equal that of the page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpy.embedded import EmbeddedPostgres
from tests.commands import run_millpy
from tests.databases import fresh_database
from tests.mistakes.examples import FILE, GRAPH, MISTAKES, ROOT, Place

PAGE = ROOT / "docs" / "mistakes.md"
ROW = re.compile(r"^\| ([^|`]+) \| `+ ?([^|]+?) ?`+ \| `+ ?([^|]+?) ?`+ \| (\d) \|$", re.MULTILINE)


def documented() -> dict[str, tuple[str, str, int]]:
    """Return mistake -> (message, hint, exit status), from the page."""
    return {what: (said, hint, int(status)) for what, said, hint, status in ROW.findall(PAGE.read_text())}


@pytest.fixture(scope="module")
def databases(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A migrated database on which the graph has run, another one, and one without our tables."""
    with (
        fresh_database(postgres) as plant,
        fresh_database(postgres) as spare,
        fresh_database(postgres, "template1") as empty,
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path_factory.mktemp("plant"))
            patch.setenv("MILLPY_DATABASE_URL", postgres.url(plant))
            Path("graph.py").write_text(GRAPH.replace("SOURCE", FILE))
            Path("readings.ndjson").touch()
            assert run_millpy("run")[0] == 0
        yield {
            "url": postgres.url(plant),
            "tcp_url": postgres.tcp_url(plant),
            "spare_url": postgres.url(spare),
            "empty_url": postgres.url(empty),
            "rules": str(postgres.data / "pg_hba.conf"),
        }


@pytest.mark.parametrize("what", MISTAKES)
def test_mistake_is_reported_in_one_line_with_a_hint(
    what: str, databases: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = Place(directory=tmp_path, patch=monkeypatch, **databases)

    status, said = MISTAKES[what](place)

    for actual, word in place.said.items():
        said = said.replace(actual, word)
    message, hint, documented_status = documented().get(what, ("", "", -1))
    assert said == f"millpy: {message}\n  hint: {hint}\n"
    assert status == documented_status


def test_page_has_every_mistake_in_its_order() -> None:
    assert list(documented()) == list(MISTAKES)

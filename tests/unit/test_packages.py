"""Wheel, sdist and the build context of the image contain all tracked files, and no others."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLANTED = (
    ".env", "prod.env", ".millpy/postgres/password", ".millpy/postgres/data/base/1", "secrets/mqtt_url", "secret.txt",
    "readings.ndjson", "crash-test-factory.html", "notes", "id_rsa", "key.pem", "dump.sql.gz", ".pgpass", "x.pyc",
    "__pycache__/demo.cpython-311.pyc", "core.123", "log",
)  # fmt: skip
PLACES = ("", "examples", "millpy", "millpy/store", "migrations", "migrations/versions", "services", "compose", "docs",
          "tests", "benchmarks")  # fmt: skip
CHECKOUT_ONLY = ("millpy/testing/simulation/", "millpy/testing/simulator.py")
"""What tests the engine, and no user's graph."""
MOVED = {
    "migrations/": "millpy/_migrations/",
    "examples/": "millpy/_source/examples/",
    "compose/alerts.yaml": "millpy/_source/compose/alerts.yaml",
    "compose/kubernetes/": "millpy/_source/compose/kubernetes/",
    "compose/monitoring/dashboards/": "millpy/_source/compose/monitoring/dashboards/",
    "compose/systemd/": "millpy/_source/compose/systemd/",
}


def tracked() -> set[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("this is no checkout")
    return {name for name in done.stdout.decode().split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module", params=["with .gitignore", "without"])
def littered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy all tracked files, and add private files everywhere."""
    directory = tmp_path_factory.mktemp("source")
    for name in tracked():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, directory / name)
    for place in PLACES:
        for name in PLANTED:
            path = directory / place / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("private")
    if request.param == "without":
        (directory / ".gitignore").unlink()
    return directory


def built(source: Path, target: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", "out"]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (made,) = (source / "out").glob("*.whl" if target == "wheel" else "*.tar.gz")
    return made


def test_the_wheel_contains_exactly_the_tracked_files(littered: Path) -> None:
    with zipfile.ZipFile(built(littered, "wheel")) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}

    expected = {name for name in tracked() if name.startswith("millpy/") and not name.startswith(CHECKOUT_ONLY)}
    for before, after in MOVED.items():
        expected |= {after + name.removeprefix(before) for name in tracked() if name.startswith(before)}
    assert names == expected


def test_the_sdist_contains_exactly_the_tracked_files(littered: Path) -> None:
    with tarfile.open(built(littered, "sdist")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}

    own = {"PKG-INFO", "pyproject.toml", ".gitignore"}
    assert names - own <= tracked()
    left_out = (".ci/", ".dockerignore", ".gitignore", "pyproject.toml", ".github/")
    assert {name for name in tracked() if not name.startswith(left_out)} - names == set()


def test_the_images_context_contains_exactly_the_tracked_files(littered: Path) -> None:
    files = {str(path.relative_to(littered)) for path in littered.rglob("*") if path.is_file()}

    context = {name for name in files if is_sent(name) and not name.startswith("out/")}

    assert context <= tracked()
    needed = ("millpy/", "migrations/", "services/", "examples/", "pyproject.toml", "README.md", "LICENSE")
    needed += ("compose/alerts.yaml", "compose/kubernetes/", "compose/monitoring/dashboards/", "compose/systemd/")
    assert {name for name in tracked() if name.startswith(needed)} == context


def is_sent(name: str) -> bool:
    """Tell whether Docker copies a file: the last pattern that matches it or a parent decides."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            if re.match(matching(line.removeprefix("!")) + "(/|$)", name):
                sent = line.startswith("!")
    return sent


def matching(pattern: str) -> str:
    """A pattern of Docker as a regular expression."""
    parts = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.sub(
        r"\*\*/|\*\*|\*|\?|\[[^]]*\]|.", lambda m: parts.get(m[0], m[0] if m[0][0] == "[" else re.escape(m[0])), pattern
    )

"""What is to be installed comes from where millpy came from."""

from __future__ import annotations

import json
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

from millpy.config import extras

CHECKOUT = Path(extras.__file__).resolve().parents[2]
GIT = {"url": "https://git.example/millpy", "vcs_info": {"vcs": "git", "commit_id": "0"}}


def installed(monkeypatch: pytest.MonkeyPatch, place: Path, direct_url: dict[str, Any] | None) -> None:
    """As pip leaves it in site-packages."""
    metadata = place / "millpy-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: millpy\nVersion: 1\n")
    if direct_url is not None:
        (metadata / "direct_url.json").write_text(json.dumps(direct_url))
    monkeypatch.setattr(extras, "__file__", str(place / "millpy" / "config" / "extras.py"))
    monkeypatch.setattr(extras, "distribution", lambda _: Distribution.at(metadata))


def test_hint_for_a_checkout_installs_from_its_path() -> None:
    assert extras.to_install("mqtt", "spark") == f"pip install '{CHECKOUT}[mqtt,spark]'"


@pytest.mark.parametrize(
    ("direct_url", "command"),
    [
        (None, "pip install 'millpy[spark]'"),
        ({"url": "file:///gone/millpy.whl", "archive_info": {}}, "pip install 'millpy[spark]'"),
        ({"url": CHECKOUT.as_uri(), "dir_info": {}}, f"pip install 'millpy[spark] @ {CHECKOUT.as_uri()}'"),
        (GIT, "pip install 'millpy[spark] @ git+https://git.example/millpy'"),
    ],
    ids=["an index", "a wheel that is gone", "a directory", "a repository"],
)
def test_hint_for_an_installed_package_installs_from_its_origin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, direct_url: dict[str, Any] | None, command: str
) -> None:
    installed(monkeypatch, tmp_path, direct_url)

    assert extras.to_install("spark") == command

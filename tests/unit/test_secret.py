"""Secrets from the environment or from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpy.config import Settings
from millpy.errors import ConfigError
from millpy.injectors.mqtt_address import url_of_environment
from millpy.secret import redacted

URL = "postgresql://me:word@localhost/plant"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MILLPY_DATABASE_URL", "MILLPY_MQTT_URL"):
        monkeypatch.delenv(name, raising=False)


def test_a_file_may_hold_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "url").write_text(f"{URL}\n")
    monkeypatch.setenv("MILLPY_DATABASE_URL_FILE", str(tmp_path / "url"))

    assert Settings.load().database_url == URL
    assert Settings.load(database_url="postgresql://localhost/other").database_url == "postgresql://localhost/other"


def test_a_file_may_hold_the_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "url").write_text("mqtt://me:word@host:1884")
    monkeypatch.setenv("MILLPY_MQTT_URL_FILE", str(tmp_path / "url"))

    url = url_of_environment()

    assert (url.host, url.port, url.username, url.password) == ("host", 1884, "me", "word")


def test_one_of_two_places_would_be_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPY_DATABASE_URL", URL)
    monkeypatch.setenv("MILLPY_DATABASE_URL_FILE", str(tmp_path / "url"))

    with pytest.raises(ConfigError, match="are both set") as caught:
        Settings.load()

    assert "word" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPY_DATABASE_URL_FILE", str(tmp_path / "nothing"))

    with pytest.raises(ConfigError, match=r"MILLPY_DATABASE_URL_FILE: cannot read .*nothing: No such file"):
        Settings.load()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot reach postgresql://me:wo%40rd@db/plant now", "cannot reach postgresql://me:***@db/plant now"),
        ("mqtts://me:a@b/c@host:8883?ca=x", "mqtts://me:***@host:8883?ca=x"),
        ("get('https://:word@host/x')", "get('https://:***@host/x')"),
        ("host=db password='wo rd' user=me", "host=db password=*** user=me"),
        ('Mqtt("a", password="word", port=1)', 'Mqtt("a", password=***, port=1)'),
        ("postgresql://millpy@/postgres?host=/run&port=5432", "postgresql://millpy@/postgres?host=/run&port=5432"),
        ("password authentication failed for user", "password authentication failed for user"),
        (
            "is like postgresql://user:password@host:5432/database",
            "is like postgresql://user:password@host:5432/database",
        ),
    ],
)
def test_words_of_others_are_shown_without_passwords(text: str, shown: str) -> None:
    assert redacted(text) == shown

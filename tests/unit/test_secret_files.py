"""Secrets from the environment or from files."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import make_conninfo

from millpy.config.secrets import redacted, redacted_value
from millpy.config.settings import Settings
from millpy.errors import ConfigError
from millpy.sources.mqtt.address import url_of_environment

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


def test_two_sources_of_one_secret_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPY_DATABASE_URL", URL)
    monkeypatch.setenv("MILLPY_DATABASE_URL_FILE", str(tmp_path / "url"))

    with pytest.raises(ConfigError, match="are both set") as caught:
        Settings.load()

    assert "word" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ("sslpassword=word sslmode=require", "sslpassword=*** sslmode=require"),
        ("mosquitto_sub -u me --password word -t x", "mosquitto_sub -u me --password *** -t x"),
        ("kafka --sasl-password 'wo rd' --x", "kafka --sasl-password *** --x"),
        ("Server=db;Pwd=word", "Server=db;Pwd=***"),
        ("access_token=word&x", "access_token=***"),
        ("the password is wrong", "the password is wrong"),
        ("{'password': 'wo rd', 'user': 'me'}", "{'password': ***, 'user': 'me'}"),
        ('{"password":"wo\\"rd","user":"me"}', '{"password":***,"user":"me"}'),
        ("password: word\nuser: me", "password: ***\nuser: me"),
        ("CREATE ROLE me PASSWORD 'wo''rd' LOGIN", "CREATE ROLE me PASSWORD *** LOGIN"),
        ("ALTER ROLE me PASSWORD E'wo\\'rd' LOGIN", "ALTER ROLE me PASSWORD *** LOGIN"),
        ("ALTER ROLE me PASSWORD U&'w\\006frd';", "ALTER ROLE me PASSWORD ***;"),
        ("Authorization: Bearer wo.rd-x again", "Authorization: Bearer *** again"),
        ("{'Authorization': 'Basic d29yZA=='}", "{'Authorization': 'Basic ***'}"),
        ("aws_secret_access_key = word", "aws_secret_access_key = ***"),
        ("the private key is unreadable", "the private key is unreadable"),
        ("postgresql://db/plant?%70assword=word", "postgresql://db/plant?%70assword=***"),
        ("MILLPY_DATABASE_PASSWORD_FILE=/run/secrets/x", "MILLPY_DATABASE_PASSWORD_FILE=/run/secrets/x"),
        ('Mqtt("a", password="word", port=1)', 'Mqtt("a", password=***, port=1)'),
        ("postgresql://millpy@/postgres?host=/run&port=5432", "postgresql://millpy@/postgres?host=/run&port=5432"),
        ("password authentication failed for user", "password authentication failed for user"),
        (
            "as postgresql://user:password@host:5432/database",
            "as postgresql://user:password@host:5432/database",
        ),
    ],
)
def test_messages_of_others_are_shown_without_passwords(text: str, shown: str) -> None:
    assert redacted(text) == shown


START, END = "Zq7", "Kx9"
NASTY = st.text(st.sampled_from("ab %&=:;,@/?#'\"\\()[]{}+~é\n\t"), max_size=12)
PASSWORDS = NASTY.map(lambda middle: f"{START}{middle}{END}")
ENCODED = {
    "URL": lambda p: f"postgresql://me:{quote(p, safe='')}@db:5432/plant?sslmode=require",
    "URL of a broker": lambda p: f"mqtts://me:{quote(p)}@host:8883?ca=x",
    "parameter": lambda p: f"postgresql://db/plant?password={quote(p, safe='')}&sslmode=require",
    "parameter of TLS": lambda p: f"postgresql://db/plant?sslmode=require&sslpassword={quote_plus(p)}",
    "parameter with an encoded name": lambda p: f"postgresql://db/plant?%50ass%77ord={quote(p, safe='')}",
    "keywords": lambda p: make_conninfo("", host="db", password=p, sslpassword=p, user="me"),
    "repr of a dictionary": lambda p: repr({"user": "me", "password": p, "port": 1}),
    "JSON": lambda p: json.dumps({"password": p, "sasl_plain_password": p, "host": "db"}),
    "call": lambda p: f"Mqtt('a', password={p!r}, port=1)",
    "repr of bytes": lambda p: f"password={p.encode()!r}",
    "SQL": lambda p: f"ALTER ROLE me PASSWORD {escape(p)}",
}  # fmt: skip
BARE = {  # without white space or quotes at the beginning
    "bare keyword": lambda p: f"host=db password={p} user=me",
    "bare YAML": lambda p: f"password: {p}\nuser: me",
    "bare URL": lambda p: f"postgresql://me:{p}@db/plant",
    "variable": lambda p: f"PGPASSWORD={p} psql",
}


def escape(password: str) -> str:
    return "'" + password.replace("'", "''") + "'" if "\\" not in password else "'x'"


def wrappings(text: str) -> Iterator[str]:
    """A text as errors and logs show it."""
    yield text
    yield f"cannot connect: {text}"
    yield repr(ValueError(text))
    yield repr([ValueError(text), {"why": ValueError(text)}])
    try:
        try:
            raise ValueError(text)
        except ValueError as error:
            raise RuntimeError(f"it failed: {error!r}") from error
    except RuntimeError as error:
        yield "".join(traceback.format_exception(error))


@pytest.mark.parametrize("form", ENCODED)
@given(password=PASSWORDS)
def test_no_part_of_a_password_is_shown_in_any_form(form: str, password: str) -> None:
    for text in wrappings(ENCODED[form](password)):
        shown = redacted(text)
        assert START not in shown and END not in shown, (text, shown)


@pytest.mark.parametrize("form", BARE)
@given(password=PASSWORDS.filter(lambda p: not re.search(r"\s", p)))
def test_no_part_of_a_bare_password_is_shown(form: str, password: str) -> None:
    for text in wrappings(BARE[form](password)):
        shown = redacted(text)
        assert START not in shown and END not in shown, (text, shown)


@given(password=PASSWORDS)
def test_values_of_a_log_line_show_no_password(password: str) -> None:
    event = {
        "event": f"password={password!r}", "password": password, "nested": {"sslpassword": password, "list": [
            {"PGPASSWORD": password}, f"mqtt://me:{quote(password, safe='')}@host"]},
        "error": ValueError(f"password={password!r}"), "bytes": f"password={password!r}".encode(),
    }  # fmt: skip

    shown = repr(redacted_value(event))

    assert START not in shown and END not in shown, shown

"""TLS and passwords against a real server, with certificates made here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import trustme
from typer.testing import CliRunner

from millpy.admin.diagnosis import read_facts
from millpy.cli.app import app
from millpy.clock import SystemClock
from millpy.config.settings import Settings
from millpy.embedded import EmbeddedPostgres, binaries
from millpy.errors import ConfigError
from millpy.spark.tables import describe
from millpy.store.postgres.deployment.migrate import migrate
from millpy.store.postgres.store import PostgresStore

NAME = "db.example"
PASSWORD = "hunter2-tOp"
WITH_TLS = "system15"
"""The servers in the wheel are built without."""


class TlsServer:
    """Takes logins of `plant` by TLS with a password only; `address()` calls it by a name, as if it were elsewhere."""

    def __init__(self, server: EmbeddedPostgres, directory: Path) -> None:
        authority = trustme.CA()
        issued = authority.issue_cert(NAME)
        self.authority = directory / "ca.pem"
        authority.cert_pem.write_to_path(str(self.authority))
        issued.cert_chain_pems[0].write_to_path(str(server.data / "server.crt"))
        issued.private_key_pem.write_to_path(str(server.data / "server.key"))
        owner = server.data.stat()
        for name in ("server.crt", "server.key"):
            os.chown(server.data / name, owner.st_uid, owner.st_gid)
            (server.data / name).chmod(0o600)
        rules = server.data / "pg_hba.conf"
        rules.write_text(f"hostssl all plant all scram-sha-256\nhost all plant all reject\n{rules.read_text()}")
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute(f"CREATE ROLE plant LOGIN SUPERUSER PASSWORD '{PASSWORD}'")
            connection.execute("ALTER SYSTEM SET ssl = on")
            connection.execute("SELECT pg_reload_conf()")
        self.port = server.tcp_url().rpartition(":")[2].partition("/")[0]

    def address(self, *options: str, name: str = NAME, user: str = "plant") -> str:
        """Without a password."""
        more = "&".join(["hostaddr=127.0.0.1", *options])
        return f"postgresql://{user}@{name}:{self.port}/postgres?{more}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    try:
        binaries(WITH_TLS)
    except ConfigError as error:
        pytest.skip(f"a server that speaks TLS is not installed: {error}")
    directory = tmp_path_factory.mktemp("tls")
    with EmbeddedPostgres(directory / "server", version=WITH_TLS, tcp=True) as embedded:
        yield TlsServer(embedded, directory)
        embedded.kill()


@pytest.fixture(autouse=True)
def password_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "password"
    path.write_text(PASSWORD + "\n")
    monkeypatch.setenv("MILLPY_DATABASE_PASSWORD_FILE", str(path))
    return path


def completed(address: str) -> str:
    url = Settings.load(database_url=address).database_url
    assert url is not None
    return url


def test_a_server_without_a_trusted_certificate_is_refused_by_default(server: TlsServer) -> None:
    with pytest.raises(ConfigError, match="certificate verify failed") as refused:
        read_facts(completed(server.address()), SystemClock())

    assert "sslrootcert" in refused.value.hint
    assert PASSWORD not in f"{refused.value} {refused.value.hint}"


async def test_every_connection_is_encrypted_when_an_authority_is_named(server: TlsServer) -> None:
    url = completed(server.address(f"sslrootcert={server.authority}"))

    migrate(url)
    async with PostgresStore(url) as store:
        assert await store.now_us() > 0
    shown = CliRunner().invoke(app, ["status", "--json", "--database", url])
    with pytest.raises(ConfigError, match=r"no table mill\.nothing"):
        describe(url, "mill", "nothing")  # Spark's driver has a libpq of its own

    assert shown.exit_code == 0
    assert PASSWORD not in shown.output
    assert read_facts(url, SystemClock()).server["encrypted"]


def test_a_server_under_another_name_is_refused(server: TlsServer) -> None:
    url = completed(server.address(f"sslrootcert={server.authority}", name="db.elsewhere"))

    with pytest.raises(ConfigError, match=r"certificate for .db\.example., not for .db\.elsewhere."):
        read_facts(url, SystemClock())


def test_a_wrong_password_is_reported_and_not_shown(server: TlsServer, password_file: Path) -> None:
    password_file.write_text("other-" + PASSWORD)
    address = server.address(f"sslrootcert={server.authority}")

    for command in (["doctor", "--json"], ["status"], ["migrate"], ["watermarks", "--json"]):
        result = CliRunner().invoke(app, [*command, "--database", address])
        assert result.exit_code != 0
        assert "MILLPY_DATABASE_PASSWORD_FILE" in result.output
        assert PASSWORD not in result.output


def test_a_server_without_tls_is_refused_by_default_with_a_hint(postgres: EmbeddedPostgres) -> None:
    address = postgres.tcp_url().replace("@127.0.0.1:", "@db.example:") + "?hostaddr=127.0.0.1"

    with pytest.raises(ConfigError, match="does not support TLS") as refused:
        read_facts(completed(address), SystemClock())

    assert "sslmode=disable" in refused.value.hint
    assert not read_facts(completed(address + "&sslmode=disable"), SystemClock()).server["encrypted"]

"""TLS against a real mosquitto, with certificates made here."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from millpy import Tls
from millpy.embedded import mosquitto_program
from millpy.errors import ConfigError
from millpy.limits import Limits
from tests.conformance.mqtt_subject import SettledBroker, an_injector, publish, take_payloads

pytestmark = pytest.mark.skipif(mosquitto_program() is None, reason="mosquitto is not installed")


class Certificates:
    """Write a private authority and the certificates of a broker and a client to files."""

    def __init__(self, directory: Path, name: str) -> None:
        authority = trustme.CA()
        directory.mkdir()
        self.ca = directory / "ca.pem"
        authority.cert_pem.write_to_path(str(self.ca))
        self.broker = self._issue(authority, directory / "broker", name)
        self.client = self._issue(authority, directory / "client", "client.example")

    def _issue(self, authority: trustme.CA, stem: Path, name: str) -> tuple[Path, Path]:
        issued = authority.issue_cert(name)
        certificate, key = stem.with_suffix(".pem"), stem.with_suffix(".key")
        issued.cert_chain_pems[0].write_to_path(str(certificate))
        issued.private_key_pem.write_to_path(str(key))
        return certificate, key

    def lines(self) -> list[str]:
        return [f"cafile {self.ca}", f"certfile {self.broker[0]}", f"keyfile {self.broker[1]}"]

    def for_publisher(self) -> dict[str, Any]:
        context = ssl.create_default_context(cafile=str(self.ca))
        context.load_cert_chain(*map(str, self.client))
        return {"tls_context": context}


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "certificates", "127.0.0.1")


@pytest.fixture
def tls_broker(tmp_path: Path, certificates: Certificates) -> Iterator[SettledBroker]:
    with SettledBroker(tmp_path / "broker", certificates.lines()) as broker:
        yield broker


async def test_messages_arrive_over_tls_across_pauses(tls_broker: SettledBroker, certificates: Certificates) -> None:
    injector = an_injector(tls_broker.port, tls=Tls(ca=certificates.ca), limits=Limits(bundle_records_max=20))
    await injector.open(None)
    expected = [b"%04d" % i * 100 for i in range(300)]

    await publish(tls_broker.port, expected, client=certificates.for_publisher())

    assert await take_payloads(injector, 300) == expected
    await injector.close()


async def test_broker_without_a_trusted_certificate_is_refused(tls_broker: SettledBroker) -> None:
    injector = an_injector(tls_broker.port, tls=True)

    with pytest.raises(ConfigError, match="is not trusted") as caught:
        await injector.open(None)

    assert "Tls(ca=" in caught.value.hint
    await injector.close()


async def test_broker_under_another_name_is_refused(tmp_path: Path) -> None:
    elsewhere = Certificates(tmp_path / "certificates", "broker.example")
    with SettledBroker(tmp_path / "broker", elsewhere.lines()) as broker:
        injector = an_injector(broker.port, tls=Tls(ca=elsewhere.ca))

        with pytest.raises(ConfigError, match="is not trusted"):
            await injector.open(None)

        await injector.close()


async def test_client_certificate_is_presented(tmp_path: Path, certificates: Certificates) -> None:
    with SettledBroker(tmp_path / "broker", [*certificates.lines(), "require_certificate true"]) as broker:
        certificate, key = map(str, certificates.client)
        injector = an_injector(broker.port, tls=Tls(ca=certificates.ca, certificate=certificate, key=key), protocol=311)
        await injector.open(None)

        await publish(broker.port, [b"1"], client=certificates.for_publisher())

        assert await take_payloads(injector, 1) == [b"1"]
        await injector.close()


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """A file in which `me` has the password `p@ss`."""
    file = tmp_path / "users"
    file.touch(mode=0o600)
    set_password(file, "p@ss")
    return file


def set_password(users: Path, password: str) -> None:
    """Let `me` in with this password from the next start of the broker on."""
    subprocess.run(["mosquitto_passwd", "-b", str(users), "me", password], check=True, capture_output=True)


async def test_login_works_over_tls(
    users: Path,
    tmp_path: Path,
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = [*certificates.lines(), f"password_file {users}"]
    with SettledBroker(tmp_path / "broker", lines, anonymous=False) as broker, caplog.at_level("DEBUG"):
        monkeypatch.setenv("MILLPY_MQTT_URL", f"mqtts://me:p%40ss@127.0.0.1:{broker.port}?ca={certificates.ca}")
        injector = an_injector(None, host=None)

        await injector.open(None)

        assert injector._session is not None
        await injector.close()
    assert "p@ss" not in caplog.text and "p%40ss" not in caplog.text


async def test_a_password_that_is_replaced_counts_at_the_next_connect_and_its_file_may_be_away(
    users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator changes it at the broker and in the file, in any order; it was read once, when the worker started."""
    password = tmp_path / "password"
    password.write_text("p@ss\n")
    with SettledBroker(tmp_path / "broker", [f"password_file {users}"], anonymous=False) as broker:
        monkeypatch.setenv("MILLPY_MQTT_URL", f"mqtt://me@127.0.0.1:{broker.port}")
        monkeypatch.setenv("MILLPY_MQTT_PASSWORD_FILE", str(password))
        injector = an_injector(None, host=None, limits=Limits(retry_s_max=0.1, lease_ttl_s=0.5))
        state = injector._setup.connection
        await injector.open(None)

        async def shows(is_so: Callable[[], bool]) -> None:
            async with asyncio.timeout(60):
                while not is_so():
                    assert await injector.take() is None
                    await asyncio.sleep(0)

        broker.stop()
        password.unlink()
        set_password(users, "new")
        broker.start()
        await shows(lambda: "cannot read" in state.why)
        password.write_text("p@ss")
        await shows(lambda: "refuses user 'me'" in state.why)
        password.write_text("new")
        await shows(lambda: state.is_connected is True)
        await injector.close()


async def test_file_without_a_certificate_is_named(tmp_path: Path) -> None:
    nothing = tmp_path / "ca.pem"
    nothing.write_text("nothing")

    with pytest.raises(ConfigError, match=r"ca\.pem"):
        await an_injector(1, tls=Tls(ca=nothing)).open(None)

"""The certificate of an HTTP source that is renewed while clients connect."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
import trustme

from millpy.config import tls_files
from tests.unit.sources.http_client import accepting


async def test_a_renewed_certificate_is_shown_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers run longer than certificates are valid: all clients were shut out when the first one had ended."""
    monkeypatch.setattr(tls_files, "LOOK_EVERY_S", 0.0)
    authority = trustme.CA()
    known = ssl.create_default_context()
    authority.configure_trust(known)
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    first, second = (authority.issue_cert("127.0.0.1") for _ in range(2))
    first.cert_chain_pems[0].write_to_path(str(certificate))
    first.private_key_pem.write_to_path(str(key))
    async with accepting(url=f"https://127.0.0.1:0?certificate={certificate}&key={key}") as client:

        async def shown() -> bytes:
            _, writer = await asyncio.open_connection("127.0.0.1", client.port, ssl=known)
            found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            writer.close()
            return ssl.DER_cert_to_PEM_cert(found).encode()

        async with asyncio.timeout(60):
            assert await shown() == first.cert_chain_pems[0].bytes()
            second.cert_chain_pems[0].write_to_path(str(certificate))
            assert await shown() == first.cert_chain_pems[0].bytes(), "the key is that of the first one"
            second.private_key_pem.write_to_path(str(key))
            assert await shown() == second.cert_chain_pems[0].bytes()
            key.unlink()
            assert await shown() == second.cert_chain_pems[0].bytes()
    assert [record.getMessage().rpartition("; ")[2] for record in caplog.records] == [
        "the certificate read before stays in use"
    ] * 2


async def test_clients_are_still_asked_for_certificates_and_by_the_authority_that_counts_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_files, "LOOK_EVERY_S", 0.0)
    authorities = [trustme.CA() for _ in range(2)]
    names = {name: tmp_path / name for name in ("ca", "certificate", "key")}

    def put(authority: trustme.CA) -> None:
        issued = authority.issue_cert("127.0.0.1")
        authority.cert_pem.write_to_path(str(names["ca"]))
        issued.cert_chain_pems[0].write_to_path(str(names["certificate"]))
        issued.private_key_pem.write_to_path(str(names["key"]))

    def client_of(authority: trustme.CA | None) -> ssl.SSLContext:
        known = ssl.create_default_context()
        for trusted in authorities:
            trusted.configure_trust(known)
        if authority is not None:
            authority.issue_cert("client.example").configure_cert(known)
        return known

    put(authorities[0])
    files = "&".join(f"{name}={path}" for name, path in names.items())
    async with accepting(url=f"https://127.0.0.1:0?{files}") as client, asyncio.timeout(60):

        async def is_let_in(authority: trustme.CA | None) -> bool:
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port, ssl=client_of(authority))
            try:
                writer.write(b"GET /readings HTTP/1.1\r\nHost: x\r\n\r\n")
                return (await reader.readline()).startswith(b"HTTP/1.1 405")
            except OSError:
                return False
            finally:
                writer.close()

        assert [await is_let_in(authority) for authority in (None, *authorities)] == [False, True, False]
        put(authorities[1])
        assert [await is_let_in(authority) for authority in (None, *authorities)] == [False, False, True]

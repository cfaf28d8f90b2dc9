"""The TLS of a listener whose certificate is renewed while it listens: connections from then on get the new one."""

from __future__ import annotations

import logging
import ssl

from millpy.clock import Clock
from millpy.config.tls_files import TlsFiles
from millpy.errors import ConfigError
from millpy.sources.http.address import ListenAddress

log = logging.getLogger(__name__)


class RenewedTls:
    """Chooses the context of each handshake.

    Args:
        address: the address, with the names of its files.
        clock: tells when to look at the files again.

    Attributes:
        context: the context to listen with; None for plain TCP.

    Raises:
        ConfigError: a file cannot be read, or holds no certificate or key.
    """

    def __init__(self, address: ListenAddress, clock: Clock) -> None:
        self._address = address
        self._files = TlsFiles((address.certificate, address.key, address.ca), clock)
        self._newest = self.context = address.tls_context()
        if self.context is not None:
            self.context.sni_callback = self._choose

    def _choose(self, handshake: ssl.SSLObject, name: str, context: ssl.SSLContext) -> None:
        """Give a handshake the newest certificate; OpenSSL asks for each one, with the name that the client wants."""
        del name, context
        if self._files.replaced():
            try:
                self._newest = self._address.tls_context()
            except ConfigError as error:  # perhaps only one of the files has been replaced yet
                log.warning("%s; the certificate read before stays in use", error.message, extra={"hint": error.hint})
        if self._newest is not self.context:
            assert self._newest is not None
            handshake.context = self._newest

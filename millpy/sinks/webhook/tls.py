"""TLS of a webhook: the authorities that we trust, and our certificate."""

from __future__ import annotations

import ssl

from millpy.config.access import Tls, text_of
from millpy.errors import ConfigError


def tls_context(tls: Tls) -> ssl.SSLContext:
    """Return a context that verifies certificate and name of the receiver.

    Raises:
        ConfigError: a file cannot be read or used.
    """
    try:
        context = ssl.create_default_context(cafile=text_of(tls.ca))
    except (OSError, ValueError) as error:
        raise _unusable("Tls(ca=…)", text_of(tls.ca), error) from None
    certificate = text_of(tls.certificate)
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, text_of(tls.key), password=_no_password)
        except (OSError, ValueError) as error:
            raise _unusable("Tls(certificate=…, key=…)", certificate, error) from None
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted with a password, which workers do not have")


def _unusable(setting: str, path: str | None, error: Exception) -> ConfigError:
    why = str(error)
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        why = error.strerror or why
    return ConfigError(f"cannot use {path} of {setting}: {why}", hint="name readable PEM files")

"""Signatures after the Standard Webhooks specification, and other secrets that requests carry.

The secrets are values of environment variables, or of files that variables name. They are read again every few seconds,
so that one can be replaced while workers run. A request is signed with each secret: first add the new one, then give it
to the receiver, then remove the old one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import re
from collections.abc import Mapping

from millpy.clock import Clock
from millpy.config.secrets import secret
from millpy.errors import ConfigError

log = logging.getLogger(__name__)
PREFIX = "whsec_"
KEYS_MAX = 5
KEY_BYTES_MIN, KEY_BYTES_MAX = 24, 64
READ_EVERY_S = 10.0
HEADER_CHARACTERS_MAX = 4_000
_HEADER_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
_HINT = "it is whsec_ and the base64 of 24 to 64 random bytes: echo whsec_$(openssl rand -base64 32)"


def signing_keys(variable: str) -> list[bytes]:
    """Return the keys in a variable, the newest first; spaces, commas or line ends separate them.

    Raises:
        ConfigError: there are none or too many, or one is not what the specification demands. The message quotes none.
    """
    words = (secret(variable) or "").replace(",", " ").split()
    if not 0 < len(words) <= KEYS_MAX:
        raise ConfigError(f"{variable} has {len(words)} signing secrets, and needs 1 to {KEYS_MAX}", hint=_HINT)
    found = []
    for number, word in enumerate(words, 1):
        text = word.removeprefix(PREFIX)
        try:
            key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
        except (binascii.Error, ValueError):
            raise ConfigError(f"{variable}: secret {number} is not base64", hint=_HINT) from None
        if not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
            raise ConfigError(f"{variable}: secret {number} has {len(key)} bytes", hint=_HINT)
        found.append(key)
    return found


def signature(keys: list[bytes], id: str, timestamp: int, body: bytes) -> str:
    """Return the value of `webhook-signature`: one signature for each key."""
    signed = f"{id}.{timestamp}.".encode() + body
    digests = [hmac.new(key, signed, hashlib.sha256).digest() for key in keys]
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)


class RequestSecrets:
    """The secrets of a sink's requests: keys of signatures, and values of headers.

    Args:
        signing: the variable with the signing secrets; None for no signature.
        headers: the header -> the variable with its value.
        clock: tells when to read them again.

    Raises:
        ConfigError: one is missing or unusable.
    """

    def __init__(self, signing: str | None, headers: Mapping[str, str], clock: Clock) -> None:
        self._signing = signing
        self._variables = dict(headers)
        self._clock = clock
        self._read()

    def _read(self) -> None:
        self._read_at = self._clock.monotonic()
        self._keys = signing_keys(self._signing) if self._signing else []
        self._headers = {name: _header_value(variable) for name, variable in self._variables.items()}

    def headers(self, id: str, body: bytes) -> dict[str, str]:
        """Return the headers of one attempt at a request."""
        if self._clock.monotonic() - self._read_at >= READ_EVERY_S:
            try:
                self._read()
            except ConfigError as error:
                log.warning("%s; the secrets read before stay in use", error.message, extra={"hint": error.hint})
        if not self._keys:
            return self._headers
        timestamp = self._clock.now_us() // 1_000_000
        return {
            **self._headers,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature(self._keys, id, timestamp, body),
        }


def _header_value(variable: str) -> str:
    value = secret(variable)
    if value is None:
        raise ConfigError(f"{variable} is not set", hint=f"set it, or {variable}_FILE, to the value of the header")
    if len(value) > HEADER_CHARACTERS_MAX or not _HEADER_VALUE.fullmatch(value):
        raise ConfigError(
            f"{variable} is no value of a header",
            hint=f"one line of ASCII, up to {HEADER_CHARACTERS_MAX:,} characters",
        )
    return value

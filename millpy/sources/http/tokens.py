"""Bearer tokens of clients (RFC 6750): only their hashes are known here, and a comparison takes constant time.

A list of tokens has one token a line: a name, and the SHA-256 of the token in hexadecimal digits. A token is random and
long, so that its hash need not be slow.
"""

from __future__ import annotations

import hmac
import logging
import re
from hashlib import sha256

from millpy.clock import Clock
from millpy.config.secrets import secret
from millpy.errors import ConfigError

log = logging.getLogger(__name__)
TOKENS_VARIABLE = "MILLPY_INGEST_TOKENS"
TOKENS_MAX = 1_000
READ_EVERY_S = 10.0
"""Seconds after which the list is read again, so that a token can be added or withdrawn while workers run."""
_ENTRY = re.compile(r"([\w.@-]{1,100})\s+(?:sha256:)?([0-9a-fA-F]{64})")
_BEARER = re.compile(r"[Bb][Ee][Aa][Rr][Ee][Rr] +([\x21-\x7e]{1,512}) *")
_HINT = "one token a line: a name, and the SHA-256 of the token: printf %s TOKEN | sha256sum"


def parse_tokens(text: str) -> dict[bytes, str]:
    """Return the name of each token by its hash. Commas separate, too, and a comment begins with #.

    Raises:
        ConfigError: an entry is not a name and a hash. The message does not quote it.
    """
    found: dict[bytes, str] = {}
    entries = [entry for line in text.split("\n") for entry in line.partition("#")[0].split(",")]
    for number, entry in enumerate(map(str.strip, entries), 1):
        if not entry:
            continue
        parts = _ENTRY.fullmatch(entry)
        if parts is None:
            raise ConfigError(f"{TOKENS_VARIABLE}: entry {number} is not a name and a hash", hint=_HINT)
        found[bytes.fromhex(parts[2])] = parts[1]
    if not 0 < len(found) <= TOKENS_MAX:
        raise ConfigError(f"{TOKENS_VARIABLE} has {len(found)} tokens, and needs 1 to {TOKENS_MAX}", hint=_HINT)
    return found


class TokenList:
    """The tokens of MILLPY_INGEST_TOKENS, or of the file that MILLPY_INGEST_TOKENS_FILE names.

    Args:
        clock: tells when to read the list again.

    Raises:
        ConfigError: the list cannot be read.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._read_at = clock.monotonic()
        text = secret(TOKENS_VARIABLE)
        self._names: dict[bytes, str] | None = None if text is None else parse_tokens(text)

    @property
    def is_empty(self) -> bool:
        """Whether no list is set, so that requests need no token."""
        return self._names is None

    def name_of(self, authorization: str | None) -> str | None:
        """Return the name of the token in an Authorization header; None for an unknown token, and without one."""
        self._read_again()
        found = _BEARER.fullmatch(authorization or "")
        given = sha256((found[1] if found else "").encode()).digest()
        name = None
        for digest, own in (self._names or {}).items():
            if hmac.compare_digest(digest, given):
                name = own
        return name if found else None

    def _read_again(self) -> None:
        """Read the list again if it is due; keep the last one while it cannot be read."""
        now = self._clock.monotonic()
        if self._names is None or now - self._read_at < READ_EVERY_S:
            return
        self._read_at = now
        try:
            self._names = parse_tokens(secret(TOKENS_VARIABLE) or "")
        except ConfigError as error:
            log.warning("%s; the tokens read before stay valid", error.message, extra={"hint": error.hint})

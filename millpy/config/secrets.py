"""Secrets from the environment: the value of a variable, or the content of the file that its _FILE variable names.

Secrets go to another machine only encrypted, unless the user decides otherwise.
"""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Any

from millpy.errors import ConfigError

FILE = "_FILE"
_IN_URL = re.compile(r"(://[^\s/:@]*):(?!password@)\S*@")
_NAMES = (
    "password", "passwd", "pwd", "passphrase", "secret", "token", "api_key", "apikey", "access_key", "accesskey",
    "private_key", "credentials",
)  # fmt: skip
_ENCODED = "|".join("".join(f"(?:{c}|%{ord(c):x}|%{ord(c.upper()):x})" for c in name) for name in _NAMES)
# A value extends: if quoted, to its closing quote (an escaped quote does not close it); if quoted within a quoted text,
# to the last such quote of its line; otherwise to a space.
_QUOTED = "|".join(rf"[a-z]{{0,2}}&?{q}(?:(?:[^{q}\\]|\\++{q}?|{q}{q})*{q}|[\s\S]*)" for q in "'\"")
_VALUE = rf"{_QUOTED}|[bru]{{0,2}}\\+(['\"])(?:.*\\+\2|.*)|(?:\\\s|\S)+"
_NAMED = re.compile(
    rf"((?:{_ENCODED})(?:\\*['\"])?(?:\s*(?:=>?|:)\s*|\s+(?=(?:[a-z]&?)?\\*['\"])))(?:{_VALUE})", re.IGNORECASE
)
_OPTION = re.compile(rf"(--[\w-]*(?:{_ENCODED})\s+)(?:{_VALUE})", re.IGNORECASE)
_HEADER = re.compile(
    r"""(authorization\\*['"]?\s*[:=,]\s*\\*['"]?(?:bearer|basic|digest|token|apikey)\s+)[^\s'"\\]+""", re.IGNORECASE
)
_IS_NAME = re.compile(rf"(?:{_ENCODED})$", re.IGNORECASE)
HIDDEN = "***"


def secret(variable: str) -> str | None:
    """Return the value of VARIABLE, or the content of the file that VARIABLE_FILE names; None if neither is set.

    Line ends at the end of the file are ignored. Errors do not quote the value.

    Raises:
        ConfigError: both are set, the file cannot be read, or it is empty.
    """
    value, name = os.environ.get(variable), os.environ.get(variable + FILE)
    if value and name:
        raise ConfigError(f"{variable} and {variable}{FILE} are both set", hint="unset one of them")
    if not name:
        return value or None
    try:
        text = Path(name).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(
            f"{variable}{FILE}: cannot read {name}: {why}", hint=f"make it readable, or set {variable}"
        ) from None
    if not text:
        raise ConfigError(f"{variable}{FILE}: {name} is empty", hint=f"write the value of {variable} into it")
    return text


def redacted(text: str) -> str:
    """Replace the passwords in a foreign text (an error, a line of code) with `***`.

    It hides passwords in URLs, the content of an Authorization header, and each value behind a name that ends in
    `password`, `passwd`, `pwd`, `passphrase`, `secret`, `token`, `credentials`, `api_key`, `access_key` or
    `private_key`: after = or a colon, or as a command's option, and also percent-encoded, in quotes, in a repr, or in
    SQL. In doubt, it hides too much.
    """
    for pattern, shown in (
        (_HEADER, rf"\1{HIDDEN}"),
        (_IN_URL, rf"\1:{HIDDEN}@"),
        (_NAMED, rf"\1{HIDDEN}"),
        (_OPTION, rf"\1{HIDDEN}"),
    ):
        text = pattern.sub(shown, text)
    return text


def redacted_value(value: Any, name: str = "") -> Any:
    """Hide the passwords in a value and in the values inside it; hide all of it if `name` is that of a secret."""
    if _IS_NAME.search(name):
        return HIDDEN
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, bytes):
        return redacted(repr(value))
    if isinstance(value, dict):
        return {key: redacted_value(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [redacted_value(inner) for inner in value]
    return value if value is None or isinstance(value, bool | int | float) else _RedactedValue(value)


class _RedactedValue:
    """A stand-in whose repr is the redacted repr of a value."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        return redacted(repr(self._value))


def is_other_machine(host: str) -> bool:
    """Tell whether a host is another machine; an empty name and the path of a socket are this machine."""
    if not host or host[0] in "/@" or host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def goes_elsewhere(servers: str) -> bool:
    """Tell whether one of `host:port,other:port` is another machine."""
    return any(map(is_other_machine, hosts_of(servers)))


def hosts_of(servers: str) -> list[str]:
    """Return the hosts of `host:port,other:port`."""
    return [server.strip().rsplit(":", 1)[0].strip("[]") for server in servers.split(",")]

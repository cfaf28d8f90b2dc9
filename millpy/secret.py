"""Secrets from the environment: the value of a variable, or of the file that the variable with _FILE names.

None is sent unencrypted to another machine, unless the user says so.
"""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path

from millpy.errors import ConfigError

FILE = "_FILE"
_IN_URL = re.compile(r"""(://[^\s/:@'"]*):(?!password@)[^\s'"]*@""")
_NAMED = re.compile(r"""(\bpassword ?= ?)('[^']*'|"[^"]*"|[^\s,;&'")]+)""", re.IGNORECASE)


def secret(variable: str) -> str | None:
    """What VARIABLE says, or what is in the file that VARIABLE_FILE names; None when neither is set.

    The end of a file's last line does not count. Nothing that is read is quoted in an error.

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
        raise ConfigError(f"{variable}{FILE}: cannot read {name}: {why}", hint=f"or set {variable} itself") from None
    if not text:
        raise ConfigError(f"{variable}{FILE}: {name} is empty", hint=f"write the value of {variable} into it")
    return text


def redacted(text: str) -> str:
    """Text of somebody else's (an error, a line of code) without the passwords in its URLs, or after `password=`."""
    return _NAMED.sub(r"\1***", _IN_URL.sub(r"\1:***@", text))


def is_other_machine(host: str) -> bool:
    """Whether a host's name or address is none of this machine; an empty one or a socket's path is."""
    if not host or host[0] in "/@" or host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def goes_elsewhere(servers: str) -> bool:
    """Whether one of `host:port,other:port` is another machine."""
    return any(is_other_machine(server.strip().rsplit(":", 1)[0].strip("[]")) for server in servers.split(","))

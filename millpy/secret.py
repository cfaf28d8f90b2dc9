"""A setting that must not be seen by everybody: in the environment, or in a file that the environment names."""

from __future__ import annotations

import os
from pathlib import Path

from millpy.errors import ConfigError

FILE = "_FILE"


def secret(variable: str) -> str:
    """What the variable holds, or the file that `VARIABLE_FILE` names; empty for neither. Never quoted in an error.

    Raises:
        ConfigError: both are set, or the file cannot be read.
    """
    value, path = os.environ.get(variable, ""), os.environ.get(variable + FILE, "")
    if not path:
        return value
    if value:
        raise ConfigError(f"{variable} and {variable}{FILE} are both set", hint="unset one of them")
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        detail = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"{variable}{FILE}: cannot read {path}: {detail}", hint="name a file with the value"
        ) from None

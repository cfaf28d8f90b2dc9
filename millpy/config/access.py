"""How a source logs in at a broker, and how it verifies the broker: values that a graph's file names."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from millpy.errors import ConfigError
from millpy.model.arguments import check_texts


@dataclass(frozen=True, slots=True)
class Login:
    """A user's name and password at a broker.

    Attributes:
        username: the user name.
        password: the password; it appears in no repr, log line or error.
    """

    username: str | None = None
    password: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_texts('for example login=Login("me", secret)', username=self.username, password=self.password)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """An encrypted connection that verifies the broker's certificate and name.

    Attributes:
        ca: a file with the certificates to trust instead of the system's.
        certificate: a file with our certificate, for brokers that require one.
        key: the file with the certificate's key.
    """

    ca: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None

    def __post_init__(self) -> None:
        for name, path in {"ca": self.ca, "certificate": self.certificate, "key": self.key}.items():
            if not isinstance(path, str | Path | None):
                raise ConfigError(f"{name}={path!r} is not the path of a file", hint='for example Tls(ca="ca.pem")')
        if self.key is not None and self.certificate is None:
            raise ConfigError("Tls(key=…) needs a certificate", hint="name it with certificate=")


NO_LOGIN = Login()
NO_FILES = Tls()


def files_of(tls: Tls | bool | None) -> Tls:
    """Return the files that a source's `tls=` names; none for True, False or None. Raises ConfigError for others."""
    if not isinstance(tls, Tls | bool | None):
        raise ConfigError(f"tls={tls!r} is not a Tls, True or False", hint='for example tls=Tls(ca="ca.pem")')
    return tls if isinstance(tls, Tls) else NO_FILES


def text_of(path: str | Path | None) -> str | None:
    """Return a path as text."""
    return None if path is None else str(path)

"""Settings from the environment, validated once and frozen.

MILLPY_DATABASE_URL        the database; without it `millpy run` embeds one
MILLPY_DATABASE_PASSWORD   its password, if the URL has none; …_FILE names a file for either of these two
MILLPY_READER_DATABASE_URL the same database as a role that only reads, for `millpy analytics`; also as …_FILE
MILLPY_HTTP                the address at which a service serves health and metrics (127.0.0.1:8080)
MILLPY_LEASE_S             the lease of a worker, in seconds
MILLPY_OWNER_DATABASE_URL  the same database as its owner, for `millpy api` to switch generations; also as …_FILE
MILLPY_SOURCE_DATABASE_URL the database of the tables that sources read, if it is another one; also as …_FILE
MILLPY_API                 the address of the API (127.0.0.1:8090)
MILLPY_API_CERTIFICATE     a file with the API's certificate, and MILLPY_API_KEY the file with its key, for TLS
MILLPY_API_CONNECTIONS_MAX connections to the database that read for all users of the API together (4)
MILLPY_API_NICE            how far the API steps back from other processes when processors are short: 0 to 19 (5)
MILLPY_API_SESSION_S       seconds after which a session of the page ends (43200)
MILLPY_API_PROXIES         addresses or networks of reverse proxies, with commas
MILLPY_API_IDENTITY_HEADER the header in which these proxies name the user
MILLPY_LOG_LEVEL           debug, info (default), warning, error
MILLPY_LOG_FORMAT          console (default) or json
MILLPY_ARCHIVE             the directory or the URL of an object store into which an archiver writes
MILLPY_ARCHIVE_IN_WORKERS  1 for workers that write the archives themselves, into a directory (0)
MILLPY_ARCHIVE_EVERY_S     seconds between two files of an archive that keeps up (10)
MILLPY_ARCHIVE_KEPT_S      seconds after which an archived hour is deleted (never)
MILLPY_ARCHIVE_COMPACT_AFTER_S
                           seconds without a new file of an hour until its small files are merged (3600)
MILLPY_<LIMIT>             any other bound of `limits.py` by its name, e.g. MILLPY_BUNDLE_RECORDS_MAX
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import logging
import os
import sys
import typing
from typing import Any, Literal, TextIO

import structlog
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from millpy.config.database_url import complete
from millpy.config.escape import visible, visible_lines
from millpy.config.secrets import FILE, redacted, redacted_value, secret
from millpy.errors import ConfigError
from millpy.limits import Limits

PREFIX = "MILLPY_"
DATABASE_URL = PREFIX + "DATABASE_URL"
DATABASE_PASSWORD = PREFIX + "DATABASE_PASSWORD"
READER_URL = PREFIX + "READER_DATABASE_URL"
OWNER_URL = PREFIX + "OWNER_DATABASE_URL"
SOURCE_URL = PREFIX + "SOURCE_DATABASE_URL"
_ALIASES = {"lease_s": "lease_ttl_s"}


class Settings(BaseSettings):
    """The settings of a process. Create them with `load()`, which raises readable errors."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore", env_ignore_empty=True)

    database_url: str | None = Field(default=None, repr=False)
    http: str = "127.0.0.1:8080"
    archive: str = ""
    archive_in_workers: bool = False
    archive_every_s: float = Field(default=10.0, ge=0)
    archive_kept_s: float | None = Field(default=None, ge=0)
    archive_compact_after_s: float = Field(default=3600.0, ge=0)
    api: str = "127.0.0.1:8090"
    api_certificate: str = ""
    api_key: str = ""
    api_connections_max: int = Field(default=4, ge=1, le=100)
    api_nice: int = Field(default=5, ge=0, le=19)
    api_session_s: float = Field(default=43_200.0, gt=0, le=31_536_000)
    api_proxies: str = ""
    api_identity_header: str = ""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"

    @classmethod
    def load(cls, **overrides: Any) -> Settings:
        """Read the environment; overrides that are neither None nor empty take precedence.

        Raises:
            ConfigError: a setting is invalid; the message names the variable.
        """
        _refuse_misspelled()
        given = {name: value for name, value in overrides.items() if value not in (None, "")}
        if url := given.get("database_url") or secret(DATABASE_URL):
            given["database_url"] = complete(url, secret(DATABASE_PASSWORD))
        try:
            return cls(**given)
        except ValidationError as error:
            first = error.errors()[0]
            name = PREFIX + str(first["loc"][0]).upper()
            raise ConfigError(f"{name}: {first['msg'].lower()}", hint=f"correct the value {first['input']!r}") from None

    def only_archiving(self) -> Settings:
        """Return the settings of an archiver, which runs beside workers."""
        return self.model_copy(update={"archive_in_workers": False})

    @property
    def limits(self) -> Limits:
        """The default bounds, overridden by the environment.

        Raises:
            ConfigError: a bound is not a number, or contradicts another.
        """
        kinds = typing.get_type_hints(Limits)
        given: dict[str, Any] = {}
        variables = []
        for variable, name in _limit_variables().items():
            text = os.environ.get(variable, "")
            if not text:
                continue
            variables.append(variable)
            try:
                given[name] = kinds[name](text.replace("_", ""))
            except ValueError:
                what = "a whole number" if kinds[name] is int else "a number"
                raise ConfigError(f"{variable}: {text!r} is not {what}", hint=f"give {what}, or unset it") from None
        try:
            return Limits(**given)
        except AssertionError as error:
            raise ConfigError(f"invalid limits: {error}", hint=f"correct {', '.join(sorted(variables))}") from None


def configure_logging(settings: Settings) -> None:
    """Send the log to standard error, for the console or as JSON lines."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: Any
    if settings.log_format == "json":
        shared.append(structlog.processors.format_exc_info)
        renderer = structlog.processors.JSONRenderer(default=lambda value: redacted(repr(value)))
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=_wants_colors(), exception_formatter=_visible_traceback)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _redacted_values,
                *([] if settings.log_format == "json" else [_visible_values]),  # JSON escapes by itself
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("millpy").setLevel(settings.log_level.upper())
    # psycopg warns of each aborted transaction in a pipeline; a fence or a turned ring aborts one, and we log that.
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _redacted_values(_logger: object, _name: str, event: Any) -> Any:
    """Hide passwords in the message and its values; `_visible_traceback` handles tracebacks."""
    return {name: value if name == "exc_info" else redacted_value(value, str(name)) for name, value in event.items()}


def _visible_values(_logger: object, _name: str, event: Any) -> Any:
    """Escape the message and its texts, so that they stay on one line; other values are shown as reprs."""
    return {visible(name): visible(value) if isinstance(value, str) else value for name, value in event.items()}


def _visible_traceback(out: TextIO, error: Any) -> None:
    """Write a traceback indented, so that no line of an error's text looks like a line of the log."""
    text = io.StringIO()
    structlog.dev.plain_traceback(text, error)
    out.write(visible_lines(redacted(text.getvalue()), indent="  "))


def _wants_colors() -> bool:
    """Tell whether to use colors: on a terminal or with FORCE_COLOR, but not with NO_COLOR (no-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stderr.isatty()


def _limit_variables() -> dict[str, str]:
    names = {PREFIX + field.name.upper(): field.name for field in dataclasses.fields(Limits)}
    return names | {PREFIX + alias.upper(): name for alias, name in _ALIASES.items()}


def _refuse_misspelled() -> None:
    """Raise ConfigError for a variable that is nearly one of ours, which would otherwise be ignored silently."""
    known = {PREFIX + name.upper() for name in Settings.model_fields} | _limit_variables().keys()
    for secret_name in (DATABASE_URL, DATABASE_PASSWORD, READER_URL, OWNER_URL, SOURCE_URL):
        known |= {secret_name, secret_name + FILE}
    for variable in os.environ:
        if variable.startswith(PREFIX) and variable not in known:
            close = difflib.get_close_matches(variable, known, n=1, cutoff=0.85)
            if close:
                raise ConfigError(f"unknown setting {variable}", hint=f"did you mean {close[0]}?")

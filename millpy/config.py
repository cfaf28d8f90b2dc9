"""Settings from the environment, validated once and frozen.

MILLPY_DATABASE_URL   the database; without it `millpy run` embeds one
MILLPY_DATABASE_PASSWORD   its password, when the URL has none; each of these two also as a file, named by …_FILE
MILLPY_HTTP           where a service answers for its health and metrics (127.0.0.1:8080)
MILLPY_LEASE_S        the lease of a worker, seconds
MILLPY_LOG_LEVEL      debug, info (default), warning, error
MILLPY_LOG_FORMAT     console (default) or json
MILLPY_<LIMIT>        any other bound of `limits.py` by its name, e.g. MILLPY_BUNDLE_RECORDS_MAX
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

from millpy.database_url import complete
from millpy.errors import ConfigError
from millpy.limits import Limits
from millpy.secret import FILE, redacted, redacted_value, secret
from millpy.visible import visible, visible_lines

PREFIX = "MILLPY_"
DATABASE_URL = PREFIX + "DATABASE_URL"
DATABASE_PASSWORD = PREFIX + "DATABASE_PASSWORD"
_ALIASES = {"lease_s": "lease_ttl_s"}


class Settings(BaseSettings):
    """What a process is told from outside. Make it with `load()`, which words its errors for people."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore", env_ignore_empty=True)

    database_url: str | None = Field(default=None, repr=False)
    http: str = "127.0.0.1:8080"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"

    @classmethod
    def load(cls, **overrides: Any) -> Settings:
        """Read the environment; what is given here and is neither None nor empty comes first.

        Raises:
            ConfigError: a setting cannot be used; names the variable.
        """
        _refuse_misspelt()
        given = {name: value for name, value in overrides.items() if value not in (None, "")}
        if url := given.get("database_url") or secret(DATABASE_URL):
            given["database_url"] = complete(url, secret(DATABASE_PASSWORD))
        try:
            return cls(**given)
        except ValidationError as error:
            first = error.errors()[0]
            name = PREFIX + str(first["loc"][0]).upper()
            raise ConfigError(f"{name}: {first['msg'].lower()}", hint=f"it is {first['input']!r}") from None

    @property
    def limits(self) -> Limits:
        """The default bounds with those of the environment put over them.

        Raises:
            ConfigError: a bound is no number, or contradicts another.
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
                raise ConfigError(f"{variable}: {text!r} is not {what}", hint="unset it for the default") from None
        try:
            return Limits(**given)
        except AssertionError as error:
            raise ConfigError(
                f"the limits cannot be: {error}", hint=f"look at {', '.join(sorted(variables))}"
            ) from None


def configure_logging(settings: Settings) -> None:
    """Send the log to standard error, for people or as JSON lines."""
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
        renderer = structlog.dev.ConsoleRenderer(colors=_wants_colours(), exception_formatter=_visible_traceback)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _redacted_values,
                *([] if settings.log_format == "json" else [_visible_values]),  # JSON has escapes of its own
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("millpy").setLevel(settings.log_level.upper())
    # It warns of each transaction that is aborted in a pipeline; a fence or a turned ring does that, and we say so.
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _redacted_values(_logger: object, _name: str, event: Any) -> Any:
    """What is said, and the values with it, without passwords; a traceback is taken care of where it is written."""
    return {name: value if name == "exc_info" else redacted_value(value, str(name)) for name, value in event.items()}


def _visible_values(_logger: object, _name: str, event: Any) -> Any:
    """What is said, and texts with it, on one line that acts on no terminal; of other values reprs are shown."""
    return {visible(name): visible(value) if isinstance(value, str) else value for name, value in event.items()}


def _visible_traceback(out: TextIO, error: Any) -> None:
    """Indented, so that no line of an error's text begins as one of the log's."""
    text = io.StringIO()
    structlog.dev.plain_traceback(text, error)
    out.write(visible_lines(redacted(text.getvalue()), indent="  "))


def _wants_colours() -> bool:
    """A terminal does, and whoever says so by FORCE_COLOR; nobody who sets NO_COLOR (no-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stderr.isatty()


def _limit_variables() -> dict[str, str]:
    names = {PREFIX + field.name.upper(): field.name for field in dataclasses.fields(Limits)}
    return names | {PREFIX + alias.upper(): name for alias, name in _ALIASES.items()}


def _refuse_misspelt() -> None:
    """A variable that is nearly one of ours would be ignored in silence."""
    known = {PREFIX + name.upper() for name in Settings.model_fields} | _limit_variables().keys()
    known |= {DATABASE_URL + FILE, DATABASE_PASSWORD, DATABASE_PASSWORD + FILE}
    for variable in os.environ:
        if variable.startswith(PREFIX) and variable not in known:
            close = difflib.get_close_matches(variable, known, n=1, cutoff=0.85)
            if close:
                raise ConfigError(f"there is no setting {variable}", hint=f"did you mean {close[0]}?")

"""Settings: the environment, validated once, with readable errors."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from millpy.config.settings import Settings
from millpy.errors import ConfigError
from millpy.limits import Limits


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("MILLPY_"):
            monkeypatch.delenv(name)


def test_defaults_are_those_of_limits() -> None:
    settings = Settings.load()

    assert settings.database_url is None
    assert settings.limits == Limits()


def test_environment_overrides_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPY_LEASE_S", "1")
    monkeypatch.setenv("MILLPY_BUNDLE_RECORDS_MAX", "1_000")

    assert Settings.load().limits == Limits(lease_ttl_s=1.0, bundle_records_max=1000)


def test_argument_overrides_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPY_DATABASE_URL", "postgresql://localhost/one")

    assert Settings.load(database_url="postgresql://localhost/two").database_url == "postgresql://localhost/two"
    assert Settings.load(database_url=None).database_url == "postgresql://localhost/one"


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("MILLPY_LOG_LEVEL", "loud", "MILLPY_LOG_LEVEL"),
        ("MILLPY_LEASE_S", "soon", "MILLPY_LEASE_S: 'soon' is not a number"),
        ("MILLPY_LEASE_S", "inf", "lease_ttl_s must be a number from 0, not inf"),
        ("MILLPY_PROGRESS_EVERY_S", "nan", "progress_every_s must be a number from 0, not nan"),
        ("MILLPY_RECORD_BYTES_MAX", "-1", "record_bytes_max must be a number from 0, not -1"),
        ("MILLPY_RECORD_BYTES_MAX", "0", "record_bytes_max must be above 0"),
        ("MILLPY_BUNDLE_RECORDS_MAX", "1.5", "not a whole number"),
        ("MILLPY_BUNDLE_BYTES_MAX", "10", "a legal record must fit in a bundle"),
        ("MILLPY_LEASE_S", "0.1", "a lease of 0.1 s is shorter than 0.5 s"),
        ("MILLPY_LEASE_SS", "3", "unknown setting MILLPY_LEASE_SS"),
    ],
)
def test_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, complaint: str) -> None:
    monkeypatch.setenv(name, value)

    with pytest.raises(ConfigError, match=complaint):
        _ = Settings.load().limits


def test_no_setting_of_the_documentation_is_taken_for_a_misspelled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "settings.md").read_text()
    documented = set(re.findall(r"`(MILLPY_[A-Z0-9_]+[A-Z0-9])`", page))
    assert "MILLPY_SOURCE_DATABASE_URL_FILE" in documented

    refused = []
    for name in documented:
        with monkeypatch.context() as environment:
            environment.setenv(name, "/nowhere" if name.endswith("_FILE") else "1")
            try:
                Settings.load()
            except ConfigError as error:
                refused += [name] if "unknown setting" in error.message else []
    assert refused == []


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings.load().log_level = "debug"  # type: ignore[misc]


def test_docstring_of_limits_describes_every_field() -> None:
    described = set(re.findall(r"\w+", Limits.__doc__ or ""))

    assert {field.name for field in dataclasses.fields(Limits)} <= described


LARGE = {"MB": 1_000_000.0, "days": 86_400.0, "": 1.0}


def documented_defaults() -> dict[str, float]:
    """Bound -> its default on the page of settings, where that is a number."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "settings.md").read_text().replace("a week", "7 days")
    found = {}
    for names, default in re.findall(r"^\| (`MILLPY_[^|]+) \| ([^|]+) \|", page, re.MULTILINE):
        values = re.split(r"[;,] ", default)
        variables = re.findall(r"`MILLPY_(\w+)`", names)
        for name, value in zip(variables, values * len(variables) if len(values) == 1 else values, strict=False):
            if number := re.fullmatch(r"([0-9.,]+) ?(MB|days|)", value):
                found[name.lower()] = float(number[1].replace(",", "")) * LARGE[number[2]]
    return found


def test_defaults_of_the_documentation_are_those_of_the_code() -> None:
    defaults = {field.name: getattr(Limits(), field.name) for field in dataclasses.fields(Limits)}
    defaults |= {name: field.default for name, field in Settings.model_fields.items()}
    documented = documented_defaults()
    documented["lease_ttl_s"] = documented.pop("lease_s")

    assert {name: defaults[name] for name in documented} == documented
    of_memory = {"open_windows_bytes_max", "unfired_windows_bytes_max", "join_bytes_max"}
    assert {field.name for field in dataclasses.fields(Limits)} - documented.keys() == of_memory

"""Findings: what `millpy doctor` reports about a database or a source."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """How serious a finding is, in ascending order."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        check: the subject of the check, in two or three words.
        found: what the check found.
        meaning: why it matters; empty when all is well.
        action: what to do; empty when all is well.
    """

    severity: Severity
    check: str
    found: str
    meaning: str = ""
    action: str = ""


def unencrypted_password(found: str, action: str) -> Finding:
    """Return a warning about a password that crosses a network unencrypted."""
    return Finding(Severity.WARNING, "broker encryption", found, "an eavesdropper can log in with the password", action)

"""The arguments of a crash test, checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from millpy.errors import UsageError

WORKERS_MAX = 16
FAULTS_MAX = 10_000


class FaultKind(StrEnum):
    """What can happen to a running graph."""

    KILL = "kill"
    FREEZE = "freeze"
    DB = "db"
    NETWORK = "network"
    BROKER = "broker"


MEANINGS = {
    FaultKind.KILL: "SIGKILL a worker, start another in its place",
    FaultKind.FREEZE: "SIGSTOP a worker past its lease, then SIGCONT",
    FaultKind.DB: "SIGKILL PostgreSQL and restart it (a given server: terminate all connections of the workers)",
    FaultKind.NETWORK: "cut, stall, or swallow the answer to COMMIT between a worker and the database",
    FaultKind.BROKER: "SIGKILL the MQTT broker and restart it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One crash test.

    Attributes:
        graph: the location of the graph, `factory.py` or `factory.py:name`.
        inputs: `FILE` or `STREAM=FILE`, each replaces an injector's source.
        generate: the number of records to generate for each injector without an input; None for none.
        count: the number of faults.
        faults: the kinds from which they are drawn.
        lease_s: the lease of the workers; short, so that takeovers are quick.
        database_url: a database to run in; None embeds one.
        sql: a file of SQL that makes the tables in which the graph looks up, run once before the graph is.
        report: the HTML file; the JSON file stands beside it.
        keep: whether to keep databases, logs and feeds.
    """

    graph: str
    inputs: tuple[str, ...] = ()
    generate: int | None = None
    count: int = 20
    workers: int = 3
    seed: int = 1
    faults: tuple[FaultKind, ...] = (FaultKind.KILL,)
    lease_s: float = 1.0
    database_url: str | None = None
    sql: Path | None = None
    report: Path = Path("crash-test.html")
    keep: bool = False

    def __post_init__(self) -> None:
        for what, value, least, most in (
            ("--kills", self.count, 1, FAULTS_MAX),
            ("--workers", self.workers, 1, WORKERS_MAX),
            ("--generate", 1 if self.generate is None else self.generate, 1, 100_000_000),
        ):
            if not least <= value <= most:
                raise UsageError(f"invalid {what}: {value}", hint=f"give a number from {least} to {most}")
        if self.sql is not None and not self.sql.is_file():
            raise UsageError(f"there is no file {self.sql}", hint="--sql names a file with SQL statements")
        if self.report.suffix != ".html":
            raise UsageError(
                f"--report must name an .html file, not {self.report}", hint="the JSON file is written beside it"
            )
        if not self.report.absolute().parent.is_dir():
            raise UsageError(f"there is no directory {self.report.absolute().parent}", hint="create it first")


def fault_kinds(words: Iterable[str]) -> tuple[FaultKind, ...]:
    """Return the named kinds, each once, in the order of `FaultKind`.

    Raises:
        UsageError: a word names no kind of fault, or the text is empty.
    """
    named = {word.strip() for word in words if word.strip()}
    known = {kind.value for kind in FaultKind}
    if unknown := sorted(named - known):
        raise UsageError(f"unknown fault {unknown[0]!r}", hint=f"choose from: {', '.join(FaultKind)}")
    if not named:
        raise UsageError("--faults names no fault", hint=f"choose from: {', '.join(FaultKind)}")
    return tuple(kind for kind in FaultKind if kind.value in named)

"""A mutant: one change to one file that breaks a promise, and the tests that notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of text.

    Attributes:
        file: path below the root of the tree.
        old: text that occurs exactly once in it.
        new: what takes its place.
        killers: pytest's names of the tests one of which must fail; as few and as quick as will do.
        equivalent: why no test can notice, for a change that changes nothing anybody can see; such a mutant is listed
            so that nobody tries it again.
        line: how a line of docs/guarantees.md begins that this change breaks; its killers are tests that the line names.
    """

    file: str
    old: str
    new: str
    killers: tuple[str, ...] = ()
    equivalent: str = ""
    line: str = ""

    def __str__(self) -> str:
        def line(text: str) -> str:
            return " ".join(text.split())[:60]

        return f"{self.file}: {line(self.old)!r} -> {line(self.new)!r}"

    def fault(self) -> str:
        """Why this entry cannot be played; empty when it can."""
        path = ROOT / self.file
        if not path.exists():
            return "there is no such file"
        found = path.read_text().count(self.old)
        if found != 1:
            return f"its text occurs {found} times"
        if self.old == self.new:
            return "it changes nothing"
        if bool(self.killers) == bool(self.equivalent):
            return "it needs killers, or a reason why it is equivalent"
        missing = [name for name in self.killers if not _exists(name)]
        return f"no such test: {missing[0]}" if missing else ""


def _exists(killer: str) -> bool:
    """Whether a file is there, and a test in it or in a suite that it takes its tests from."""
    file, *names = killer.partition("[")[0].split("::")
    path = ROOT / file
    if not path.is_file():
        return False
    places = [path, *path.parent.glob("*_suite.py")] if len(names) == 2 else [path]
    return not names or any(f"def {names[-1]}(" in place.read_text() for place in places)

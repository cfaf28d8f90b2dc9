"""Names for parts of paths: `data/{site}/{device}_*.csv` matches what `data/*/*_*.csv` does, and fills two fields."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from millpy.errors import ConfigError
from millpy.ingest.named_text import NAMED, NamedText, check_named
from millpy.model.record import RecordType

_WITHIN = "[^/]*?"


@dataclass(frozen=True, slots=True)
class NamedPath:
    """A path or a pattern with names for parts of it.

    A name stands for as few characters as fit, none of them a slash.

    Attributes:
        pattern: the pattern with `*` instead of each name.
        names: the names, in their order.
        text: matches a whole path, and has a group for each name.
    """

    pattern: str
    names: tuple[str, ...]
    text: re.Pattern[str]

    @staticmethod
    def parse(text: str, directory: str = "") -> NamedPath:
        """Parse a pattern below a directory, whose own name has no wildcards; by default a whole path.

        Raises:
            ConfigError: two parts have the same name, or nothing separates two parts.
        """
        plain, names, found = [], [], "" if not directory else re.escape(str(Path(directory) / "_")[:-1])
        parts = Path(text).parts
        for index, part in enumerate(parts):
            if part == "**":
                plain.append(part)
                found += "(?:[^/]+/)*?" + ("[^/]+" if index == len(parts) - 1 else "")
                continue
            within = _Component(text, part)
            plain.append(within.pattern)
            names += within.names
            found += within.text + ("/" if index < len(parts) - 1 and part != "/" else "")
        if len(set(names)) < len(names):
            raise ConfigError(f"two parts of {text!r} have the same name", hint="rename one: each fills a field")
        return NamedPath(str(Path(*plain)) if names else text, tuple(names), re.compile(found, re.DOTALL))


class _Component:
    """A component of a pattern, taken apart. Raises ConfigError."""

    def __init__(self, whole: str, part: str) -> None:
        self.pattern, self.text, self.names = "", "", list[str]()
        place = 0
        while place < len(part):
            named, bracket = NAMED.match(part, place), _bracket(part, place)
            sign = named[0] if named else bracket or part[place]
            if named and self.text.endswith("*?)"):
                raise ConfigError(
                    f"nothing separates {named[0]} from the part before it in {whole!r}", hint='write "{a}_{b}.csv"'
                )
            if sign == "*" and self.text.endswith("*?)"):
                raise ConfigError(f"nothing separates * from the part before it in {whole!r}", hint='write "{a}_*.csv"')
            if named:
                self.names.append(named[1])
                self.text += f"(?P<{named[1]}>{_WITHIN})"
            elif bracket:
                self.text += fnmatch.translate(bracket).rpartition(")")[0].removeprefix("(?s:")
            else:
                self.text += {"*": f"(?:{_WITHIN})", "?": "[^/]"}.get(sign, re.escape(sign))
            self.pattern += "*" if named else sign
            place += len(sign)


def _bracket(part: str, place: int) -> str:
    """Return the set of characters that begins at a place, such as `[a-z]`, as fnmatch finds its end; "" for none."""
    if part[place] != "[":
        return ""
    begin = place + 1 + (part[place + 1 : place + 2] == "!")
    end = part.find("]", begin + 1)
    return "" if end < 0 else part[place : end + 1]


class PathFields:
    """What the named parts of paths write into the records of a file.

    Args:
        paths: the paths and patterns; the first that matches a file names its parts.
        record_type: the type of the records.
    """

    def __init__(self, paths: Sequence[NamedPath], record_type: RecordType) -> None:
        self._paths = [(path, NamedText(path.names, record_type)) for path in paths if path.names]
        self._known: tuple[str, bytes, tuple[str, ...]] | None = None

    def find(self, path: str) -> tuple[bytes, tuple[str, ...]]:
        """Return the end of the JSON of each record of a file, and the names in it; nothing if no part has a name."""
        if self._known is None or self._known[0] != path:
            self._known = (path, *self._search(path))
        return self._known[1:]

    def _search(self, path: str) -> tuple[bytes, tuple[str, ...]]:
        for named, fields in self._paths:
            if match := named.text.fullmatch(str(Path(path))):
                return fields.ending([match[name] for name in named.names]), fields.encoded
        return b"", ()


def check_paths(paths: Sequence[NamedPath], record_type: RecordType) -> None:
    """Check that each name is a field that can hold a text. Raises GraphError."""
    for path in paths:
        check_named(path.names, record_type, "part of a path")

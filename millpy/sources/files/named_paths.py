"""Names for parts of paths: `data/{site}/{device}_*.csv` matches what `data/*/*_*.csv` does, and fills two fields."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from millpy.errors import ConfigError
from millpy.formats import Format
from millpy.ingest.named_text import NAMED, NamedText, check_named
from millpy.model.record import RecordType

_ANY_DEPTH = "**"


@dataclass(frozen=True, slots=True)
class NamedPath:
    """A path or a pattern with names for parts of it.

    Attributes:
        pattern: the pattern with `*` instead of each name.
        names: the names, in their order.
        parts: its components, with the names; empty without any.
        directory: where the pattern begins, a name without wildcards; None for a whole path.
    """

    pattern: str
    names: tuple[str, ...]
    parts: tuple[str, ...]
    directory: str | None = None

    @staticmethod
    def parse(text: str, directory: str | None = None) -> NamedPath:
        """Parse a pattern below a directory; by default a whole path, which has no names if it is a file's name.

        Raises:
            ConfigError: two parts have the same name, or nothing separates two parts.
        """
        if NAMED.search(text) is None or (directory is None and Path(text).is_file()):
            return NamedPath(text, (), (), directory)
        parts = Path(text).parts
        names = [found[1] for part in parts for found in _pieces(part) if isinstance(found, re.Match)]
        if len(set(names)) < len(names):
            raise ConfigError(f"two parts of {text!r} have the same name", hint="rename one: each fills a field")
        for part in parts:
            _check_apart(part, text)
        plain = ["".join("*" if isinstance(piece, re.Match) else piece for piece in _pieces(part)) for part in parts]
        return NamedPath(str(Path(*plain)) if names else text, tuple(names), parts, directory)

    def find(self, path: str) -> dict[str, str] | None:
        """Return the text that each name stands for in a path; None if the pattern does not match it.

        A name stands for as few characters as fit, and `**` for as few directories.
        """
        if path == self.pattern and not self.names:
            return {}
        found = Path(path)
        if self.directory is not None and not found.is_relative_to(self.directory):
            return None
        below = found if self.directory is None else found.relative_to(self.directory)
        matches = _aligned(self.parts or Path(self.pattern).parts, below.parts)
        if matches is None:
            return None
        return {name: text for match in matches for name, text in match.groupdict().items() if name in self.names}


def _aligned(parts: Sequence[str], names: Sequence[str]) -> list[re.Match[str]] | None:
    """Match the components of a pattern with those of a path; None if they do not fit."""
    parts = (*parts, "*") if parts and parts[-1] == _ANY_DEPTH else parts
    patterns = [None if part == _ANY_DEPTH else _compiled(part) for part in parts]
    # Whether the components from one place on match those of the path from another on, the last places first.
    fits = [[*([False] * len(names)), True]]
    for pattern in reversed(patterns):
        behind, row = fits[0], [pattern is None and fits[0][-1]]
        for place in range(len(names) - 1, -1, -1):
            if pattern is None:
                row.insert(0, behind[place] or row[0])
            else:
                row.insert(0, behind[place + 1] and pattern.match(names[place]) is not None)
        fits.insert(0, row)
    if not fits[0][0]:
        return None
    matches, place = [], 0
    for index, pattern in enumerate(patterns, 1):
        if pattern is None:
            while not fits[index][place]:
                place += 1
            continue
        match = pattern.match(names[place])
        assert match is not None, names
        matches.append(match)
        place += 1
    return matches


def _pieces(part: str) -> list[str | re.Match[str]]:
    """Take a component apart: a match for each name, and text, in which sets such as `[a-z]` stay whole."""
    found: list[str | re.Match[str]] = []
    place = 0
    while place < len(part):
        named = NAMED.match(part, place)
        piece: str | re.Match[str] = named or _set_at(part, place) or part[place]
        found.append(piece)
        place += len(piece if isinstance(piece, str) else piece[0])
    return found


def _set_at(part: str, place: int) -> str:
    """Return the set of characters that begins at a place, as fnmatch finds its end; "" for none."""
    if part[place] != "[":
        return ""
    begin = place + 1 + (part[place + 1 : place + 2] == "!")
    end = part.find("]", begin + 1)
    return "" if end < 0 else part[place : end + 1]


def _check_apart(part: str, whole: str) -> None:
    """Check that there is text between each name and the next wildcard. Raises ConfigError."""
    before: str | re.Match[str] = ""
    for piece in _pieces(part):
        pair = [one for one in (before, piece) if isinstance(one, re.Match)]
        if pair and all(isinstance(one, re.Match) or one == "*" for one in (before, piece)):
            raise ConfigError(
                f"nothing separates {pair[-1][0]} from the wildcard beside it in {whole!r}",
                hint='write text between them, as in "{site}_{device}_*.csv"',
            )
        before = piece


def _compiled(part: str) -> re.Pattern[str]:
    """Return a pattern of a component, with a group for each name.

    As in fnmatch, each wildcard takes the first place at which the text behind it fits, and never another: so matching
    is linear in the wildcards, whatever the name is.
    """
    runs: list[tuple[str, str]] = [("", "")]  # a wildcard, and the fixed text behind it
    for piece in _pieces(part):
        if isinstance(piece, re.Match):
            runs.append((f"(?P<{piece[1]}>.*?)", ""))
        elif piece == "*":
            runs.append((".*?", ""))
        else:
            runs[-1] = (runs[-1][0], runs[-1][1] + fnmatch.translate(piece).rpartition(")")[0].removeprefix("(?s:"))
    (_, begin), *behind = runs
    text = begin
    for number, (wildcard, fixed) in enumerate(behind):
        if number == len(behind) - 1:
            text += wildcard.replace(".*?", ".*") + fixed
        else:
            # No name has such a letter.
            text += f"(?=(?P<ä{number}>{wildcard}{fixed}))(?P=ä{number})"
    return re.compile(f"(?s:{text})\\Z")


def check_paths(paths: Sequence[NamedPath], record_type: RecordType, format: Format | None) -> None:
    """Check that each name is a field that can hold a text, and that nothing else fills. Raises GraphError."""
    for path in paths:
        check_named(path.names, record_type, "part of a path", format)


class PathFields:
    """What the named parts of paths write into the records of a file.

    Args:
        paths: the paths and patterns; the first that matches a file names its parts.
        record_type: the type of the records.
    """

    def __init__(self, paths: Sequence[NamedPath], record_type: RecordType) -> None:
        has_names = any(path.names for path in paths)
        self._paths = [(path, NamedText(path.names, record_type)) for path in paths] if has_names else []
        self._known: tuple[str, bytes, tuple[str, ...]] | None = None

    def find(self, path: str) -> tuple[bytes, tuple[str, ...]]:
        """Return the end of the JSON of each record of a file, and the names in it; nothing if no part has a name."""
        if self._known is None or self._known[0] != path:
            self._known = (path, *self._search(path))
        return self._known[1:]

    def _search(self, path: str) -> tuple[bytes, tuple[str, ...]]:
        for named, fields in self._paths:
            if (texts := named.find(path)) is not None:
                return fields.ending([texts[name] for name in named.names]) if named.names else b"", fields.encoded
        assert not self._paths, f"no path matches {path}"
        return b"", ()

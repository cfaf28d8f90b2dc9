"""The rows that a look at a polled table finds: late ones of the last value, and those that follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any

import psycopg
from psycopg import sql

from millpy.sources.postgres.polled_position import Key, PolledPosition
from millpy.sources.postgres.table_checks import SortColumn, TableFacts
from millpy.sources.postgres.table_copy import QUERY_ROWS_MAX, CopyPiece, KeyRange, equal_pairs, pieces

_OF_ONE_TEXT = ("integer", "date", "timestamp with time zone", "timestamp without time zone")
"""Types whose equal values have the same text, so that the server need not compare them."""


@dataclass(slots=True)
class UnreadRows:
    """Rows that come before the last one, and were not read before.

    Attributes:
        piece: these rows.
        seen: the keys of all rows that were passed, those read before, too, in the order of the table.
        behind: for each row, how many of them are at or before it.
    """

    piece: CopyPiece = field(default_factory=lambda: CopyPiece([], [], []))
    seen: list[Key] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)

    def add(self, piece: CopyPiece) -> None:
        """Add rows of the same columns."""
        if not self.piece.rows:
            self.piece = CopyPiece(piece.columns, [], [])
        self.behind.extend(range(len(self.seen) + 1, len(self.seen) + len(piece.keys) + 1))
        self.seen.extend(piece.keys)
        self.piece.rows.extend(piece.rows)
        self.piece.keys.extend(piece.keys)


def late_rows(
    connection: psycopg.Connection[Any],
    table: sql.Identifier,
    facts: TableFacts,
    position: PolledPosition,
    *,
    rows_max: int,
    bytes_max: int,
) -> Iterator[UnreadRows]:
    """Yield the rows of the last value that are behind the floor and not behind the last row, and were not read.

    The keys of all are read first, and then the rows among them that are not known.
    """
    known, after = frozenset(position.ahead), position.floor or None
    of_keys = replace(facts, columns=tuple(dict.fromkeys(facts.key_names)))
    wanted = KeyRange(after, position.key, of_one_value=True)
    found, size = UnreadRows(), 0
    for piece in pieces(connection, table, of_keys, wanted, rows_max=QUERY_ROWS_MAX, bytes_max=bytes_max):
        for is_known, run in groupby(piece.keys, key=lambda key: key[1:] in known):
            *_, last = keys = list(run)
            if is_known:
                found.seen.extend(keys)
                after = last
                continue
            unread = KeyRange(after, last, of_one_value=True)
            for part in pieces(connection, table, facts, unread, rows_max=rows_max, bytes_max=bytes_max):
                count = len(found.piece.rows)
                if count and (part.columns != found.piece.columns or count >= rows_max or size >= bytes_max):
                    yield found
                    found, size = UnreadRows(), 0
                found.add(part)
                size += sum(len(value or b"") for row in part.rows for value in row)
            after = last
    if found.seen:
        yield found


def find_begins(
    connection: psycopg.Connection[Any], column: SortColumn, after: Key | None, keys: Sequence[Key]
) -> list[int]:
    """Return the places of rows whose value is another one than that of the row before.

    Args:
        connection: to the database of the table.
        column: the column of the values.
        after: the row before the first one; None for none.
        keys: the rows.
    """
    values = [after[0] if after else None, *(key[0] for key in keys)]
    begins = [place for place, (one, other) in enumerate(pairwise(values)) if one != other]
    if column.kind in _OF_ONE_TEXT:
        return begins
    asked = [place for place in begins if place or after]
    pairs = [(values[place] or "", values[place + 1] or "") for place in asked]
    equal = {asked[place] for place in equal_pairs(connection, column, pairs)} if pairs else set()
    return [place for place in begins if place not in equal]

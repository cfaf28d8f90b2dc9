"""The messages of PostgreSQL's logical decoding, by its plugin pgoutput (protocol version 1, columns as text).

    B final_lsn commit_time xid         a transaction begins; transactions come in the order of their commits
    R id schema name identity columns   a table, before its first change, and again when it has changed
    I id N tuple                        an INSERT
    U id [K|O tuple] N tuple            an UPDATE: O has the whole row before, K its key if that has changed
    D id K|O tuple                      a DELETE
    T count options id…                 a TRUNCATE
    C                                   the transaction has ended

A tuple has for each column its text, None for NULL, or UNCHANGED for a value that is stored out of line (TOAST) and was
not changed: its bytes are not in the log. See PostgreSQL's manual, "Logical Replication Message Formats".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

POSTGRES_EPOCH_US = 946_684_800_000_000
_BEGIN = struct.Struct(">qqI")
_LENGTH = struct.Struct(">I")
_TRUNCATE = struct.Struct(">IB")
Operation = Literal["snapshot", "insert", "update", "delete", "truncate"]


class UnchangedValue:
    """The type of UNCHANGED."""

    __slots__ = ()


UNCHANGED: Final = UnchangedValue()
Value = bytes | None | UnchangedValue
Row = Sequence[Value]


@dataclass(frozen=True, slots=True)
class Relation:
    """A table as a change names it: its columns are (name, type's OID, whether it is part of the replica identity)."""

    relation_id: int
    schema: str
    name: str
    columns: tuple[tuple[str, int, bool], ...]


@dataclass(slots=True)
class Change:
    """A change of one row, or a truncate.

    Attributes:
        relation: the table.
        operation: what was done.
        row: the row after it; None for a delete or a truncate.
        before: the row before it, whole or with NULL in all columns but the key; None if the log does not have it.
        is_whole: whether `before` is the whole row (REPLICA IDENTITY FULL).
    """

    relation: Relation
    operation: Operation
    row: Row | None
    before: Row | None
    is_whole: bool


@dataclass(slots=True)
class Begin:
    """The begin of a transaction: the position of its commit, its time in µs since 1970, and its 32-bit id."""

    lsn: int
    committed_at: int
    xid: int


class PgoutputDecoder:
    """A decoder of the messages of one stream, which keeps the tables that it has named."""

    def __init__(self) -> None:
        self._relations: dict[int, Relation] = {}

    def decode(self, message: bytes) -> Sequence[Begin | Change | Relation]:
        """Return what a message says; nothing for one that does not matter here.

        Raises:
            ValueError: the message is none of this protocol.
        """
        kind = message[:1]
        if kind == b"I":
            relation, row, _ = self._tuple(message, 6)
            return (Change(relation, "insert", row, None, False),)
        if kind == b"U":
            before, is_whole, at = None, False, 5
            if message[at : at + 1] in (b"K", b"O"):
                is_whole = message[at : at + 1] == b"O"
                _, before, at = self._tuple(message, at + 1)
            relation, row, _ = self._tuple(message, at + 1)
            return (Change(relation, "update", row, before, is_whole),)
        if kind == b"D":
            relation, before, _ = self._tuple(message, 6)
            return (Change(relation, "delete", None, before, message[5:6] == b"O"),)
        if kind == b"B":
            lsn, committed_at, xid = _BEGIN.unpack_from(message, 1)
            return (Begin(lsn, committed_at + POSTGRES_EPOCH_US, xid),)
        if kind == b"R":
            return (self._relation(message),)
        if kind == b"T":
            count, _ = _TRUNCATE.unpack_from(message, 1)
            ids = [_LENGTH.unpack_from(message, 6 + 4 * place)[0] for place in range(count)]
            return [Change(self._relations[of], "truncate", None, None, False) for of in ids]
        if kind not in (b"C", b"O", b"Y", b"M"):
            raise ValueError(f"message {kind!r} is not known")
        return ()

    def _tuple(self, message: bytes, at: int) -> tuple[Relation, list[Value], int]:
        relation = self._relations[int.from_bytes(message[1:5], "big")]
        columns = int.from_bytes(message[at : at + 2], "big")
        at += 2
        found: list[Value] = []
        length = _LENGTH.unpack_from
        for _ in range(columns):
            kind = message[at]
            if kind == 0x74:  # t
                end = at + 5 + length(message, at + 1)[0]
                found.append(message[at + 5 : end])
                at = end
            else:
                found.append(UNCHANGED if kind == 0x75 else None)  # u, n
                at += 1
        return relation, found, at

    def _relation(self, message: bytes) -> Relation:
        (relation_id,) = _LENGTH.unpack_from(message, 1)
        schema, at = _text(message, 5)
        name, at = _text(message, at)
        columns = int.from_bytes(message[at + 1 : at + 3], "big")
        at += 3
        found = []
        for _ in range(columns):
            is_key = bool(message[at] & 1)
            column, at = _text(message, at + 1)
            (type_oid,) = _LENGTH.unpack_from(message, at)
            found.append((column, type_oid, is_key))
            at += 8
        relation = self._relations[relation_id] = Relation(relation_id, schema or "pg_catalog", name, tuple(found))
        return relation


def _text(message: bytes, at: int) -> tuple[str, int]:
    end = message.index(b"\0", at)
    return message[at:end].decode(), end + 1

"""Rows of a table, and changes of them, as payloads: the columns that are fields of the record, in JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from millpy.formats.message import encoded_names
from millpy.model.record import RecordType
from millpy.model.time import Instant, to_datetime
from millpy.sources.postgres.column_json import ToJson
from millpy.sources.postgres.pgoutput import UNCHANGED, Change, Row, UnchangedValue
from millpy.sources.postgres.table import ChangeFields

UNCHANGED_REASON = "unchanged_value"
Columns = Sequence[tuple[str, int, bool]]


Member = tuple[int, bytes, ToJson]
"""The place of a column, the begin of its member in an object, and its form."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How rows of a table become objects.

    Attributes:
        columns: (name, OID of the type, whether it is part of the replica identity) of each column.
        taken: the members of a record.
        image: the members of the row before a change, which has all columns.
        beside_key: the places of columns that the log has of a row before a change only if it has the whole row.
    """

    columns: Columns
    taken: Sequence[Member]
    image: Sequence[Member]
    beside_key: Sequence[int]


def unfilled(record_type: RecordType, fields: ChangeFields, columns: Iterable[str]) -> list[str]:
    """Return the fields that have their default in each record: neither a column nor the change itself fills them."""
    filled = {*fields.names()}
    names, there = encoded_names(record_type), set(columns)
    return [name for name in record_type.defaults if name not in filled and names[name] not in there]


class ChangeRecords:
    """What makes payloads of rows and changes.

    Args:
        record_type: the type of the records; None, in tests, takes all columns.
        fields: the fields that a change fills.
        form_of: returns what makes JSON of values of a type, by its OID.
        partition_keys: the columns of the replica identities of a table's partitions, () if all are FULL; None without
            partitions.
    """

    def __init__(
        self,
        record_type: RecordType | None,
        fields: ChangeFields,
        form_of: Callable[[int], ToJson],
        partition_keys: Collection[str] | None = None,
    ) -> None:
        self._form_of = form_of
        self.partition_keys = partition_keys
        self._taken: dict[str, bytes] | None = None
        names = {name: name for name in fields.names()}
        if record_type is not None:
            names = encoded_names(record_type)
            filled = fields.names()
            self._taken = {name: _member(name) for field, name in names.items() if field not in filled}
        self._operation = _member(names[fields.operation]) if fields.operation else b""
        self._before = _member(names[fields.before]) if fields.before else b""
        self._committed_at = _member(names[fields.committed_at]) if fields.committed_at else b""
        self._as_number = (
            record_type is not None
            and fields.committed_at is not None
            and record_type.field_type(fields.committed_at) is int
        )

    def layout(self, columns: Columns) -> Layout:
        """Return the layout of a table with these columns."""
        every = [(place, _member(name), self._form_of(oid)) for place, (name, oid, _) in enumerate(columns)]
        names = None if self._taken is None else self._taken.keys()
        keys = self.partition_keys or ()
        return Layout(
            columns,
            [member for member in every if names is None or columns[member[0]][0] in names],
            every,
            [place for place, (name, _, _) in enumerate(columns) if name not in keys],
        )

    def of_row(self, layout: Layout, row: Row, committed_at: int) -> bytes:
        """Return the payload of a row of the first copy."""
        return self._payload(_members(layout.taken, row), "snapshot", b"null", committed_at)

    def of_change(self, layout: Layout, change: Change, committed_at: int) -> tuple[bytes, str]:
        """Return the payload of a change, and why it is not a record; "" if it is."""
        row, before, lacking = change.row, change.before, ""
        if self.partition_keys is not None and before is not None:
            # Each partition has a replica identity of its own, and the log says what that of the table is. A whole row
            # whose other columns are all NULL counts as a key, unless all partitions have whole rows.
            change.is_whole = any(before[place] is not None for place in layout.beside_key)
        if row is not None:
            if UNCHANGED in row:
                row, lacking = _completed(layout, change, partitioned=self.partition_keys is not None)
            members = _members(layout.taken, row)
        elif before is not None:
            members = _members_before(layout.taken, change, before)
        else:
            members = []
        image = b"null"
        if self._before and before is not None:
            image = b"{" + b",".join(_members_before(layout.image, change, before)) + b"}"
        return self._payload(members, change.operation, image, committed_at), lacking

    def _payload(self, members: list[bytes], operation: str, before: bytes, committed_at: int) -> bytes:
        if self._operation:
            members.append(self._operation + b'"' + operation.encode() + b'"')
        if self._before:
            members.append(self._before + before)
        if self._committed_at:
            written = (
                b"%d" % committed_at if self._as_number else msgspec.json.encode(to_datetime(Instant(committed_at)))
            )
            members.append(self._committed_at + written)
        return b"{" + b",".join(members) + b"}"


def _member(name: str) -> bytes:
    return msgspec.json.encode(name) + b":"


def _members(members: Sequence[Member], row: Row) -> list[bytes]:
    return [
        member + (b"null" if value is None else form(value))
        for place, member, form in members
        if not isinstance(value := row[place], UnchangedValue)
    ]


def _members_before(members: Sequence[Member], change: Change, before: Row) -> list[bytes]:
    """Return the members of the row before a change: of a key, which has no NULL, those that the log has."""
    return _members(members if change.is_whole else [m for m in members if before[m[0]] is not None], before)


def _completed(layout: Layout, change: Change, *, partitioned: bool) -> tuple[Row, str]:
    """Take values that were not changed from the row before. Return the row, and which field lacks its value."""
    assert change.row is not None
    row, lacking, taken = list(change.row), "", {place for place, _, _ in layout.taken}
    for place, value in enumerate(row):
        if isinstance(value, UnchangedValue):
            if change.before is not None and change.before[place] is not None:
                row[place] = change.before[place]
            elif place in taken:
                lacking = layout.columns[place][0]
    if not lacking:
        return row, ""
    table = f"{change.relation.schema}.{change.relation.name}"
    also = ", and each partition of it" if partitioned else ""
    return row, (
        f"column {lacking} was not changed, and its value is stored out of line, so that the log does not have it:"
        f" ALTER TABLE {table} REPLICA IDENTITY FULL{also}"
    )


def key_of(change: Change, names: Sequence[str], row: Row) -> list[str] | None:
    """Return the values of key columns of a row of a change as text; None if it lacks one.

    A value that is stored out of line, and was not changed, is that of the row before the change.
    """
    places = {name: place for place, (name, _, _) in enumerate(change.relation.columns)}
    found = []
    for name in names:
        value = row[places[name]] if name in places else None
        if isinstance(value, UnchangedValue) and change.before is not None:
            value = change.before[places[name]]
        if not isinstance(value, bytes):
            return None
        found.append(value.decode())
    return found

"""The joined record: its type, and its columns from those of both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
import pyarrow as pa

from millpy.errors import GraphError
from millpy.model.record import RecordType, without_none
from millpy.operators.join_reach import LEFT, RIGHT

How = Literal["inner", "left", "full"]
HOWS = ("inner", "left", "full")


class OutputType(Protocol):
    """The type of what leaves a join."""

    record_type: RecordType

    def batch(self, sides: Mapping[int, pa.RecordBatch]) -> pa.RecordBatch:
        """Return records from the batches of both sides, row by row, or from that of one side."""
        ...


@dataclass(frozen=True, slots=True)
class JoinedField:
    """A field of the joined record.

    Attributes:
        side: the side from which it comes.
        place: its place among the fields of that side.
        other: the place of the same key field on the other side, which has its value where the side is missing.
    """

    name: str
    side: int
    place: int
    other: int | None = None


class JoinedType:
    """The type of joined records: the fields of the left record, then those of the right one, its key left out.

    Args:
        left, right: the types of the records.
        left_key, right_key: the fields of their keys.
        how: which records without a match are in the result, with None in the fields of the other side.
        suffix: behind the name of a field of the right record whose name the left record has as well.

    Raises:
        GraphError: a name occurs twice even with the suffix, or a full join has a nested key.
    """

    def __init__(
        self,
        left: RecordType,
        left_key: Sequence[str],
        right: RecordType,
        right_key: Sequence[str],
        how: How,
        suffix: str,
    ) -> None:
        if how == "full" and any("." in name for name in (*left_key, *right_key)):
            raise GraphError(
                "the key of a full join is a field of a nested struct, which may be missing",
                hint="map both streams to records that have the key as a field",
            )
        same = dict(zip(left_key, right_key, strict=True))
        dropped = {name for name in right_key if "." not in name}
        self.fields: list[JoinedField] = []
        types: list[tuple[str, Any]] = []
        for place, name in enumerate(left.fields):
            other = right.fields.index(same[name]) if how == "full" and name in same else None
            self.fields.append(JoinedField(name, LEFT, place, other))
            optional = how == "full" and other is None
            types.append((name, _optional(left.annotations[name]) if optional else left.annotations[name]))
        for place, name in enumerate(right.fields):
            if name in dropped:
                continue
            own = name + suffix if name in left.fields else name
            self.fields.append(JoinedField(own, RIGHT, place))
            types.append((own, _optional(right.annotations[name]) if how != "inner" else right.annotations[name]))
        names = [name for name, _ in types]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise GraphError(
                f"two fields of the joined record are named {twice[0]!r}", hint="choose another suffix= for the join"
            )
        self.record_type = RecordType(msgspec.defstruct("JoinedRecord", types, frozen=True))

    def batch(self, sides: Mapping[int, pa.RecordBatch]) -> pa.RecordBatch:
        """Return joined records from the batches of both sides, row by row, or from that of one side."""
        columns = []
        count = next(iter(sides.values())).num_rows
        for field, column in zip(self.fields, self.record_type.schema, strict=True):
            if field.side in sides:
                columns.append(sides[field.side].column(field.place))
            elif field.other is not None:
                columns.append(sides[1 - field.side].column(field.other))
            else:
                columns.append(pa.nulls(count, column.type))
        return pa.RecordBatch.from_arrays(columns, schema=self.record_type.schema)


def _optional(annotation: Any) -> Any:
    return annotation if without_none(annotation)[1] else annotation | None

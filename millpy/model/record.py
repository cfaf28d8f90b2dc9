"""Records of one stream, as Arrow columns or as objects; one form is made from the other when it is needed.

A `msgspec.Struct` is the type of a stream. Bulk work reads columns. User functions read objects, which are also the
cheaper form of a few records (a one-row Arrow call costs 0.1 ms). Beside the payload every record has an event time
and, behind a source, the watermark before it (I9). A record of a stream of panes may be a retraction: it equals the
record that it takes back, and has a mark.
"""

from __future__ import annotations

import copy
import types
import typing
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from operator import attrgetter
from typing import Any
from uuid import UUID

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpy.errors import SchemaError
from millpy.model.field_types import BUILTIN, decimal_text, enum_type, is_enum, is_json, literal_type
from millpy.model.identity import identity_of_type, or_none
from millpy.model.keys import KEY_TYPES, KeyColumn, KeyHasher, distinct
from millpy.model.sites import SiteProgress
from millpy.model.time import to_datetime

Instants = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
SMALL_RECORDS_MAX = 64
"""Up to this many records are handled as objects rather than as columns."""


class _WideMark:
    """Marks integers that may not fit in 64 bits."""


WideInt = typing.Annotated[int, _WideMark()]
"""An integer of any width; in columns up to 38 digits, which is enough for a sum of 64-bit integers."""


ARROW_TYPES: dict[Any, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
    datetime: pa.timestamp("us", tz="UTC"),
    UUID: pa.string(),
    Decimal: pa.string(),
    date: pa.date32(),
}


def without_none(annotation: Any) -> tuple[Any, bool]:
    """Return an annotation without `| None` and `Annotated`, and whether it had `| None`.

    A Literal is the type of its values. `Any` may be None.
    """
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if (literal := literal_type(annotation)) is not None:
        return without_none(literal)
    if annotation in (Any, object):
        return Any, True
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        nullable = len(members) < len(typing.get_args(annotation))
        if len(members) == 1:
            plain, inside = without_none(members[0])
            return plain, nullable or inside
        return annotation, nullable
    return annotation, False


def is_wide(annotation: Any) -> bool:
    """Tell whether a field is a `WideInt` or `WideInt | None`."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(map(is_wide, typing.get_args(annotation)))
    metadata = getattr(annotation, "__metadata__", ())
    return any(isinstance(mark, _WideMark) for mark in metadata)


def arrow_type(annotation: Any) -> pa.DataType:
    """Return the Arrow type of a field; structs, lists and dicts may be nested. `field_types.py` has the others.

    Raises:
        SchemaError: the annotation has no column type.
    """
    if is_wide(annotation):
        return pa.decimal128(38, 0)
    if is_json(annotation):
        return pa.string()
    annotation, _ = without_none(annotation)
    if annotation in ARROW_TYPES:
        return ARROW_TYPES[annotation]
    if is_enum(annotation):
        return ARROW_TYPES[enum_type(annotation)]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        return pa.list_(arrow_type(arguments[0]))
    if origin is dict and arguments[0] is str:
        return pa.map_(pa.string(), arrow_type(arguments[1]))
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        hints = typing.get_type_hints(annotation, include_extras=True)
        return pa.struct([pa.field(name, arrow_type(hints[name])) for name in annotation.__struct_fields__])
    raise SchemaError(
        f"a field of type {annotation!r} has no column type",
        hint="use str, int, float, bool, bytes, datetime, date, Decimal, UUID, Literal, Enum, a Struct, or list and"
        " dict[str, …] of these; Any, dict or a union for JSON",
    )


def getter(path: str) -> Callable[[Any], Any]:
    """Return a function that reads a field of an object; "a.b.c" reads nested structs, None if one of them is None."""
    if "." not in path:
        return attrgetter(path)
    names = path.split(".")

    def read(record: Any) -> Any:
        for name in names:
            if record is None:
                return None
            record = getattr(record, name)
        return record

    return read


def column_of(batch: pa.RecordBatch, path: str) -> pa.Array:
    """Return the column of a field; "a.b.c" reads nested structs, and is null where one of them is null."""
    name, *nested = path.split(".")
    column = batch.column(name)
    return pc.struct_field(column, nested) if nested else column


def column_name(path: str) -> str:
    """Return the name of a field's column in a result: "a.b" becomes a_b."""
    return path.replace(".", "_")


_SECONDS_EXACT = 2**32
"""Up to this many seconds from the epoch (the year 2106) a double is exact to a µs."""


def moments(column: pa.Array) -> list[datetime | None]:
    """Convert a timestamp column to UTC datetimes, ten times as fast as `to_pylist`, which resolves each time zone."""
    instants = column.cast(pa.int64())
    if instants.null_count or not len(instants):
        return [None if at is None else to_datetime(at) for at in instants.to_pylist()]
    values = instants.to_numpy(zero_copy_only=False)
    if max(abs(int(values.min())), abs(int(values.max()))) >= _SECONDS_EXACT * 1_000_000:
        return [to_datetime(at) for at in values.tolist()]
    from_timestamp = datetime.fromtimestamp
    return [from_timestamp(at, UTC) for at in (values / 1_000_000).tolist()]


def _described(annotation: Any) -> Any:
    """Describe a field's type. UUIDs and text, both columns of text, are different types."""
    plain, nullable = without_none(annotation)
    if plain not in ARROW_TYPES:
        return identity_of_type(annotation)
    kind = "wide_int" if is_wide(annotation) else identity_of_type(plain)
    return or_none(kind) if nullable else kind


def _enum_value(member: Any) -> Any:
    return getattr(member, "value", member)


def _json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


_TO_COLUMN: dict[Any, Callable[[Any], Any]] = {UUID: str, Decimal: decimal_text}
"""How a value is carried by a column of text."""


def _check_default(struct: str, name: str, field: Any, annotation: Any) -> None:
    """Raise SchemaError if a default is not of its field's type: msgspec does not check that."""
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    try:
        msgspec.convert(msgspec.to_builtins(value, builtin_types=BUILTIN), annotation)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise SchemaError(
            f"the default of {name!r} of {struct} is not of its type: {error}",
            hint=f"{name}: ... | None = None for a field that may be missing",
        ) from error


class RecordType:
    """A stream's record class, its Arrow schema, and the conversion between the two."""

    def __init__(self, struct: type[msgspec.Struct]) -> None:
        if not (isinstance(struct, type) and issubclass(struct, msgspec.Struct)):
            raise SchemaError(f"{struct!r} is not a msgspec.Struct", hint="class Reading(msgspec.Struct): …")
        self.struct = struct
        self.fields: tuple[str, ...] = tuple(struct.__struct_fields__)
        hints = typing.get_type_hints(struct, include_extras=True)
        self.annotations = {name: hints[name] for name in self.fields}
        try:
            self.schema = pa.schema([pa.field(name, arrow_type(hints[name])) for name in self.fields])
        except RecursionError:
            raise SchemaError(
                f"a field of {struct.__name__} contains its own class, which has no column type",
                hint="give the field the type Any or dict: it is stored as JSON",
            ) from None
        # Arrow returns nested values and UUIDs as dicts and text, which have to be converted.
        self.json = [n for n in self.fields if is_json(hints[n])]
        kinds = {n: without_none(hints[n])[0] for n in self.fields}
        self.flat = all(kinds[n] in ARROW_TYPES or is_enum(kinds[n]) or n in self.json for n in self.fields)
        self._to_column = {n: _TO_COLUMN[kind] for n, kind in kinds.items() if kind in _TO_COLUMN}
        self._to_column |= {n: _enum_value for n, kind in kinds.items() if is_enum(kind)}
        self._to_column |= dict.fromkeys(self.json, _json_text)
        self.wide = [n for n in self.fields if is_wide(hints[n])]
        self._moments = [n for n in self.fields if without_none(hints[n])[0] is datetime]
        self.defaults = {field.name: field for field in msgspec.structs.fields(struct) if not field.required}
        self._aliases = {field.name: field.encode_name for field in msgspec.structs.fields(struct)}
        for name, field in self.defaults.items():
            _check_default(struct.__name__, name, field, hints[name])
        hooked = hasattr(struct, "__post_init__")
        plain = {name: without_none(hints[name])[0] for name in self.fields} if hooked else {}
        self._of_hook = {name: kind for name, kind in plain.items() if kind in ARROW_TYPES}

    def __repr__(self) -> str:
        return f"RecordType({self.struct.__name__})"

    def misfit(self, record: Any) -> str | None:
        """Describe a field whose value is of another type, which only `__post_init__` can cause; None if all fit."""
        for name, kind in self._of_hook.items():
            value = getattr(record, name)
            if value is None and self.is_nullable(name):
                continue
            fits = isinstance(value, (float, int) if kind is float else kind)
            fits = fits and not (kind is date and isinstance(value, datetime))
            if not fits or (isinstance(value, bool) and kind is not bool):
                return f"{name}: {value!r} is not of type {kind.__name__}"
        return None

    def annotations_along(self, path: str) -> list[Any]:
        """Return the annotations along a path such as "a.b.c": of a, of a.b and of a.b.c.

        Raises:
            SchemaError: the field does not exist.
        """
        if not isinstance(path, str):
            raise SchemaError(f"{path!r} is not the name of a field", hint=f"name one of {', '.join(self.fields)}")
        name, *nested = path.split(".")
        if name not in self.annotations:
            raise SchemaError(f"{self.struct.__name__} has no field {path!r}", hint=f"it has {', '.join(self.fields)}")
        found = [self.annotations[name]]
        for name in nested:
            inside = without_none(found[-1])[0]
            hints = {}
            if isinstance(inside, type) and issubclass(inside, msgspec.Struct):
                hints = typing.get_type_hints(inside, include_extras=True)
            if name not in hints:
                what = getattr(inside, "__name__", inside)
                raise SchemaError(
                    f"{self.struct.__name__} has no field {path!r}: {what} has no {name!r}",
                    hint=f"it has {', '.join(hints)}" if hints else "only structs have fields",
                )
            if is_json(found[-1]):
                raise SchemaError(
                    f"field {path!r} of {self.struct.__name__} is inside a field that is stored as JSON",
                    hint="map it to a field of its own, or give every part of that field a type",
                )
            found.append(hints[name])
        return found

    def field_type(self, path: str) -> type:
        """Return the Python type of a field, without `| None`. Raises SchemaError if the field does not exist."""
        return without_none(self.annotations_along(path)[-1])[0]  # type: ignore[no-any-return]

    def alias(self, name: str) -> str:
        """Return the name of a field in JSON."""
        return self._aliases[name]

    def described_fields(self) -> list[tuple[str, Any]]:
        """Describe the fields and their types; without the bounds of plain types, which columns do not check."""
        return [(name, _described(annotation)) for name, annotation in self.annotations.items()]

    def named(self, kind: type) -> frozenset[str]:
        """Return the names in JSON of the fields of a type."""
        return frozenset(self.alias(name) for name in self.fields if self.field_type(name) is kind)

    def is_nullable(self, path: str) -> bool:
        """Tell whether a field, or a struct that contains it, may be None."""
        return any(without_none(annotation)[1] for annotation in self.annotations_along(path))

    def batch_of(self, objects: Sequence[Any]) -> pa.RecordBatch:
        """Convert objects of the struct to columns of the schema."""
        if not self.flat:
            rows = [{n: self._arrow_value(n, getattr(o, n)) for n in self.fields} for o in objects]
            return pa.RecordBatch.from_pylist(rows, schema=self.schema)
        columns = []
        for field in self.schema:
            values: list[Any] = [getattr(o, field.name) for o in objects]
            if (convert := self._to_column.get(field.name)) is not None:
                values = [None if v is None else convert(v) for v in values]
            columns.append(pa.array(values, field.type))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _arrow_value(self, name: str, value: Any) -> Any:
        """Return the value of a field as Arrow takes it."""
        convert = self._to_column.get(name)
        if value is None or convert is None:
            return msgspec.to_builtins(value, builtin_types=BUILTIN)
        return convert(value)

    def plain_values(self, name: str, values: list[Any]) -> list[Any]:
        """Return values of a field as result tables take them: members of an Enum as their values."""
        if self._to_column.get(name) is not _enum_value:
            return values
        return [None if v is None else _enum_value(v) for v in values]

    def rows_of(self, batch: pa.RecordBatch) -> list[dict[str, Any]]:
        """Convert columns of the schema to values that msgspec converts to objects of the struct.

        Raises:
            msgspec.DecodeError: the text of a JSON field is none.
        """
        others = [name for name in self.fields if name not in self._moments]
        rows: list[dict[str, Any]] = batch.select(others).to_pylist(maps_as_pydicts="strict")
        for name in self._moments:
            for row, moment in zip(rows, moments(batch.column(name)), strict=True):
                row[name] = moment
        for name in self.wide:
            for row in rows:
                row[name] = None if row[name] is None else int(row[name])
        for name in self.json:
            for row in rows:
                row[name] = None if row[name] is None else msgspec.json.decode(row[name])
        return rows

    def with_defaults(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Add columns of defaults for the fields that the batch lacks: the last ones, added after it was stored."""
        columns = list(batch.columns)
        for name in self.fields[batch.num_columns :]:
            field = self.defaults[name]
            value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            plain = self._arrow_value(name, value)
            columns.append(pa.array([plain] * batch.num_rows, self.schema.field(name).type))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def decode_with_none(self, encoded: bytes | msgspec.Raw) -> Any:
        """Decode an object from JSON, where any field may be null.

        Raises:
            msgspec.ValidationError: another value is not of its type.
        """
        plain: Any = msgspec.json.decode(encoded)
        if not isinstance(plain, dict):
            plain = dict(zip(self._aliases.values(), plain, strict=False))
        values = {}
        for name, alias in self._aliases.items():
            if alias in plain:
                value = plain[alias]
                values[name] = None if value is None else msgspec.convert(value, self.annotations[name], strict=False)
        return self.struct(**values)

    def cloner(self) -> Callable[[Any], Any] | None:
        """Return a function that copies an object deeply enough for user code to change it; None for immutable ones."""
        if self.json or any(pa.types.is_nested(column.type) for column in self.schema):
            return copy.deepcopy
        shallow: Callable[[Any], Any] = self.struct.__copy__  # type: ignore[attr-defined]
        return None if self.struct.__struct_config__.frozen else shallow

    def objects_of(self, batch: pa.RecordBatch) -> list[Any]:
        """Convert columns of the schema to objects of the struct."""
        if not self.flat or self._to_column:
            return msgspec.convert(self.rows_of(batch), type=list[self.struct])  # type: ignore[name-defined]
        if not self.fields:
            return [self.struct() for _ in range(batch.num_rows)]
        columns: list[list[Any]] = [
            moments(batch.column(name)) if name in self._moments else batch.column(name).to_pylist()
            for name in self.fields
        ]
        for name in self.wide:
            place = self.fields.index(name)
            columns[place] = [None if value is None else int(value) for value in columns[place]]
        try:
            return list(map(self.struct, *columns))
        except TypeError:  # keyword-only fields
            return [self.struct(**dict(zip(self.fields, row, strict=True))) for row in zip(*columns, strict=True)]

    def key_types(self, fields: Sequence[str]) -> tuple[type, ...]:
        """Return the Python types of key fields.

        Raises:
            SchemaError: a field does not exist, may be None, or has a type that cannot be a key.
        """
        for name in fields:
            if self.is_nullable(name):
                raise SchemaError(
                    f"{name!r} of {self.struct.__name__} may be None and cannot be a key",
                    hint="map the records to a class in which it is never None; or leave out records without a match:"
                    ' missing="drop" of a lookup, how="inner" of a join',
                )
            kind = self.field_type(name)
            if kind not in KEY_TYPES:
                raise SchemaError(
                    f"{name!r} of {self.struct.__name__} cannot be a key: it is a {getattr(kind, '__name__', kind)}",
                    hint="keys are str, int, bool, UUID or bytes",
                )
        return tuple(self.field_type(name) for name in fields)


class Records:
    """n records of one type with their event times; immutable by convention.

    Attributes:
        type: the record type.
        event_times: int64[n], in µs since the epoch.
        watermarks: int64[n], the source's watermark before each record; None behind a keyed stage.
        retracts: bool[n], whether each is a retraction of an equal record before it; None if all are values.
        sites: how far the sites of a source are behind its bundle, of which these are records; None without sites.
    """

    __slots__ = ("_batch", "_keys", "_objects", "event_times", "retracts", "sites", "type", "watermarks")

    def __init__(
        self,
        record_type: RecordType,
        event_times: Instants,
        *,
        watermarks: Instants | None = None,
        retracts: Mask | None = None,
        batch: pa.RecordBatch | None = None,
        objects: list[Any] | None = None,
    ) -> None:
        assert batch is not None or objects is not None, "records need columns or objects"
        assert batch is None or batch.num_rows == len(event_times), (batch and batch.num_rows, len(event_times))
        assert objects is None or len(objects) == len(event_times), len(event_times)
        assert watermarks is None or len(watermarks) == len(event_times)
        assert retracts is None or len(retracts) == len(event_times)
        self.type = record_type
        self.event_times = event_times
        self.watermarks = watermarks
        self.retracts = retracts
        self.sites: SiteProgress | None = None
        self._batch = batch
        self._objects = objects
        self._keys: dict[tuple[str, ...], KeyColumn] = {}

    @classmethod
    def empty(cls, record_type: RecordType) -> Records:
        """Return zero records."""
        return cls(record_type, np.empty(0, np.int64), objects=[])

    def __len__(self) -> int:
        return len(self.event_times)

    @property
    def small(self) -> bool:
        """Whether plain Python handles the records faster than column calls."""
        return len(self.event_times) <= SMALL_RECORDS_MAX

    def batch(self) -> pa.RecordBatch:
        """Return the payload as columns in the order of `type.schema`."""
        if self._batch is None:
            assert self._objects is not None
            self._batch = self.type.batch_of(self._objects)
        return self._batch

    def objects(self) -> list[Any]:
        """Return the payload as objects of `type.struct`."""
        if self._objects is None:
            assert self._batch is not None
            self._objects = self.type.objects_of(self._batch)
        return self._objects

    def take(self, rows: npt.NDArray[np.int64]) -> Records:
        """Return the rows with the given indices, in the given order."""
        taken = Records(
            self.type,
            self.event_times[rows],
            watermarks=None if self.watermarks is None else self.watermarks[rows],
            retracts=None if self.retracts is None else self.retracts[rows],
            batch=None if self._batch is None else self._batch.take(pa.array(rows)),
            objects=None
            if self._objects is None or (self._batch is not None and len(rows) > SMALL_RECORDS_MAX)
            else [self._objects[row] for row in rows],
        )
        taken.sites = self.sites
        return taken

    def with_watermarks(self, watermarks: Instants) -> Records:
        """Return the same records with other watermarks."""
        records, objects = self._batch, self._objects
        return Records(
            self.type, self.event_times, watermarks=watermarks, retracts=self.retracts, batch=records, objects=objects
        )

    def without_watermarks(self) -> Records:
        """Return the same records without watermarks, as those behind a keyed stage are."""
        return Records(self.type, self.event_times, retracts=self.retracts, batch=self._batch, objects=self._objects)

    def with_retracts(self) -> Records:
        """Return the same records with a mask of retractions, even if none is one."""
        return Records(
            self.type,
            self.event_times,
            watermarks=self.watermarks,
            retracts=retractions_of(self),
            batch=self._batch,
            objects=self._objects,
        )

    def slice(self, start: int, end: int) -> Records:
        """Return rows [start, end)."""
        return Records(
            self.type,
            self.event_times[start:end],
            watermarks=None if self.watermarks is None else self.watermarks[start:end],
            retracts=None if self.retracts is None else self.retracts[start:end],
            batch=None if self._batch is None else self._batch.slice(start, end - start),
            objects=None if self._objects is None else self._objects[start:end],
        )

    def keys(self, fields: Sequence[str], hasher: KeyHasher) -> KeyColumn:
        """Return the key of every row: the value of one field, or the tuple of several. Results are cached."""
        names = tuple(fields)
        if names not in self._keys:
            self._keys[names] = self._found_keys(names, hasher)
        return self._keys[names]

    def _found_keys(self, fields: tuple[str, ...], hasher: KeyHasher) -> KeyColumn:
        if self._batch is None or (self._objects is not None and self.small):
            objects = self.objects()
            if len(fields) == 1:
                per_row = list(map(getter(fields[0]), objects))
            else:
                per_row = list(zip(*(map(getter(name), objects) for name in fields), strict=True))
            index: dict[Any, int] = {}
            codes = np.fromiter((index.setdefault(k, len(index)) for k in per_row), np.int32, len(per_row))
            keys = list(index)
            return KeyColumn(codes, keys, hasher.hashes(keys))
        codes, keys = self._distinct_field(fields[0])
        if len(fields) > 1:
            tuples: list[Any] = [(k,) for k in keys]
            for name in fields[1:]:
                more_codes, more_keys = self._distinct_field(name)
                combined = codes.astype(np.int64) * len(more_keys) + more_codes
                used, inverse = np.unique(combined, return_inverse=True)
                tuples = [(*tuples[u // len(more_keys)], more_keys[u % len(more_keys)]) for u in used.tolist()]
                codes = inverse.astype(np.int32)
            keys = tuples
        return KeyColumn(codes, keys, hasher.hashes(keys))

    def _distinct_field(self, name: str) -> tuple[npt.NDArray[np.int32], list[Any]]:
        codes, values = distinct(column_of(self.batch(), name))
        return codes, [UUID(v) for v in values] if self.type.field_type(name) is UUID else values


def concat(parts: Sequence[Records]) -> Records:
    """Concatenate records of one type. There must be at least one part; watermarks are kept if all parts have them."""
    if len(parts) == 1:
        return parts[0]
    watermarks = None
    if all(part.watermarks is not None for part in parts):
        watermarks = np.concatenate([part.watermarks for part in parts])
    retracts = None
    if any(part.retracts is not None for part in parts):
        retracts = np.concatenate([retractions_of(part) for part in parts])
    event_times = np.concatenate([part.event_times for part in parts])
    if all(part._objects is not None for part in parts):
        objects = [o for part in parts for o in part.objects()]
        return Records(parts[0].type, event_times, watermarks=watermarks, retracts=retracts, objects=objects)
    batch = pa.concat_batches([part.batch() for part in parts])
    return Records(parts[0].type, event_times, watermarks=watermarks, retracts=retracts, batch=batch)


def retractions_of(records: Records) -> Mask:
    """Return which records are retractions, as a mask even if none is."""
    return np.zeros(len(records), np.bool_) if records.retracts is None else records.retracts

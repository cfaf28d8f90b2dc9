"""Avro (specification 1.11): messages of one schema, or of those of a registry."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any

from millpy.config.extras import to_install
from millpy.errors import ConfigError, GraphError
from millpy.formats.avro_checking import message_check
from millpy.formats.avro_logical import parts_of_schema, read_by_reader, write_exactly
from millpy.formats.binary import PLAIN, BinaryFormat
from millpy.formats.binary_values import NUMBER_BYTES_MAX
from millpy.formats.json_objects import Json
from millpy.formats.message import NESTING_MAX, Reader
from millpy.formats.schema_registry import RegisteredSchema, SchemaRegistry, cache_of, unframed
from millpy.formats.values import json_of
from millpy.model.arguments import check_flags
from millpy.model.identity import Identity
from millpy.model.record import RecordType

AVRO_BYTES_MAX = 1_000_000
"""The most bytes of one message: its values take many times as much in memory."""
_DECIMAL = "millpy-decimal"
_MILLIS, _MICROS = "millpy-time-millis", "millpy-time-micros"
_OWN = {"decimal": _DECIMAL, "time-millis": _MILLIS, "time-micros": _MICROS}
_DAY_US = 86_400_000_000
_HINT = 'for example {"type": "record", "name": "Reading", "fields": [{"name": "device", "type": "string"}]}'
VALUES_OF_A_BYTE = 16
"""Values that a byte of a message may make."""
VALUES_MAX = 10_000
"""Values that a record may have beyond these, with those of the records in it."""
_PRIMITIVE = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Avro(BinaryFormat):
    """Avro messages: a record each, as an object with its fields. Needs the package fastavro.

    With a registry, each message begins with the id of the schema that it was written with. Logical types become what
    they mean: times with a zone, dates, Decimals, UUIDs; bytes become base64. NaN makes the message a dead letter.

    Args:
        schema: the schema to read with, as JSON text, a dict, or the path of an .avsc file. With a registry it may be
            left out: then it is the one that a message was written with. Otherwise older and newer messages are read
            as this schema, by Avro's rules of resolution, with its defaults and its logical types.
        registry: the schema registry; without one, messages have no id, and all are written with `schema`.
        register: whether a sink registers its schema; otherwise it must be registered already.
        inside: where the records are, as for JSON: `Avro(registry=…, inside=Json(many="readings"))`.
    """

    schema: str | None
    registry: SchemaRegistry | None
    register: bool

    def __init__(
        self,
        schema: str | Mapping[str, Any] | Path | None = None,
        *,
        registry: SchemaRegistry | None = None,
        register: bool = True,
        inside: Json = PLAIN,
    ) -> None:
        if schema is None and registry is None:
            raise GraphError("Avro needs a schema or a registry", hint="Avro(registry=SchemaRegistry())")
        if registry is not None and not isinstance(registry, SchemaRegistry):
            raise GraphError(
                f"registry={registry!r} is not a SchemaRegistry",
                hint='registry=SchemaRegistry(url="http://registry:8081")',
            )
        check_flags(register=register)
        object.__setattr__(self, "schema", None if schema is None else _schema_text(schema))
        object.__setattr__(self, "registry", registry)
        object.__setattr__(self, "register", register)
        object.__setattr__(self, "inside", inside)
        self.__post_init__()

    def identity(self) -> Identity:
        """Describe how a message is read; the registry's address is no part of it."""
        registry = {} if self.registry is None else {"registry": {"kind": "schema_registry"}}
        return {"kind": "avro", "schema": self.schema, **registry, **self._identity_inside()}

    def validate(self, record_type: RecordType) -> None:
        """Check the record class and the schema, and that the package is there. Raises GraphError, ConfigError."""
        BinaryFormat.validate(self, record_type)
        check_package()
        if self.schema is not None:
            try:
                parsed(self.schema)
            except ValueError as error:
                raise GraphError(f"the Avro schema is invalid: {error}", hint=_HINT) from error

    def reader(self, record_type: RecordType) -> Reader:
        """Return a function that decodes a message and finds the records in it."""
        own = None if self.schema is None else parsed(self.schema)
        if self.registry is None:
            assert own is not None

            def value(payload: bytes) -> Any:
                return decoded(payload, own, None)
        else:
            cache, writers = cache_of(self.registry), _Writers(self.schema)

            def value(payload: bytes) -> Any:
                schema_id, rest = unframed(payload)
                schema = cache.schema(schema_id)
                try:
                    return decoded(rest, writers.parsed(schema), own)
                except Exception as error:
                    raise ValueError(f"schema {schema_id}: {error or type(error).__name__}") from error

        def json_in(payload: bytes) -> bytes:
            if len(payload) > AVRO_BYTES_MAX:
                raise ValueError(f"the message has more than {AVRO_BYTES_MAX} bytes")
            return json_of(value(payload))

        return self._reader(record_type, json_in)


class _Writers:
    """The schemas of a registry, parsed to be read as `schema`, if there is one."""

    def __init__(self, schema: str | None) -> None:
        self._schema = schema
        self._parsed: dict[int, AvroSchema] = {}

    def parsed(self, schema: RegisteredSchema) -> AvroSchema:
        if schema.kind != "AVRO":
            raise ValueError(f"it is of {schema.kind}, not Avro")
        if schema.id not in self._parsed:
            found = parsed(schema.text, schema.references, is_resolved=self._gives_types_to(schema))
            if len(self._parsed) >= 1_000:
                self._parsed.clear()
            self._parsed[schema.id] = found
        return self._parsed[schema.id]

    def _gives_types_to(self, schema: RegisteredSchema) -> bool:
        """Tell whether values of a schema may get other logical types: if not, they are read twice as fast."""
        if self._schema is None or json.loads(self._schema) == json.loads(schema.text):
            return False
        return any("logicalType" in text for text in (self._schema, schema.text, *schema.references))


@dataclass(frozen=True, slots=True)
class AvroSchema:
    """A schema that messages are read or written with.

    Attributes:
        parsed: the schema as fastavro parses it.
        check: raises ValueError for a message that the schema does not permit.
    """

    parsed: Any
    check: Callable[[bytes], None]


def decoded(payload: bytes, writer: AvroSchema, reader: AvroSchema | None) -> Any:
    """Return the value of a message. Raises what fastavro raises, and ValueError for bytes of another schema."""
    from fastavro import schemaless_reader

    writer.check(payload)
    with BytesIO(payload) as stream:
        return schemaless_reader(stream, writer.parsed, None if reader is None else reader.parsed)


def parsed(text: str, references: Iterable[str] = (), *, is_resolved: bool = False) -> AvroSchema:
    """Parse a schema, given those that it refers to. If `is_resolved`, its values get the logical types of another.

    Raises:
        ValueError: it is no schema, or one whose messages could harm the worker: it contains itself, is nested deeply,
            or has arrays of values that take no bytes.
    """
    from fastavro import parse_schema
    from fastavro.read import LOGICAL_READERS

    LOGICAL_READERS[f"bytes-{_DECIMAL}"] = LOGICAL_READERS[f"fixed-{_DECIMAL}"] = _decimal
    LOGICAL_READERS[f"int-{_MILLIS}"], LOGICAL_READERS[f"long-{_MICROS}"] = _time_in_ms, _time_in_us
    named: dict[str, Any] = {}
    try:
        for other in references:
            parse_schema(json.loads(other), named_schemas=named)
        found = parse_schema(json.loads(text), named_schemas=named)
        _SchemaWalk(named).excess(found)
        parts = list(parts_of_schema(found))
        _read_by_own(parts)
        _read_defaults(parts, named)
        if is_resolved:
            read_by_reader(found)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    except Exception as error:
        raise ValueError(str(error) or type(error).__name__) from error
    return AvroSchema(found, message_check(found, named))


def check_package() -> None:
    """Check that the package is there. Raises ConfigError."""
    try:
        import fastavro  # noqa: F401
    except ImportError as error:
        raise ConfigError("Avro needs the package fastavro", hint=to_install("avro")) from error


def encoded(value: Any, schema: AvroSchema) -> bytes:
    """Return the message of a value, by a schema of `parsed_to_write`. Raises ValueError if it does not fit."""
    from fastavro import schemaless_writer

    with BytesIO() as stream:
        try:
            # strict: or it leaves out what has no field
            schemaless_writer(stream, schema.parsed, value, strict_allow_default=True)
            schema.check(stream.getvalue())  # it writes a whole number of 64 bits also as an `int`
        except Exception as error:
            raise ValueError(f"it does not fit the Avro schema: {error!r}") from error
        return stream.getvalue()


def parsed_to_write(text: str) -> AvroSchema:
    """Parse a schema that messages are written with. Raises ValueError: it is no schema, or contains itself."""
    from fastavro import parse_schema

    named: dict[str, Any] = {}
    try:
        found = parse_schema(json.loads(text), named_schemas=named)
        check = message_check(found, named)
        write_exactly(found)
        return AvroSchema(found, check)
    except RecursionError:
        raise ValueError("it contains itself, or is nested too deeply") from None
    except Exception as error:
        raise ValueError(str(error) or type(error).__name__) from error


def _read_by_own(parts: Iterable[dict[str, Any]]) -> None:
    """Let the decimals and times of day of a parsed schema be read by functions of this module.

    Those of fastavro take seconds for a decimal of a few hundred kB, round it by a context that all threads share, and
    read -1 ms as 00:00:00.999.
    """
    for part in parts:
        if part.get("logicalType") in _OWN:
            part["logicalType"] = _OWN[part["logicalType"]]


def _read_defaults(parts: Iterable[dict[str, Any]], named: Mapping[str, Any]) -> None:
    """Make of the defaults in a parsed schema what a message would have: fastavro takes the JSON of them as it is."""
    found = [part for part in parts if "default" in part and "name" in part and "symbols" not in part]
    read = [_default(part["default"], part["type"], named) for part in found]
    for part, value in zip(found, read, strict=True):
        part["default"] = value  # after all are read: that of a record may need those of its fields


def _default(given: Any, schema: Any, named: Mapping[str, Any]) -> Any:
    """Return the value that a default of a type stands for; of a union, it is one of the first type."""
    from fastavro.read import LOGICAL_READERS

    if isinstance(schema, list):
        return _default(given, schema[0], named)
    if given is None or isinstance(schema, str):
        known = named.get(schema) if isinstance(schema, str) else None
        return _default(given, known, named) if known else given.encode("latin-1") if schema == "bytes" else given
    kind = schema["type"]
    if kind in ("record", "error"):
        given = {field["name"]: field["default"] for field in schema["fields"] if "default" in field} | given
        types = {field["name"]: field["type"] for field in schema["fields"]}
        return {name: _default(value, types[name], named) if name in types else value for name, value in given.items()}
    if kind == "array":
        return [_default(value, schema["items"], named) for value in given]
    if kind == "map":
        return {name: _default(value, schema["values"], named) for name, value in given.items()}
    read = LOGICAL_READERS.get(f"{kind}-{schema.get('logicalType')}")
    value = given.encode("latin-1") if kind in ("bytes", "fixed") else given
    return value if read is None else read(value, schema, None)


def _decimal(data: Any, writer_schema: dict[Any, Any] | None, reader_schema: dict[Any, Any] | None) -> Decimal:
    """Return a decimal with all its digits. Raises ValueError for one that is too long."""
    del reader_schema
    assert writer_schema is not None
    if len(data) > NUMBER_BYTES_MAX:
        raise ValueError(f"a decimal has more than {NUMBER_BYTES_MAX} bytes")
    return Decimal(f"{int.from_bytes(data, 'big', signed=True)}e-{writer_schema.get('scale', 0)}")


def _time_in_ms(data: int, writer_schema: dict[Any, Any] | None, reader_schema: dict[Any, Any] | None) -> time:
    """Return a time of day, of milliseconds after midnight. Raises ValueError for a number beyond the day."""
    return _time_in_us(data * 1_000, writer_schema, reader_schema)


def _time_in_us(data: int, writer_schema: dict[Any, Any] | None, reader_schema: dict[Any, Any] | None) -> time:
    """Return a time of day, of microseconds after midnight. Raises ValueError for a number beyond the day."""
    del writer_schema, reader_schema
    if not 0 <= data < _DAY_US:
        raise ValueError(f"{data} µs after midnight are no time of day")
    return (datetime(1, 1, 1, tzinfo=UTC) + timedelta(microseconds=data)).time()


class _SchemaWalk:
    """Finds schemas that are not safe: their messages could harm the worker.

    Args:
        named: the named types.
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._named = named
        self._known: dict[tuple[str, int], int] = {}

    def excess(self, schema: Any, outer: tuple[str, ...] = (), levels: int = NESTING_MAX) -> int:
        """Return by how many values a value of a schema may exceed VALUES_OF_A_BYTE for each of its bytes.

        Args:
            schema: the schema.
            outer: the records that it is in.
            levels: how much deeper it may be nested.

        Raises:
            ValueError: it is not safe.
        """
        if not levels:
            raise ValueError(f"the schema is nested more than {NESTING_MAX} deep")
        if isinstance(schema, list):
            return max((self.excess(part, outer, levels - 1) for part in schema), default=0) - VALUES_OF_A_BYTE
        if isinstance(schema, str):
            if schema in _PRIMITIVE:
                size = 0 if schema == "null" else {"float": 4, "double": 8}.get(schema, 1)
                return 1 - VALUES_OF_A_BYTE * size
            return self.excess(self._named[schema], outer, levels - 1)
        kind = schema["type"]
        if kind in ("array", "map"):
            of_item = self.excess(schema["items" if kind == "array" else "values"], outer, levels - 1)
            if of_item > (0 if kind == "array" else VALUES_OF_A_BYTE):  # a key has a byte of its own
                raise ValueError(f"{'an' if kind == 'array' else 'a'} {kind} has items of almost no bytes")
            return 1 - VALUES_OF_A_BYTE
        if kind in ("record", "error"):
            return self._excess_of_record(schema, outer, levels)
        if kind in ("fixed", "enum"):
            return 1 - VALUES_OF_A_BYTE * int(schema.get("size", 1))
        return self.excess(kind, outer, levels - 1)

    def _excess_of_record(self, schema: Any, outer: tuple[str, ...], levels: int) -> int:
        name = schema["name"]
        if name in outer:
            raise ValueError(f"{name} contains itself, which has no form in a record")
        if (name, levels) not in self._known:
            fields = [self.excess(field["type"], (*outer, name), levels - 1) for field in schema["fields"]]
            found = self._known[name, levels] = 1 + sum(fields)
            if found > VALUES_MAX:
                raise ValueError(f"{name} may have more than {VALUES_MAX:,} values in almost no bytes")
        return self._known[name, levels]


def _schema_text(schema: str | Mapping[str, Any] | Path) -> str:
    """Return a schema as JSON text in one form. Raises GraphError."""
    try:
        if isinstance(schema, Path):
            schema = schema.read_text()
        value = json.loads(schema) if isinstance(schema, str) else schema
        return json.dumps(value, separators=(",", ":"), sort_keys=True)
    except (OSError, TypeError, ValueError) as error:
        raise GraphError(
            f"the Avro schema is no JSON: {error}", hint="give JSON text, a dict, or Path(…) of an .avsc file"
        ) from error

"""Fields that texts outside of a payload fill, such as the levels of a topic or the parts of a file's name.

They are written at the end of the record's JSON (`json_append.py`), where they override a field of the same name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from uuid import UUID

import msgspec

from millpy.errors import GraphError
from millpy.formats.message import Format, encoded_names
from millpy.model.record import RecordType

NAMED = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""A named part: `{device}`."""
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")


def check_named(names: Sequence[str], record_type: RecordType, part: str, format: Format | None) -> None:
    """Check that each name is a field of the record that can hold a text, and that nothing else fills.

    Args:
        names: the names.
        record_type: the type of the records.
        part: what has the names, for messages: "topic level".
        format: the format of payloads.

    Raises:
        GraphError: a name is not a field, the field is not a str, int or UUID, the format fills it, or records are
            written as arrays.
    """
    struct = record_type.struct.__name__
    for name in names:
        if name not in record_type.annotations:
            raise GraphError(
                f"{part} {{{name}}}: {struct} has no field {name!r}",
                hint=f"its fields are {', '.join(record_type.fields)}",
            )
        if record_type.field_type(name) not in (str, int, UUID):
            raise GraphError(f"{part} {{{name}}}: {name!r} of {struct} is not a str, int or UUID")
        if format is not None and format.fills(name, record_type):
            raise GraphError(f"{part} {{{name}}}: {format!r} fills {name!r}, too", hint="write * or + for that part")
    if names and record_type.struct.__struct_config__.array_like:
        raise GraphError(f"{part} {{{names[0]}}} does not fit {struct}, which is written as an array")


def text_as_json(text: str, *, is_int: bool) -> bytes:
    """Return a text as JSON: as a number if it is one and its field is an int, else as text."""
    return text.encode() if is_int and _INTEGER.fullmatch(text) else msgspec.json.encode(text)


class NamedText:
    """Writes texts into the fields of a record.

    Args:
        names: the fields, which have been checked.
        record_type: the type of the records.
    """

    def __init__(self, names: Sequence[str], record_type: RecordType) -> None:
        encoded = encoded_names(record_type)
        self.encoded = tuple(encoded[name] for name in names)
        self._fields = [(msgspec.json.encode(encoded[name]), record_type.field_type(name) is int) for name in names]

    def ending(self, texts: Sequence[str]) -> bytes:
        """Return the end of a JSON object: `,"device":"a"}`."""
        columns = zip(self._fields, texts, strict=True)
        return (
            b"," + b",".join(name + b":" + text_as_json(text, is_int=is_int) for (name, is_int), text in columns) + b"}"
        )

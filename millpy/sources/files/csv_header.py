"""Whether the header of a CSV file can give records of a class. One that cannot is one defect of its file."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence

import msgspec

from millpy.errors import BrokenFileError
from millpy.formats import Format
from millpy.model.record import RecordType

_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas"}
_SHOWN_CHARACTERS = 200


class HeaderError(BrokenFileError):
    """No line of the file can be a record.

    Attributes:
        header: the line.
    """

    def __init__(self, message: str, header: bytes, *, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.header = header


def column_names(text: str) -> tuple[str, ...]:
    """Return the names of the columns in a header, without the space around them: `at, "value"`. Raises csv.Error."""
    return tuple(name.strip() for name in next(csv.reader([text], skipinitialspace=True), []))


def check_format_header(
    path: str, line: bytes, format: Format, record_type: RecordType, given: Sequence[str] = ()
) -> None:
    """Check a header in a payload format, which ignores columns that are no field.

    Args:
        path: the file, for messages.
        line: the header, as it is in the file.
        format: the payload format.
        record_type: the type of the records.
        given: the names in JSON of the fields that the name of the file fills.

    Raises:
        HeaderError: as `check_header`; or it cannot be read, or two columns are the same field.
    """
    known = set(record_type.struct.__struct_encode_fields__)
    try:
        names = format.header_names(line, record_type)
        named = [name for name in names if name in known]
        if twice := [name for name, count in Counter(named).items() if count > 1]:
            raise ValueError(f"two columns are {min(twice)!r}")
    except ValueError as error:
        shown = line.decode(errors="replace")[:_SHOWN_CHARACTERS]
        hint = f"check that the file fits {format!r}"
        raise HeaderError(f"{path}: the header {shown!r} cannot be read: {error}; {hint}", line, hint=hint) from error
    check_header(path, line, named if named or not known else names, record_type, format=format, given=given)


def check_header(
    path: str,
    line: bytes,
    header: Sequence[str],
    record_type: RecordType,
    *,
    format: Format | None = None,
    given: Sequence[str] = (),
) -> None:
    """Check that a header has the columns that a record needs.

    Args:
        path: the file, for messages.
        line: the header, as it is in the file.
        header: the names of the columns.
        record_type: the type of the records.
        format: the payload format, whose columns may have any separator; None for commas.
        given: the names of the fields that need no column.

    Raises:
        HeaderError: a required column is missing, none has the name of a field, or one has a name that the class
            forbids.
    """
    struct = record_type.struct
    fields = msgspec.structs.fields(struct)
    filled = {*header, *given}
    missing = [field.encode_name for field in fields if field.required and field.encode_name not in filled]
    known = {field.encode_name for field in fields}
    if missing:
        problem = f"no column {', '.join(map(repr, missing))}"
    elif known and not known & set(header):
        problem = "no column of a field"
    elif struct.__struct_config__.forbid_unknown_fields and set(header) - known:
        problem = f"column {min(set(header) - known)!r}, which the class forbids"
    else:
        return
    name = struct.__name__
    hint = f"give the columns of {name} their names: {', '.join(sorted(known - set(given)))}"
    if format is not None:
        hint += '; or name them in the format: rename={"Temperature [C]": "temperature"}, or say how many lines come'
        hint += " before the header: skip=1"
        if comment := format.head.comment.decode():
            hint += f"; a header that begins with {comment!r} is a comment: use skip= instead of comment="
    separated = "commas" if format is None else "as the format says"
    for separator, words in _SEPARATORS.items():
        if len(header) == 1 and separator in header[0]:
            hint = f"the columns seem to be separated by {words}, not {separated}"
    shown = line.decode(errors="replace")[:_SHOWN_CHARACTERS]
    raise HeaderError(f"{path}: the header {shown!r} cannot give a {name}: {problem}; {hint}", line, hint=hint)

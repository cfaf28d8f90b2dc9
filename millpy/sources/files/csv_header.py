"""Whether the header of a CSV file can give records of a class. One that cannot is one defect of its file."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from millpy.errors import BrokenFileError
from millpy.model.record import RecordType

_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
_SHOWN_CHARACTERS = 200


class HeaderError(BrokenFileError):
    """No line of the file can be a record.

    Attributes:
        header: the first line.
    """

    def __init__(self, message: str, header: bytes, *, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.header = header


def check_header(path: str, line: bytes, header: Sequence[str], record_type: RecordType) -> None:
    """Check that a header has the columns that a record needs.

    Args:
        path: the file, for messages.
        line: the first line, as it is in the file.
        header: the names of the columns.
        record_type: the type of the records.

    Raises:
        HeaderError: a required column is missing, none has the name of a field, or one has a name that the class
            forbids.
    """
    struct = record_type.struct
    fields = msgspec.structs.fields(struct)
    missing = [field.encode_name for field in fields if field.required and field.encode_name not in header]
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
    hint = f"give the columns of {name} their names: {', '.join(sorted(known))}"
    for separator, words in _SEPARATORS.items():
        if len(header) == 1 and separator in header[0]:
            hint = f"the columns seem to be separated by {words}, not commas"
    shown = line.decode(errors="replace")[:_SHOWN_CHARACTERS]
    raise HeaderError(f"{path}: the header {shown!r} cannot give a {name}: {problem}; {hint}", line, hint=hint)

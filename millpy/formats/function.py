"""A format of your own, as a function from a message to records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from millpy.formats.message import Format, Message, Part, Reader, check_objects
from millpy.formats.values import object_of
from millpy.model.arguments import check_function
from millpy.model.identity import Identity, identity_of_value
from millpy.model.record import RecordType


@dataclass(frozen=True, slots=True, repr=False)
class Decode(Format):
    """Records by a function of the message: `decode=lambda message: [Reading(…)]`.

    The function must depend on nothing but the message: after a crash it is called again, and must return the same. It
    runs in the worker, for one message at a time. An error that it raises dead-letters the message. A replay of the
    dead letter calls it again, with the arrival time of the first call.

    Args:
        function: returns the records of a message, as record objects or dicts; none for a message without any.
    """

    function: Callable[[Message], Iterable[Any]]

    def __post_init__(self) -> None:
        check_function("decode=", self.function, "decode=lambda message: [Reading(…)]", yields=True)

    @property
    def reads_lines(self) -> bool:
        """Each line of a file is a message."""
        return True

    def identity(self) -> Identity:
        """Describe the function by its name, as `map` does."""
        return {"kind": "decode", "function": identity_of_value(self.function)}

    def validate(self, record_type: RecordType) -> None:
        """Check the record class. Raises GraphError."""
        check_objects(record_type, self)

    def reader(self, record_type: RecordType) -> Reader:
        """Return a function that calls the user's."""
        del record_type
        function = self.function

        def read(message: Message) -> Iterable[Part]:
            found = function(message)
            # A set has another order in each process, and a message must give the same records again.
            if found is None or isinstance(found, dict | msgspec.Struct | str | bytes | set | frozenset):
                raise ValueError(f"decode= returned {type(found).__name__}: return a list of records")
            for record in found:
                yield object_of(msgspec.to_builtins(record, builtin_types=(), order="deterministic"))

        return read

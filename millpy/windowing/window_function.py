"""User-defined windows: a function that assigns each record to windows of its choice.

`WindowFunction` is the counterpart of Beam's `WindowFn` and of Flink's `WindowAssigner` (with `MergingWindowAssigner`).
`user_windows.py` runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar, TypeAlias

from millpy.errors import GraphError
from millpy.model.arguments import check_function, is_whole
from millpy.model.code_identity import code_digest
from millpy.model.identity import Identity, identity_of_value
from millpy.model.identity_text import GraphPart
from millpy.model.time import check_length, microseconds

WINDOWS_PER_RECORD_MAX = 1_000
"""The most windows that a function may assign to a record."""

_ASSIGN = "def assign(self, record, at, key): ..."

Window: TypeAlias = tuple[datetime, datetime]
"""A window: start, and end, which is not in it."""


class WindowFunction(GraphPart):
    """User-defined windows, which need not be aligned: `window(Shifts("a"))`.

    Subclass it, define `assign`, and pass an instance to `KeyedStream.window`. With `merges = True`, windows of a key
    merge as sessions do.

    The methods must depend only on their arguments and on the attributes of the instance: not on the clock, on chance,
    on a file, or on calls before. A record whose turn is repeated is assigned again, and so is one that a batch
    computes again. When a method raises, or returns what is not allowed, the record becomes a dead letter.

    Open windows keep their bounds, which are in the state. Changed code would put the records of one window into two,
    so that a graph with other code, or other parameters, cannot be deployed over stored windows. Comments and
    docstrings may change, and so may functions that the methods call: that is up to you.

    Attributes:
        length_max: the longest window, at most a thousand years. Windows do not merge to a longer one.
        windows_max: the most windows that a record may be in, at most 1,000.
        merges: whether windows merge. A record is then in one window.
        stored_as: the name of the function in deployed graphs; by default that of the class. To rename the class, set
            it to the old name.

    Examples:
        >>> class Trips(WindowFunction):
        ...     '''Windows of the length that each record names, which merge where they intersect.'''
        ...     merges = True
        ...     length_max = hours(12)
        ...     def assign(self, record, at, key):
        ...         return [(at, at + seconds(record.timeout_s))]
    """

    length_max: ClassVar[timedelta] = timedelta(days=1)
    windows_max: ClassVar[int] = 100
    merges: ClassVar[bool] = False
    stored_as: ClassVar[str] = ""

    def __repr__(self) -> str:
        parameters = ", ".join(f"{name}={value!r}" for name, value in sorted(self.parameters().items()))
        return f"{type(self).__name__}({parameters})"

    def assign(self, record: Any, at: datetime, key: Any) -> Iterable[Window]:
        """Return the windows of a record. Each contains its event time; none leaves the record out of all windows.

        Args:
            record: the record, which must not be changed.
            at: its event time, in UTC.
            key: its key; a tuple if `key_by` names several fields.

        Returns:
            (start, end) pairs of datetimes with a time zone.
        """
        raise NotImplementedError

    def merge(self, window: Window, others: Sequence[Window]) -> Iterable[Window]:
        """Return those of the other windows with which a window becomes one; only for `merges = True`.

        By default these are the windows that it intersects. The merged window is from the first start to the last end.
        A window with which it would be longer than `length_max` stays beside it: of several, the first ones merge.

        Args:
            window: the window of a record, which is not open yet.
            others: the open windows of its key that it could merge with without exceeding `length_max`, by start.
        """
        start, end = window
        return [other for other in others if other[0] < end and start < other[1]]

    def parameters(self) -> Mapping[str, Any]:
        """Return what the windows depend on beside the records: by default the attributes that are not None.

        Override this method if an attribute is neither data nor a function.
        """
        fields: Mapping[str, Any] = getattr(type(self), "__dataclass_fields__", {})  # those with slots have no __dict__
        found = {**getattr(self, "__dict__", {}), **{name: getattr(self, name) for name in fields}}
        return {name: value for name, value in found.items() if value is not None}

    def identity(self) -> Identity:
        """Describe the name, the parameters, the bounds and the code."""
        return {
            "kind": "window_function",
            "name": self.stored_as or type(self).__name__,
            "parameters": {name: identity_of_value(value) for name, value in sorted(self.parameters().items())},
            "merges": self.merges,
            "windows_max": self.windows_max,
            "length_max_us": microseconds(self.length_max),
            "code": code_digest(type(self), WindowFunction),
        }

    def check(self) -> None:
        """Refuse a function that could not run.

        Raises:
            GraphError: it does not define `assign`, a bound is none, or its windows merge and a record is in several.
        """
        name = type(self).__name__
        if type(self).assign is WindowFunction.assign:
            raise GraphError(f"{name} does not define assign", hint=_ASSIGN)
        check_function("window", self.assign, _ASSIGN, takes=3, yields=True)
        check_function("window", self.merge, "def merge(self, window, others): ...", takes=2, yields=True)
        longest: object = self.length_max
        if not isinstance(longest, timedelta) or longest <= timedelta(0):
            raise GraphError(
                f"{name}.length_max must be a positive duration, not {longest!r}",
                hint="for example length_max = hours(12)",
            )
        check_length(f"{name}.length_max", self.length_max)
        count: object = self.windows_max
        if not is_whole(count, 1, WINDOWS_PER_RECORD_MAX):
            raise GraphError(
                f"{name}.windows_max must be a number from 1 to {WINDOWS_PER_RECORD_MAX:,}, not {count!r}",
                hint="for example windows_max = 10",
            )
        merges: object = self.merges
        if not isinstance(merges, bool):
            raise GraphError(f"{name}.merges must be True or False, not {merges!r}", hint="merges = True")
        if not self.merges and type(self).merge is not WindowFunction.merge:
            raise GraphError(f"{name} defines merge, and its windows do not merge", hint="set merges = True")
        code_digest(type(self), WindowFunction)  # before the file can change

"""The operators without state: `map`, `filter`, `flat_map`, `split`, typed so that a checker reads their functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, overload

import msgspec
import pyarrow as pa

from millpy.errors import GraphError
from millpy.model.arguments import check_function
from millpy.model.record import RecordType
from millpy.operators.map import FlatMap, Map
from millpy.operators.stateless import Filter, Operator, Split

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    from millpy.graph.streams import Stream

    T = TypeVarWithDefault("T", bound=msgspec.Struct, default=Any)
else:
    T = TypeVar("T")
U = TypeVar("U", bound=msgspec.Struct)


class StatelessOperators(Generic[T]):
    """The methods of a stream that work record by record, in the producer of the stream."""

    __slots__ = ()

    @overload
    def map(
        self, function: Callable[[T], U], output: type[U], *, event_time: str | None = None, immediate: bool = False
    ) -> Stream[U]: ...

    @overload
    def map(
        self, function: Callable[[T], T], *, event_time: str | None = None, immediate: bool = False
    ) -> Stream[T]: ...

    @overload
    def map(
        self,
        function: Callable[[pa.RecordBatch], Any],
        output: type[U],
        *,
        columns: Literal[True],
        event_time: str | None = None,
        immediate: bool = False,
    ) -> Stream[U]: ...

    @overload
    def map(
        self,
        function: Callable[[pa.RecordBatch], Any],
        *,
        columns: Literal[True],
        event_time: str | None = None,
        immediate: bool = False,
    ) -> Stream[T]: ...

    def map(
        self,
        function: Callable[[Any], Any],
        output: type[msgspec.Struct] | None = None,
        *,
        columns: bool = False,
        event_time: str | None = None,
        immediate: bool = False,
    ) -> Stream[Any]:
        """Turn each record into one new record.

        Args:
            function: maps a record to a record; with `columns`, a `pyarrow.RecordBatch` to one with as many rows (or
                to a dict of columns). Its result depends only on the record, and it may be called more than once.
            output: the type of the new records. Default: the type of the old ones.
            columns: whether the function takes whole columns.
            event_time: a datetime field of the new record that is its event time. Default: the old event time. A
                record with an earlier one is dead-lettered, because the watermark may have passed it.
            immediate: whether the function only computes; see `Computation.immediate`.
        """
        made = RecordType(output) if output is not None else self._records()
        if event_time is not None and made.field_type(event_time) is not datetime:
            raise GraphError(
                f"event_time={event_time!r} of a map is not a datetime field", hint="name a datetime field, or omit it"
            )
        check_function(
            "map", function, "for example map(lambda reading: Celsius(reading.device, reading.value), Celsius)"
        )
        return self._apply(
            Map(function, self._records(), made, columns=columns, event_time=event_time, immediate=immediate)
        )

    @overload
    def filter(self, function: Callable[[T], Any], *, immediate: bool = False) -> Stream[T]: ...

    @overload
    def filter(
        self, function: Callable[[pa.RecordBatch], Any], *, columns: Literal[True], immediate: bool = False
    ) -> Stream[T]: ...

    def filter(self, function: Callable[[Any], Any], *, columns: bool = False, immediate: bool = False) -> Stream[Any]:
        """Keep the records for which the function is true.

        Args:
            function: maps a record to a truth value; with `columns`, a `pyarrow.RecordBatch` to a boolean column
                (null is false). Its result depends only on the record, and it may be called more than once.
            columns: whether the function takes whole columns.
            immediate: whether the function only computes; see `Computation.immediate`.
        """
        check_function("filter", function, "for example filter(lambda reading: reading.value > 0)")
        return self._apply(Filter(function, self._records(), columns=columns, immediate=immediate))

    @overload
    def flat_map(
        self,
        function: Callable[[T], Iterable[U]],
        output: type[U],
        *,
        event_time: str | None = None,
        immediate: bool = False,
    ) -> Stream[U]: ...

    @overload
    def flat_map(
        self, function: Callable[[T], Iterable[T]], *, event_time: str | None = None, immediate: bool = False
    ) -> Stream[T]: ...

    @overload
    def flat_map(
        self,
        function: Callable[[pa.RecordBatch], Any],
        output: type[U],
        *,
        columns: Literal[True],
        event_time: str | None = None,
        immediate: bool = False,
    ) -> Stream[U]: ...

    @overload
    def flat_map(
        self,
        function: Callable[[pa.RecordBatch], Any],
        *,
        columns: Literal[True],
        event_time: str | None = None,
        immediate: bool = False,
    ) -> Stream[T]: ...

    def flat_map(
        self,
        function: Callable[[Any], Any],
        output: type[msgspec.Struct] | None = None,
        *,
        columns: bool = False,
        event_time: str | None = None,
        immediate: bool = False,
    ) -> Stream[Any]:
        """Turn each record into any number of new records up to a million, in order.

        Args:
            function: maps a record to an iterable of records; with `columns`, a `pyarrow.RecordBatch` to a pair: the
                new columns, and for each new row the index of the row it comes from, ascending.
            output: as for `map`.
            columns: whether the function takes whole columns.
            event_time: as for `map`.
            immediate: as for `map`.
        """
        made = RecordType(output) if output is not None else self._records()
        if event_time is not None and made.field_type(event_time) is not datetime:
            raise GraphError(
                f"event_time={event_time!r} of a flat_map is not a datetime field",
                hint="name a datetime field, or omit it",
            )
        check_function(
            "flat_map", function, "for example flat_map(lambda message: message.readings, Reading)", yields=True
        )
        return self._apply(
            FlatMap(function, self._records(), made, columns=columns, event_time=event_time, immediate=immediate)
        )

    @overload
    def split(
        self, function: Callable[[T], str | None], into: Sequence[str], *, immediate: bool = False
    ) -> dict[str, Stream[T]]: ...

    @overload
    def split(
        self,
        function: Callable[[pa.RecordBatch], Any],
        into: Sequence[str],
        *,
        columns: Literal[True],
        immediate: bool = False,
    ) -> dict[str, Stream[T]]: ...

    def split(
        self, function: Callable[[Any], Any], into: Sequence[str], *, columns: bool = False, immediate: bool = False
    ) -> dict[str, Stream[Any]]:
        """Send each record to one of several streams.

        Args:
            function: maps a record to the name of its stream, or to None to drop it; with `columns`, a
                `pyarrow.RecordBatch` to a column of names.
            into: the names of the streams. A record sent to any other name is dead-lettered.
            columns: whether the function takes whole columns.
            immediate: whether the function only computes; see `Computation.immediate`.

        Returns:
            The streams by name.
        """
        hint = f'for example into=["{into if isinstance(into, str) else "hot"}", "others"]'
        if isinstance(into, str) or not isinstance(into, Sequence) or not all(isinstance(name, str) for name in into):
            raise GraphError(f"into={into!r} is not a list of names", hint=hint)
        if not into or len(set(into)) < len(into):
            raise GraphError(f"split needs at least one name, each once: into={list(into)}", hint=hint)
        check_function("split", function, 'for example split(lambda reading: "hot", into=["hot"])')
        split = Split(function, self._records(), into, columns=columns, immediate=immediate)
        return {name: self._apply(split, split.branch(name)) for name in into}

    def _records(self) -> RecordType:
        return cast("Stream", self).record_type

    def _apply(self, *operators: Operator) -> Stream[Any]:
        return cast("Stream", self).through(*operators)

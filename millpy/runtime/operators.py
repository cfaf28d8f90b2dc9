"""Operators: map, filter, flat_map and split, run by a stream's producer on the way to each consumer.

They have no state, no key and no commit of their own: an operator is a function of one record, so it is applied to
productions before they are cut by key, in the turn and the checkpoint of their producer. What several consumers share
(a common beginning of their chains) runs once. A row keeps the watermark before it, so a stage behind operators is
judged as if the source had sent what they let through (I9).

A function is given a record (or, with `columns=True`, a whole `pyarrow.RecordBatch`) and must depend on nothing else:
it may be called again for the same record. It runs where callbacks of a `Computation` do: in the thread for steps,
unless it says that it only computes (`immediate=True`). A record for which it raises is tried
`Limits.record_attempts_max` times; then it is set aside with the traceback, once for each consumer, and the others go
on. A function over columns that raises is called with ever smaller pieces until the record is found. One that does not
return columns of the right length and type is a mistake in the program and stops the worker (SchemaError).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpy.errors import CallTimeoutError, RefusedValueError, SchemaError
from millpy.model.identity import function_text
from millpy.model.quarantine import payload_of
from millpy.model.record import Records, RecordType, concat
from millpy.model.step_progress import UNRETURNED_MAX, StepAbandoned, StepProgress, is_users
from millpy.model.time import Instant

Rows = npt.NDArray[np.int64]
Function = Callable[[Any], Any]
Failures = list[tuple[int, BaseException]]


@dataclass(slots=True)
class Passed:
    """What has come through the operators so far.

    Attributes:
        records: what is left, in order.
        rows: which row of the producer's records each of them comes from; None for one by one.
        failures: (row of the producer's records, error) of what was set aside.
        filtered, added: how many records operators have let go, and made beyond one of each; by their answers, not by
            what is left (I8).
        labels: behind a split, the index of each record's branch; -1 for none.
    """

    records: Records
    rows: Rows | None = None
    failures: Failures = field(default_factory=list)
    labels: Rows | None = None
    filtered: int = 0
    added: int = 0


@dataclass(slots=True)
class Part:
    """What a function made of some records: `parents` says of which row each is; the rest as in `Passed`."""

    records: Records
    parents: Rows
    labels: Rows | None = None
    filtered: int = 0
    added: int = 0


class Operator:
    """One function on the way.

    Attributes:
        output: the type of what it lets through.
        immediate: the function only computes, and so may run on the event loop when records are few.
    """

    word: ClassVar[str]

    def __init__(
        self, function: Function, input: RecordType, output: RecordType, *, columns: bool, immediate: bool = False
    ) -> None:
        self.immediate = immediate
        self.function = function
        self.output = output
        self._columns = columns
        # A function may change its record in place, and other consumers see the same object.
        self._clone = input.clone()

    def __repr__(self) -> str:
        return f"{self.word}({function_text(self.function)})"

    def meaning(self) -> str:
        """What a change of the graph shows as text: what it does, and the columns that it makes."""
        return f"{self!r}: {', '.join(self.output.field_texts())}"

    def apply(self, before: Passed, attempts_max: int, progress: StepProgress) -> Passed:
        """Let records through; what the function does not survive becomes a failure."""
        parts: list[Part] = []
        failures: Failures = []
        if self._columns:
            self._take_columns(before.records, 0, attempts_max, parts, failures, progress)
        else:
            parts.append(self._take_objects(before.records, attempts_max, failures, progress))
        rows = np.concatenate([part.parents for part in parts]) if parts else np.empty(0, np.int64)
        labels = [part.labels for part in parts if part.labels is not None]
        failures.sort(key=lambda failure: failure[0])
        if before.rows is not None:
            rows = before.rows[rows]
            failures = [(int(before.rows[row]), error) for row, error in failures]
        return Passed(
            concat([part.records for part in parts]) if parts else Records.none(self.output),
            rows,
            [*before.failures, *failures],
            np.concatenate(labels) if labels else None,
            before.filtered + sum(part.filtered for part in parts),
            before.added + sum(part.added for part in parts),
        )

    def _take_objects(self, records: Records, attempts_max: int, failures: Failures, progress: StepProgress) -> Part:
        """Call for each record."""
        one, clone, run = self._one, self._clone, progress.run
        values: list[Any] = []
        rows: list[int] = []
        row, record, at = 0, None, Instant(0)
        progress.in_hand = lambda: (self.word, (repr(self), at, payload_of(record)))
        for row, (record, at) in enumerate(zip(records.objects(), records.event_times.tolist(), strict=True)):
            if progress.unreturned and progress.is_hopeless((self.word, (repr(self), at, payload_of(record)))):
                failures.append((row, CallTimeoutError(f"{self!r} has not returned, {UNRETURNED_MAX} times")))
                continue
            for attempt in range(1, attempts_max + 1):
                try:
                    values.append(one(record if clone is None else clone(record), at))
                    rows.append(row)
                    break
                except BaseException as error:  # user code: set aside, see the module
                    if not is_users(error):
                        raise
                    if attempt == attempts_max:
                        failures.append((row, error))
            progress.units += 1
            if progress.run != run:
                raise StepAbandoned
        progress.in_hand = None
        return self._gathered(records, values, rows)

    def _take_columns(
        self,
        records: Records,
        start: int,
        attempts_max: int,
        parts: list[Part],
        failures: Failures,
        progress: StepProgress,
    ) -> None:
        """Call for all at once; when that raises, for halves, down to the record at fault."""
        run = progress.run
        for attempt in range(1, (1 if len(records) > 1 else attempts_max) + 1):
            try:
                part, refused = self._many(records)
                progress.done(run)
            except SchemaError:
                raise
            except BaseException as error:  # user code: set aside, see the module
                if not is_users(error):
                    raise
                progress.done(run)
                if len(records) == 1 and attempt == attempts_max:
                    failures.append((start, error))
                continue
            part.parents = part.parents + start
            parts.append(part)
            failures.extend((row + start, error) for row, error in refused.items())
            return
        if len(records) > 1:
            middle = len(records) // 2
            self._take_columns(records.slice(0, middle), start, attempts_max, parts, failures, progress)
            rest = records.slice(middle, len(records))
            self._take_columns(rest, start + middle, attempts_max, parts, failures, progress)

    def _one(self, record: Any, at: Instant) -> Any:
        """What becomes of one record."""
        raise NotImplementedError

    def _gathered(self, records: Records, values: list[Any], rows: list[int]) -> Part:
        """The answers of `_one` for those rows, joined."""
        raise NotImplementedError

    def _many(self, records: Records) -> tuple[Part, Mapping[int, BaseException]]:
        """What becomes of many records, and rows of which nothing does."""
        raise NotImplementedError

    def _answer(self, answer: Any, count: int, *kinds: str) -> pa.Array:
        """One value a record, as a column of one of these kinds."""
        if isinstance(answer, pa.ChunkedArray):
            answer = answer.combine_chunks()
        if not isinstance(answer, pa.Array):
            answer = pa.array(answer)
        if str(answer.type) not in (*kinds, "null"):
            raise SchemaError(f"{self!r} returned {answer.type}", hint=f"a column of {kinds[0]} is wanted")
        if len(answer) != count:
            raise SchemaError(f"{self!r} returned {len(answer)} values for {count} records")
        return answer


class Filter(Operator):
    """Lets those records through for which the function is true."""

    word = "filter"

    def __init__(self, function: Function, input: RecordType, *, columns: bool, immediate: bool = False) -> None:
        super().__init__(function, input, input, columns=columns, immediate=immediate)

    def _one(self, record: Any, at: Instant) -> Any:
        return bool(self.function(record))

    def _gathered(self, records: Records, values: list[Any], rows: list[int]) -> Part:
        kept = np.array([row for row, keep in zip(rows, values, strict=True) if keep], np.int64)
        return self._kept(records, kept, values.count(False))

    def _many(self, records: Records) -> tuple[Part, Mapping[int, BaseException]]:
        mask = self._answer(self.function(records.batch()), len(records), "bool")
        keep = pc.fill_null(mask.cast(pa.bool_()), False)
        rows = np.flatnonzero(keep.to_numpy(zero_copy_only=False))
        return self._kept(records, rows, keep.false_count), {}

    @staticmethod
    def _kept(records: Records, rows: Rows, filtered: int) -> Part:
        return Part(records if len(rows) == len(records) else records.take(rows), rows, filtered=filtered)


class Split(Operator):
    """Says to which branch each record goes: its name, or None for nowhere."""

    word = "split"

    def __init__(
        self, function: Function, input: RecordType, into: Sequence[str], *, columns: bool, immediate: bool = False
    ) -> None:
        super().__init__(function, input, input, columns=columns, immediate=immediate)
        self._branches = {name: place for place, name in enumerate(into)}

    def branch(self, name: str) -> Operator:
        """The operator behind this one that lets one branch through."""
        return Branch(self.output, name, self._branches[name])

    def _place(self, name: Any) -> int:
        if name is None:
            return -1
        place = self._branches.get(name)
        if place is None:
            raise RefusedValueError(f"{self!r} has no branch {name!r}, only {', '.join(self._branches)}")
        return place

    def _one(self, record: Any, at: Instant) -> Any:
        return self._place(self.function(record))

    def _gathered(self, records: Records, values: list[Any], rows: list[int]) -> Part:
        places = np.array(rows, np.int64)
        return Part(records if len(rows) == len(records) else records.take(places), places, np.array(values, np.int64))

    def _many(self, records: Records) -> tuple[Part, Mapping[int, BaseException]]:
        names = self._answer(self.function(records.batch()), len(records), "string", "large_string")
        encoded = names.cast(pa.string()).dictionary_encode()
        places = np.full(len(encoded.dictionary) + 1, -1, np.int64)
        unknown: dict[int, Exception] = {}
        for code, name in enumerate(encoded.dictionary.to_pylist()):
            try:
                places[code] = self._place(name)
            except RefusedValueError as error:
                unknown[code] = error
        codes = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy(zero_copy_only=False).astype(np.int64)
        rows = np.flatnonzero(~np.isin(codes, list(unknown)))
        refused = {int(row): unknown[int(codes[row])] for row in np.flatnonzero(np.isin(codes, list(unknown)))}
        return Part(records.take(rows) if unknown else records, rows, places[codes[rows]]), refused


class Branch(Operator):
    """Lets one branch of the split before it through."""

    word = "branch"

    def __init__(self, output: RecordType, name: str, place: int) -> None:
        super().__init__(lambda record: record, output, output, columns=True, immediate=True)
        self.name = name
        self._place = place

    def __repr__(self) -> str:
        return f"branch({self.name!r})"

    def apply(self, before: Passed, attempts_max: int, progress: StepProgress) -> Passed:
        """Let the branch's records through."""
        assert before.labels is not None, "a branch is behind its split"
        ours = before.labels == self._place
        rows = np.flatnonzero(ours)
        parents = rows if before.rows is None else before.rows[rows]
        others = len(ours) - int(np.count_nonzero(ours))
        filtered = before.filtered + others
        return Passed(before.records.take(rows), parents, before.failures, filtered=filtered, added=before.added)


Chain = tuple[Operator, ...]


class Chains:
    """The productions of one bundle behind their chains of operators; what chains share runs once."""

    def __init__(
        self, productions: Mapping[str, Records], attempts_max: int, progress: StepProgress | None = None
    ) -> None:
        self._progress = progress or StepProgress()
        self._productions = productions
        self._attempts_max = attempts_max
        self._known: dict[tuple[str, Chain], Passed] = {}

    def behind(self, stream: str, chain: Chain) -> Passed | None:
        """What a chain makes of a stream's productions; None when there were none."""
        records = self._productions.get(stream)
        if records is None or not len(records):
            return None
        passed = Passed(records)
        for end, operator in enumerate(chain, 1):
            known = self._known.get((stream, chain[:end]))
            if known is None:
                if len(passed.records):
                    known = operator.apply(passed, self._attempts_max, self._progress)
                else:
                    nothing = np.empty(0, np.int64)
                    known = Passed(
                        Records.none(operator.output), nothing, passed.failures, nothing, passed.filtered, passed.added
                    )
                self._known[(stream, chain[:end])] = known
            passed = known
        return passed

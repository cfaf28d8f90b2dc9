"""Operators: map, filter, flat_map and split, run by a stream's producer on the way to each consumer.

An operator has no state, key or commit: it is a function of one record, applied to productions before they are split by
key, in the turn and the checkpoint of their producer. A common beginning of several consumers' chains runs once. A row
keeps the watermark before it, so a stage behind operators judges records as if the source had sent only those that the
operators let through (I9).

A function receives a record (or, with `columns=True`, a whole `pyarrow.RecordBatch`) and must depend on nothing else:
it may be called again for the same record. It runs where callbacks of a `Computation` run: in the step thread, unless
it declares that it only computes (`immediate=True`). A record for which it raises is tried `Limits.record_attempts_max`
times and then dead-lettered with the traceback, once per consumer; the other records continue. A function over columns
that raises is called with ever smaller pieces until the record is found. A function that does not return columns of the
right length and type is an error in the program and stops the worker (SchemaError).
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
from millpy.model.dead_letter import payload_of
from millpy.model.identity import Identity, identity_of_function
from millpy.model.identity_text import identity_text
from millpy.model.record import Records, RecordType, concat
from millpy.model.step_progress import UNRETURNED_MAX, StepAbandonment, StepProgress, is_user_error
from millpy.model.time import Instant

Rows = npt.NDArray[np.int64]
Function = Callable[[Any], Any]
Failures = list[tuple[int, BaseException]]


@dataclass(slots=True)
class ChainOutput:
    """The output of the operators so far.

    Attributes:
        records: the remaining records, in order.
        rows: row of the producer's records from which each record comes; None if they correspond one to one.
        failures: (row of the producer's records, error) of the failed records.
        filtered, added: number of records that operators have dropped, and made beyond one for each; counted by their
            answers, not by the remaining records (I8).
        labels: behind a split, the index of each record's branch; -1 for none.
    """

    records: Records
    rows: Rows | None = None
    failures: Failures = field(default_factory=list)
    labels: Rows | None = None
    filtered: int = 0
    added: int = 0


@dataclass(slots=True)
class FunctionOutput:
    """The output of one function: `parents` is the row from which each record comes; the rest as in `ChainOutput`."""

    records: Records
    parents: Rows
    labels: Rows | None = None
    filtered: int = 0
    added: int = 0


class Operator:
    """A user's function of records, with the type of its output.

    Attributes:
        output: type of its output.
        immediate: whether the function only computes and so may run on the event loop when there are few records.
    """

    word: ClassVar[str]

    def __init__(
        self, function: Function, input: RecordType, output: RecordType, *, columns: bool, immediate: bool = False
    ) -> None:
        self.immediate = immediate
        self.function = function
        self.output = output
        self._columns = columns
        # A function may change its record in place, and other consumers share the object.
        self._clone = input.cloner()

    def __repr__(self) -> str:
        return f"{self.word}({identity_text(identity_of_function(self.function))})"

    def identity(self) -> Identity:
        """Describe the operator: its function by name, and the fields that it makes."""
        return {
            "kind": "operator",
            "operator": self.word,
            "function": identity_of_function(self.function),
            "fields": self.output.described_fields(),
        }

    def apply(self, before: ChainOutput, attempts_max: int, progress: StepProgress) -> ChainOutput:
        """Apply the function to records; a record for which it raises becomes a failure."""
        parts: list[FunctionOutput] = []
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
        return ChainOutput(
            concat([part.records for part in parts]) if parts else Records.empty(self.output),
            rows,
            [*before.failures, *failures],
            np.concatenate(labels) if labels else None,
            before.filtered + sum(part.filtered for part in parts),
            before.added + sum(part.added for part in parts),
        )

    def _take_objects(
        self, records: Records, attempts_max: int, failures: Failures, progress: StepProgress
    ) -> FunctionOutput:
        """Call the function for each record."""
        one, clone, run = self._one, self._clone, progress.run
        values: list[Any] = []
        rows: list[int] = []
        row, record, at = 0, None, Instant(0)
        progress.current_call = lambda: (self.word, (repr(self), at, payload_of(record)))
        for row, (record, at) in enumerate(zip(records.objects(), records.event_times.tolist(), strict=True)):
            if progress.unreturned and progress.is_hopeless((self.word, (repr(self), at, payload_of(record)))):
                failures.append((row, CallTimeoutError(f"{self!r} did not return, {UNRETURNED_MAX} times")))
                continue
            for attempt in range(1, attempts_max + 1):
                try:
                    values.append(one(record if clone is None else clone(record), at))
                    rows.append(row)
                    break
                except BaseException as error:  # user code: dead-lettered, see the module docstring
                    if not is_user_error(error):
                        raise
                    if attempt == attempts_max:
                        failures.append((row, error))
            progress.units += 1
            if progress.run != run:
                raise StepAbandonment
        progress.current_call = None
        return self._gathered(records, values, rows)

    def _take_columns(
        self,
        records: Records,
        start: int,
        attempts_max: int,
        parts: list[FunctionOutput],
        failures: Failures,
        progress: StepProgress,
    ) -> None:
        """Call the function for all records at once; if it raises, for halves, down to the record at fault."""
        run = progress.run
        for attempt in range(1, (1 if len(records) > 1 else attempts_max) + 1):
            try:
                part, refused = self._many(records)
                progress.count_unit(run)
            except SchemaError:
                raise
            except BaseException as error:  # user code: dead-lettered, see the module docstring
                if not is_user_error(error):
                    raise
                progress.count_unit(run)
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
        """Call the function for one record; return what `_gathered` needs of its answer."""
        raise NotImplementedError

    def _gathered(self, records: Records, values: list[Any], rows: list[int]) -> FunctionOutput:
        """Join the answers of `_one` for these rows."""
        raise NotImplementedError

    def _many(self, records: Records) -> tuple[FunctionOutput, Mapping[int, BaseException]]:
        """Return the output for many records, and the errors of rows without output."""
        raise NotImplementedError

    def _answer(self, answer: Any, count: int, *kinds: str) -> pa.Array:
        """Check that the answer is a column of one of these kinds, with one value per record, and return it."""
        if isinstance(answer, pa.ChunkedArray):
            answer = answer.combine_chunks()
        if not isinstance(answer, pa.Array):
            answer = pa.array(answer)
        if str(answer.type) not in (*kinds, "null"):
            raise SchemaError(f"{self!r} returned {answer.type}", hint=f"return a column of {kinds[0]}")
        if len(answer) != count:
            raise SchemaError(f"{self!r} returned {len(answer)} values for {count} records")
        return answer


class Filter(Operator):
    """Keeps the records for which the function is true."""

    word = "filter"

    def __init__(self, function: Function, input: RecordType, *, columns: bool, immediate: bool = False) -> None:
        super().__init__(function, input, input, columns=columns, immediate=immediate)

    def _one(self, record: Any, at: Instant) -> Any:
        return bool(self.function(record))

    def _gathered(self, records: Records, values: list[Any], rows: list[int]) -> FunctionOutput:
        kept = np.array([row for row, keep in zip(rows, values, strict=True) if keep], np.int64)
        return self._kept(records, kept, values.count(False))

    def _many(self, records: Records) -> tuple[FunctionOutput, Mapping[int, BaseException]]:
        mask = self._answer(self.function(records.batch()), len(records), "bool")
        keep = pc.fill_null(mask.cast(pa.bool_()), False)
        rows = np.flatnonzero(keep.to_numpy(zero_copy_only=False))
        return self._kept(records, rows, keep.false_count), {}

    @staticmethod
    def _kept(records: Records, rows: Rows, filtered: int) -> FunctionOutput:
        return FunctionOutput(records if len(rows) == len(records) else records.take(rows), rows, filtered=filtered)


class Split(Operator):
    """Assigns each record to a branch by name; drops it if the function returns None."""

    word = "split"

    def __init__(
        self, function: Function, input: RecordType, into: Sequence[str], *, columns: bool, immediate: bool = False
    ) -> None:
        super().__init__(function, input, input, columns=columns, immediate=immediate)
        self._branches = {name: place for place, name in enumerate(into)}

    def branch(self, name: str) -> Operator:
        """Return the operator behind this one that keeps one branch."""
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

    def _gathered(self, records: Records, values: list[Any], rows: list[int]) -> FunctionOutput:
        places = np.array(rows, np.int64)
        return FunctionOutput(
            records if len(rows) == len(records) else records.take(places), places, np.array(values, np.int64)
        )

    def _many(self, records: Records) -> tuple[FunctionOutput, Mapping[int, BaseException]]:
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
        return FunctionOutput(records.take(rows) if unknown else records, rows, places[codes[rows]]), refused


class Branch(Operator):
    """Keeps one branch of the split before it."""

    word = "branch"

    def __init__(self, output: RecordType, name: str, place: int) -> None:
        super().__init__(lambda record: record, output, output, columns=True, immediate=True)
        self.name = name
        self._place = place

    def __repr__(self) -> str:
        return f"branch({self.name!r})"

    def identity(self) -> Identity:
        """Describe the branch."""
        return {"kind": "operator", "operator": self.word, "name": self.name}

    def apply(self, before: ChainOutput, attempts_max: int, progress: StepProgress) -> ChainOutput:
        """Keep the branch's records; count the others as filtered."""
        assert before.labels is not None, "a branch is behind its split"
        ours = before.labels == self._place
        rows = np.flatnonzero(ours)
        parents = rows if before.rows is None else before.rows[rows]
        others = len(ours) - int(np.count_nonzero(ours))
        filtered = before.filtered + others
        return ChainOutput(before.records.take(rows), parents, before.failures, filtered=filtered, added=before.added)


Chain = tuple[Operator, ...]


class Chains:
    """The productions of one bundle behind their chains of operators; a common beginning of chains runs once."""

    def __init__(
        self, productions: Mapping[str, Records], attempts_max: int, progress: StepProgress | None = None
    ) -> None:
        self._progress = progress or StepProgress()
        self._productions = productions
        self._attempts_max = attempts_max
        self._known: dict[tuple[str, Chain], ChainOutput] = {}

    def output_of(self, stream: str, chain: Chain) -> ChainOutput | None:
        """Return the output of a chain for a stream's productions; None without productions."""
        records = self._productions.get(stream)
        if records is None or not len(records):
            return None
        passed = ChainOutput(records)
        for end, operator in enumerate(chain, 1):
            known = self._known.get((stream, chain[:end]))
            if known is None:
                if len(passed.records):
                    known = operator.apply(passed, self._attempts_max, self._progress)
                else:
                    nothing = np.empty(0, np.int64)
                    known = ChainOutput(
                        Records.empty(operator.output), nothing, passed.failures, nothing, passed.filtered, passed.added
                    )
                self._known[(stream, chain[:end])] = known
            passed = known
        return passed

"""StatementLogic: the step of `to_sql`, which hands each record to a statement of the user's inside the commit.

The step only makes parameters, as text; the store runs the statement once for each record, in order of arrival. What
the statement does is in the commit of the turn, so it happens once, or not at all.

All parameters are text of unknown type, and each place in the statement has a cast. So the server infers the type from
the cast, and one prepared statement serves all values.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from millpy.errors import GraphError
from millpy.model.checkpoint import StatementRows
from millpy.model.field_types import decimal_text
from millpy.model.identity import Identity
from millpy.model.record import getter
from millpy.model.stage import ResidentInterval, StageBinding, StepResult, StoredInterval, Work

VERBS = ("INSERT", "UPDATE", "DELETE", "MERGE", "SELECT", "WITH", "CALL")
"""How a statement may begin. Others, such as COMMIT, would end the transaction of the turn."""
PARAMETERS_MAX = 1_000
STATEMENT_CHARACTERS_MAX = 100_000
_PLACE = re.compile(r"%(?:%|\(([^()]*)\)s|.?)", re.DOTALL)
_VERB = re.compile(r"(?:\s+|--[^\n]*(?:\n|$)|/\*.*?\*/)*([A-Za-z]*)", re.DOTALL)
_EXAMPLE = 'for example "INSERT INTO app.alerts (device, value) VALUES (%(device)s, %(value)s)"'


def _enum_text(value: Any) -> str:
    return str(getattr(value, "value", value))


def _float_text(value: Any) -> str:
    return repr(float(value))


_TEXTS: Mapping[str, Callable[[Any], str]] = {
    "text": _enum_text,
    "bigint": _enum_text,
    "numeric": str,
    "decimal": decimal_text,
    "double precision": _float_text,
    "boolean": lambda value: "t" if value else "f",
    "bytea": lambda value: "\\x" + value.hex(),
    "timestamptz": lambda value: value.isoformat(),
    "date": lambda value: value.isoformat(),
    "uuid": str,
    "jsonb": lambda value: msgspec.json.encode(value).decode(),
}
"""SQL type -> how a value is written for PostgreSQL."""


def places_of(statement: object) -> tuple[str, ...]:
    """Return the fields that a statement names, each as often as it does.

    Raises:
        GraphError: the statement does not begin with one of VERBS, or has a place that is not `%(field)s`.
    """
    if not isinstance(statement, str) or not statement.strip():
        raise GraphError(f"{statement!r} is not a statement", hint=_EXAMPLE)
    if len(statement) > STATEMENT_CHARACTERS_MAX:
        raise GraphError(
            f"a statement of {len(statement):,} characters is too long; the limit is {STATEMENT_CHARACTERS_MAX:,}",
            hint="make a function or a procedure, and call that",
        )
    verb = next(_VERB.finditer(statement))[1]  # it matches the empty text, too
    if verb.upper() not in VERBS:
        raise GraphError(
            f"the statement begins with {verb or statement.strip()[:20]!r}",
            hint=f"begin with {', '.join(VERBS[:-1])} or {VERBS[-1]}: it runs inside the commit of a turn",
        )
    found = []
    for place in _PLACE.finditer(statement):
        if place[0] == "%%":
            continue
        if place[1] is None:
            raise GraphError(
                f"{place[0]!r} in the statement is not a place for a field",
                hint="write %(field)s for the value of a field, and %% for a percent sign",
            )
        found.append(place[1])
    if len(found) > PARAMETERS_MAX:
        raise GraphError(f"a statement has {len(found):,} places; the limit is {PARAMETERS_MAX:,}")
    return tuple(found)


def typed_query(statement: str, types: Sequence[str]) -> str:
    """Return a statement for the server: `$1::type` for the first place, and so on."""
    numbered = iter(range(1, len(types) + 1))

    def place(found: re.Match[str]) -> str:
        if found[0] == "%%":
            return "%"
        number = next(numbered)
        return f"(${number}::{'numeric' if types[number - 1] == 'decimal' else types[number - 1]})"

    return _PLACE.sub(place, statement)


class StatementLogic:
    """A step that runs a statement for each record.

    Args:
        statement: as the user wrote it.
        fields: the field of each of its places.
        types: the SQL type of each.
    """

    def __init__(self, statement: str, fields: Sequence[str], types: Sequence[str]) -> None:
        self.statement = statement
        self.query = typed_query(statement, types)
        self._fields = tuple(fields)
        self._types = tuple(types)

    @property
    def places(self) -> int:
        """The number of its parameters."""
        return len(self._fields)

    @property
    def is_call(self) -> bool:
        """Whether it calls a procedure."""
        return next(_VERB.finditer(self.statement))[1].upper() == "CALL"

    def bind(self, binding: StageBinding) -> StatementStage:
        """Return the stage, which can open intervals."""
        columns = [(getter(field), _TEXTS[kind]) for field, kind in zip(self._fields, self._types, strict=True)]
        return StatementStage(binding, columns)

    def identity(self) -> Identity:
        """Describe the step. It keeps nothing, so the statement is among the settings."""
        return {"kind": "sql"}

    def settings(self) -> Identity:
        """Describe the statement, which records to come run."""
        return {"statement": self.statement}


Columns = Sequence[tuple[Callable[[Any], Any], Callable[[Any], str]]]
"""Of each place: how to read its field of a record, and how to write the value."""


class StatementStage:
    """A step of `to_sql` in a deployed graph."""

    def __init__(self, binding: StageBinding, columns: Columns) -> None:
        self._binding = binding
        self._columns = columns

    def open(self, recovered: StoredInterval) -> StatementInterval:
        """Return an interval, which has no soft state."""
        return StatementInterval(self._binding, self._columns)


class StatementInterval(ResidentInterval):
    """One interval of a step of `to_sql`."""

    immediate = True

    def __init__(self, binding: StageBinding, columns: Columns) -> None:
        self._binding = binding
        self._columns = columns

    def step(self, work: Work) -> StepResult:
        """Make the parameters of all records, in order of arrival; none of them is late.

        The records of a generation beside the current one are consumed without effect.
        """
        consumed: Counter[int] = Counter()
        rows: list[tuple[str | None, ...]] = []
        for arrival in work.arrived:
            bundle = arrival.bundle
            consumed[bundle.input] += len(bundle)
            if len(bundle) and self._binding.is_current:
                rows += self._rows(bundle.records.objects())
        statements = [StatementRows(self._binding.computation, rows)] if rows else []
        return StepResult(statements=statements, consumed_by_input=dict(consumed))

    def _rows(self, objects: Sequence[Any]) -> list[tuple[str | None, ...]]:
        if not self._columns:
            return [()] * len(objects)
        columns = []
        for read, write in self._columns:
            values = map(read, objects)
            columns.append([None if value is None else write(value) for value in values])
        return list(zip(*columns, strict=True))

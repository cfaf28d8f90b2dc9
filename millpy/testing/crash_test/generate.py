"""Generates plausible records from a schema: keys that repeat, event times that rise with disorder, ids, numbers.

One seed decides everything and the time starts at a fixed instant, so the same command makes the same bytes. Some
records are late, one in fifty occurs twice if the graph deduplicates, and devices fall silent for a while.
"""

from __future__ import annotations

import random
import typing
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from millpy.errors import UsageError
from millpy.graph import Graph, InjectorNode, StageNode
from millpy.model.field_types import is_enum, is_json, members_of
from millpy.model.record import without_none
from millpy.model.time import Instant, instant, to_datetime

BEGINNING = instant(datetime(2024, 1, 1, tzinfo=UTC))
STEP_US = 50_000
KEYS = 40
DOUBLED = 0.02
LATE = 0.005
ABSENT = 0.1
WORDS = ("north", "south", "east", "west", "upper", "lower", "inner", "outer")
UNITS_US = {"s": 1_000_000, "ms": 1_000, "us": 1, "ns": 0.001}


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The bounds of `Annotated[int, Meta(ge=0)]` and the like."""

    lo: float
    hi: float


def key_fields(graph: Graph, node: InjectorNode) -> tuple[str, ...]:
    """Return the fields by which the graph keys this source's stream."""
    stages = [stage for stage in graph.nodes if isinstance(stage, StageNode)]
    inputs = [taken for stage in stages for taken in stage.inputs if taken.producer is node]
    names = [name for taken in inputs for name in taken.fields if name in node.record_type.fields]
    return tuple(dict.fromkeys(names))


def payloads(node: InjectorNode, keys: Collection[str], count: int, seed: int) -> Iterator[bytes]:
    """Yield JSON payloads in order of arrival; duplicates are among the `count`.

    Raises:
        UsageError: the schema rejects generated records (a pattern, a check of its own).
    """
    maker = _Maker(node, keys, random.Random(f"{seed}/{node.name}"))
    waiting: list[tuple[int, bytes]] = []
    number = made = 0
    while made < count:
        if waiting and waiting[0][0] <= number:
            yield waiting.pop(0)[1]
            made += 1
            continue
        payload = maker.payload(number)
        number += 1
        made += 1
        if node.dedupe is not None and maker.rng.random() < DOUBLED:
            waiting.append((number + 30, payload))
        yield payload


class _Maker:
    """Makes the records of one stream."""

    def __init__(self, node: InjectorNode, keys: Collection[str], rng: random.Random) -> None:
        self.rng = rng
        self._type = node.record_type
        self._time = node.event_time
        self._keys = keys
        self._ids = [name for name in (node.dedupe.fields if node.dedupe else ()) if name not in keys]
        self._clock = node.dedupe.time if node.dedupe else None
        self._clock_unit = node.dedupe.unit if node.dedupe else None

    def payload(self, number: int) -> bytes:
        key = self._key(number)
        happened = self._happened(number)
        values = {name: self._value(name, number, key, happened) for name in self._type.fields}
        try:
            payload = msgspec.json.encode(self._type.struct(**values))
            msgspec.json.decode(payload, type=self._type.struct)
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            raise UsageError(
                f"cannot generate records of {self._type.struct.__name__}: {error}",
                hint="give records with --input FILE",
            ) from error
        return payload

    def _key(self, number: int) -> int:
        """Choose a device; each falls silent for a third of every ten minutes, at different times."""
        phase = number * STEP_US // 200_000_000
        speaking = [key for key in range(KEYS) if (phase + key) % 3]
        return self.rng.choice(speaking)

    def _happened(self, number: int) -> int:
        at = BEGINNING + number * STEP_US
        disorder = self._time.max_disorder_us
        if disorder and self.rng.random() < LATE:
            return at - int(disorder * self.rng.uniform(1.5, 4))
        return at - int(disorder * self.rng.uniform(0, 0.9)) if disorder and self.rng.random() < 0.4 else at

    def _value(self, name: str, number: int, key: int, happened: int) -> Any:
        annotation, nullable = without_none(self._type.annotations[name])
        if name == self._time.field:
            return _moment(annotation, happened, self._time.unit)
        if name == self._clock:
            return _moment(annotation, BEGINNING + number * STEP_US, self._clock_unit)
        if name in self._keys:
            return _identity(annotation, key, name, self._type.annotations[name])
        if name in self._ids:
            return _identity(annotation, number, name, self._type.annotations[name])
        if nullable and self.rng.random() < ABSENT:
            return None
        return self._plausible(self._type.annotations[name])

    def _plausible(self, annotated: Any) -> Any:
        """Return a random value of a type, within its bounds."""
        if (values := _literals(annotated)) is not None:
            return self.rng.choice(values)
        if is_json(annotated):
            return self._open(annotated)
        annotation, rng = without_none(annotated)[0], self.rng
        bounds = _bounds(annotated)
        if annotation is bool:
            return rng.random() < 0.5
        if annotation is int:
            return rng.randint(int(bounds.lo), int(bounds.hi))
        if annotation is float:
            middle, spread = (bounds.lo + bounds.hi) / 2, (bounds.hi - bounds.lo) / 6
            return round(min(max(rng.gauss(middle, spread), bounds.lo), bounds.hi), 3)
        if annotation is str:
            return rng.choice(WORDS)
        if annotation is bytes:
            return rng.randbytes(8)
        if annotation is datetime:
            return to_datetime(Instant(BEGINNING + rng.randrange(10**12)))
        if annotation is UUID:
            return UUID(int=rng.getrandbits(128))
        if annotation in (Decimal, date):
            number = rng.randrange(-1_000, 1_000)
            return Decimal(number).scaleb(-2) if annotation is Decimal else date(2026, 1, 1) + timedelta(days=number)
        return rng.choice(list(annotation)) if is_enum(annotation) else self._nested(annotation)

    def _open(self, annotated: Any) -> Any:
        """Return a random value of a field that is stored as JSON."""
        members = [member for member in members_of(annotated) if member is not type(None)]
        if len(members) > 1:
            return self._plausible(self.rng.choice(members))
        plain = without_none(members[0])[0]
        if plain in (dict, list, Any):
            return [1, "a", None] if plain is list else {self.rng.choice(WORDS): [1.5, None, {"a": True}]}
        return self._nested(plain)

    def _nested(self, annotation: Any) -> Any:
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is list:
            return [self._plausible(arguments[0]) for _ in range(self.rng.randint(0, 3))]
        if origin is dict:
            return {word: self._plausible(arguments[1]) for word in self.rng.sample(WORDS, 2)}
        hints = typing.get_type_hints(annotation, include_extras=True)
        return annotation(**{name: self._plausible(hints[name]) for name in annotation.__struct_fields__})


def _literals(annotated: Any) -> list[Any] | None:
    """Return the values of a Literal; None for another type."""
    for member in members_of(annotated):
        if typing.get_origin(member) is typing.Literal:
            return [value for value in typing.get_args(member) if value is not None]
    return None


def _identity(annotation: Any, number: int, name: str, annotated: Any) -> Any:
    if (values := _literals(annotated)) is not None:
        return values[number % len(values)]
    if annotation is int:
        return number
    if annotation is bool:
        return number % 2 == 0
    if annotation is UUID:
        return UUID(int=number + 1)
    if annotation is bytes:
        return number.to_bytes(8, "big")
    return f"{name}-{number:02}"


def _moment(annotation: Any, at: int, unit: str | None) -> Any:
    if annotation is datetime:
        return to_datetime(Instant(at))
    return annotation(at / UNITS_US[unit or "us"])


def _bounds(annotated: Any) -> _Bounds:
    meta = [found for found in getattr(annotated, "__metadata__", ()) if isinstance(found, msgspec.Meta)]
    lows = [bound for m in meta for bound in (m.ge, m.gt and m.gt + 1) if bound is not None]
    highs = [bound for m in meta for bound in (m.le, m.lt and m.lt - 1) if bound is not None]
    lo = max(lows, default=min(0.0, *highs) if highs else 0.0)
    return _Bounds(lo, min(highs, default=lo + 100.0))

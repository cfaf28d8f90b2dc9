"""The differences between the descriptions of two graphs, and the kind of each.

    addition   stored data keeps its meaning: a computation, stream, table, source partition or cell is new, a windowed
               step has one more aggregate at the end, or a record has one more field, with a default
    setting    stored data stays; only what becomes of records to come changes: the watermark, when windows are over,
               when ids are forgotten (`horizons.py`), which streams a step reads, through which operators
    state      cells of a computation were removed or have other types: needs a function that migrates them
    meaning    stored state, positions or result rows would change their meaning: refused
    back       an addition is removed with its stored data: only when an operator requests it (`taking_back.py`)

Descriptions are JSON (`identity.py`) and are compared as such; `identity_text.py` formats the parts that differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal

from millpy.model.horizons import HORIZON, HORIZONS, KEPT, LATENESS, by_site, effect_of, horizon_changes
from millpy.model.identity import allows_none, or_none
from millpy.model.identity_text import fields_text, identity_text, parameter_name, parameter_text, type_text
from millpy.model.time import duration_text

Kind = Literal["addition", "setting", "state", "meaning", "back"]
Description = Mapping[str, Any]
Place = tuple[str, str, int]
"""Of a subscription: stream, consumer, input."""
UNITES = ("window", "computation")
"""Kinds of steps that may read one more stream live."""
CHANGES_SHOWN_MAX = 5
TEXT_MAX = 160
FROM_NOW = "it starts with new data"
_PARTS = {
    "kind": "the kind of step",
    "window": "the window",
    "stored_form": "the stored form",
    "source": "the source",
    "event_time": "the event time",
    HORIZON: "the horizon of dedupe ids",
    KEPT: "the horizon of duplicates",
    "takes_retractions": "whether the windows before it retract",
}
GROWING = {"mqtt": "filters"}
"""Kind of a source -> the list in its identity that may get more members, each of which is a source partition."""
SOURCE_PART = "source part"
"""Mark of a change that removes such a member; it cannot be taken back."""
_LEFT_OUT = {
    "accumulation": "accumulating",
    "takes_retractions": False,
    "timestamp_combiner": "end_of_window",
    "on_time_pane": "if_not_empty",
    "final_pane": "if_not_empty",
    "pane_info": False,
}
"""Parts that are left out of a description while they have these values."""
_ENUMS = {
    "accumulation": "Accumulation",
    "timestamp_combiner": "TimestampCombiner",
    "on_time_pane": "FiringBehavior",
    "final_pane": "FiringBehavior",
}


@dataclass(frozen=True, slots=True)
class GraphChange:
    """One difference between a deployed graph and a given one.

    Attributes:
        kind: kind of the change; see above.
        subject: the part of the graph, such as "result table per_minute".
        difference: what differs, for messages.
        computation: the computation that has the state, for a change of state; the one whose records have another
            meaning from the change on, for a setting (`changed_meaning.py`).
        addition: what an addition adds, as plain JSON: the kind and names of the part, and its description.
    """

    kind: Kind
    subject: str
    difference: str
    computation: str = ""
    addition: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.subject}: {self.difference}"


def changes_between(stored: Description, wanted: Description) -> list[GraphChange]:
    """Return the changes that deploying `wanted` over `stored` would make.

    A file with fewer source partitions than are deployed runs all deployed ones, so that is no change.
    """
    found = [
        *_computations(stored, wanted),
        *growing_by_site(stored, wanted),
        *_streams(stored, wanted),
        *_subscriptions(stored, wanted),
    ]
    found += _tables(stored, wanted)
    return found


def new_partitions(stored: Description, wanted: Description) -> dict[str, list[str]]:
    """Return the source partitions that deployed injectors do not yet have, by injector."""
    added = {}
    for name, computation in wanted["computations"].items():
        if name in stored["computations"]:
            before = stored["computations"][name]["partitions"]
            if new := [partition for partition in computation["partitions"] if partition not in before]:
                added[name] = new
    return added


def new_columns(before: Description, after: Description) -> list[str]:
    """Return the names of the columns that a result table does not yet have."""
    known = {name for name, *_ in before["columns"]}
    return [name for name, *_ in after["columns"] if name not in known]


def nullable_columns(before: Description, after: Description) -> list[str]:
    """Return the names of the columns that may be NULL now, could not be before, and have kept their type."""
    was = {name: column for name, *column in before["columns"]}
    return [name for name, type_, nullable in after["columns"] if nullable and was.get(name) == [type_, False]]


def changes_text(changes: Sequence[GraphChange]) -> str:
    """Return the first CHANGES_SHOWN_MAX changes, and how many more there are, in one line."""
    words = [str(change) for change in changes[:CHANGES_SHOWN_MAX]]
    more = len(changes) - len(words)
    return "; ".join([*words, f"and {more} more"] if more else words)


def of_kind(kind: Kind, changes: Sequence[GraphChange]) -> list[GraphChange]:
    """Return the changes of one kind."""
    return [change for change in changes if change.kind == kind]


def named_parts(computation: Description, part: str) -> dict[str, Any]:
    """Return the "cells" or "aggregates" of a described computation by name, in order."""
    return dict(computation["identity"].get(part, ()))


# Computations.


def _computations(stored: Description, wanted: Description) -> Iterator[GraphChange]:
    before, after = stored["computations"], wanted["computations"]
    added = new_partitions(stored, wanted)
    for name, computation in before.items():
        if name not in after:
            yield GraphChange("meaning", name, f"the {_noun(computation)} was removed")
    for name, computation in after.items():
        if name not in before:
            later = f"; {FROM_NOW}" if computation["kind"] != "injector" else ""
            words = f"the {_noun(computation)} is new{later}"
            yield GraphChange("addition", name, words, addition=("computation", name))
            continue
        for partition in added.get(name, ()):
            words, addition = f"source partition {partition!r} is new", ("partition", name, partition)
            yield GraphChange("addition", name, words, addition=addition)
        yield from _computation(name, before[name], computation)


def _noun(computation: Description) -> str:
    return {"injector": "source", "stage": "computation", "archive": "archive", "sink": "sink"}[computation["kind"]]


def _computation(name: str, before: Description, after: Description) -> Iterator[GraphChange]:
    if before["kind"] != after["kind"]:
        yield GraphChange("meaning", name, f"it was a {_noun(before)} and is a {_noun(after)}")
        return
    if before["intervals"] != after["intervals"]:
        was, now = str(before["intervals"]), str(after["intervals"])
        yield GraphChange("meaning", name, _changed("the number of intervals", was, now))
    parts_before, parts_after = before["identity"], after["identity"]
    if parts_before.get("kind") != parts_after.get("kind"):
        parts_before, parts_after = ({"kind": parts.get("kind")} for parts in (parts_before, parts_after))
    yield from _parts("meaning", name, parts_before, parts_after)
    yield from _parts("setting", name, before["settings"], after["settings"])


def growing_by_site(stored: Description, wanted: Description) -> Iterator[GraphChange]:
    """Yield the horizons that must not grow: of a window by site, no watermark says which sites it was over for."""
    for change in horizon_changes(stored, wanted):
        if change.setting == LATENESS and change.grows and by_site(change.computation, stored):
            words = "its source has a watermark for each site (watermark_by=), so its allowed lateness cannot grow"
            yield GraphChange("meaning", change.computation, words)


def _parts(kind: Kind, name: str, before: Description, after: Description) -> Iterator[GraphChange]:
    for part in sorted({*before, *after}):
        was, now = (found.get(part, _LEFT_OUT.get(part)) for found in (before, after))
        if was == now or (part in HORIZONS and None in (was, now)):  # with the step or the ids
            continue
        if part == "cells":
            yield from _cells(name, dict(was or ()), dict(now or ()))
        elif part == "aggregates":
            yield from _aggregates_of(name, dict(was or ()), dict(now or ()))
        elif part == "source":
            yield from _source(name, was or {}, now or {})
        elif part == "parameters":
            yield from _parameters(kind, name, was or {}, now or {})
        else:
            words = _changed(_PARTS.get(part, parameter_name(part)), *(_part_text(part, value) for value in (was, now)))
            yield GraphChange(kind, name, words + effect_of(part, was, now), name if part in (LATENESS, KEPT) else "")


def _source(name: str, before: Description, after: Description) -> Iterator[GraphChange]:
    """Compare sources. Each part of a list that may grow is a source partition, whose addition is reported as such."""
    what = GROWING.get(str(before.get("kind")))
    if what is None or {**before, what: ()} != {**after, what: ()}:
        yield GraphChange("meaning", name, _changed("the source", identity_text(before), identity_text(after)))
        return
    for part in before[what]:
        if part not in after[what]:
            words = f"{part!r} is no longer among its {what}, but its broker may still keep messages for it"
            yield GraphChange("meaning", name, words, addition=(SOURCE_PART, name, part))


def _parameters(kind: Kind, name: str, before: Description, after: Description) -> Iterator[GraphChange]:
    """Yield a change for each parameter of a `Computation` that differs."""
    for parameter in sorted({*before, *after}):
        was, now = before.get(parameter), after.get(parameter)
        if was != now:
            words = _changed(f"parameter {parameter!r}", identity_text(was), identity_text(now))
            yield GraphChange(kind, name, words)


def _part_text(part: str, value: Any) -> str:
    if part in _ENUMS:
        return f"{_ENUMS[part]}.{value.upper()}"
    return str(value) if part in ("kind", "stored_form") else parameter_text(part, value)


def _cells(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[GraphChange]:
    """Compare cells. They are stored by name, so their order does not matter."""
    for change in _named(name, "cell", "state", before, after):
        yield replace(change, computation=name if change.kind == "state" else "")


def _aggregates_of(name: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[GraphChange]:
    """Compare aggregates. Stored windows have their accumulators in this order, so new ones must come last."""
    kept = [own for own in was if own in now]
    moved = list(now)[: len(kept)] != kept
    if moved:
        words = _changed("the order of aggregates", ", ".join(was), ", ".join(now))
        yield GraphChange("meaning", name, f"{words}, but new ones must come last")
    for change in _named(name, "aggregate", "meaning", was, now):
        if not (moved and change.kind == "addition"):
            yield change


def _named(name: str, word: str, kind: Kind, was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[GraphChange]:
    yield from _lost(word, name, was, now, kind)
    for own, identity in now.items():
        what, text = f"{word} {own!r}", identity_text(identity)
        if own not in was:
            addition = (word, name, own, identity)
            yield GraphChange("addition", name, f"{what} is new, {text}", addition=addition)
        elif was[own] != identity:
            yield GraphChange(kind, name, _changed(what, identity_text(was[own]), text))


def _lost(
    word: str, subject: str, was: Mapping[str, Any], now: Mapping[str, Any], kind: Kind = "meaning"
) -> Iterator[GraphChange]:
    for name in was:
        if name not in now:
            yield GraphChange(kind, subject, f"{word} {name!r} was removed")


# Streams.


def _streams(stored: Description, wanted: Description) -> Iterator[GraphChange]:
    before, after = stored["streams"], wanted["streams"]
    for name, stream in before.items():
        if name not in after and stream["producer"] in wanted["computations"]:
            yield GraphChange("meaning", f"stream {name}", "it was removed")
    for name, stream in after.items():
        subject = f"stream {name}"
        if name not in before:
            if stream["producer"] in stored["computations"]:
                yield GraphChange("addition", subject, "it is new", addition=("stream", name))
            continue
        if before[name]["producer"] != stream["producer"]:
            words = _changed("the producer", before[name]["producer"], stream["producer"])
            yield GraphChange("meaning", subject, words)
        yield from _fields(subject, name, stored, wanted)


def _fields(subject: str, stream: str, stored: Description, wanted: Description) -> Iterator[GraphChange]:
    was, now = (dict(description["streams"][stream]["fields"]) for description in (stored, wanted))
    yield from _lost("field", subject, was, now)
    for name, type_ in now.items():
        if name not in was or was[name] == type_:
            continue
        if type_ == or_none(was[name]):
            words = f"field {name!r} now allows None"
            yield GraphChange("addition", subject, words, addition=("nullable field", stream, name))
        else:
            words = _changed(f"the type of field {name!r}", type_text(was[name]), type_text(type_))
            yield GraphChange("meaning", subject, words)
    added = {name: type_ for name, type_ in now.items() if name not in was}
    if list(added) == _new_fields(stream, stored, wanted):
        for name, type_ in added.items():
            words = f"field {name!r} is new, {type_text(type_)}"
            yield GraphChange("addition", subject, words, addition=("field", stream, name, type_))
    elif not set(added) <= _new_aggregates(stream, stored, wanted):
        words = (
            f"new fields: {fields_text(list(added.items()))}; a new field needs a default and comes after the others"
        )
        yield GraphChange("meaning", subject, words)
    elif added and (readers := _readers(stream, stored) | _readers(stream, wanted)):
        words = f"new fields: {', '.join(added)}; but {', '.join(sorted(readers))} already reads its windows"
        yield GraphChange("meaning", subject, words)


def _new_fields(stream: str, stored: Description, wanted: Description) -> list[str]:
    """Return the new fields, in order, if they have defaults and come after the stored ones; else none.

    Stored records then stay valid.
    """
    before, after = (d["streams"].get(stream, {"fields": []}) for d in (stored, wanted))
    kept, now = ([name for name, _ in found["fields"]] for found in (before, after))
    added = now[len(kept) :]
    return added if kept == now[: len(kept)] and set(added) <= set(after.get("optional", ())) else []


def _readers(stream: str, description: Description) -> set[str]:
    return {found["consumer"] for found in description["subscriptions"] if found["stream"] == stream}


def _new_aggregates(stream: str, stored: Description, wanted: Description) -> set[str]:
    after, before = (set(_aggregates(stream, description)) for description in (wanted, stored))
    return after - before


def _aggregates(stream: str, description: Description) -> Mapping[str, Any]:
    producer = description["streams"].get(stream, {}).get("producer")
    return named_parts(description["computations"].get(producer, {"identity": {}}), "aggregates")


# Subscriptions.


def _subscriptions(stored: Description, wanted: Description) -> Iterator[GraphChange]:
    before, after = ({_place(found): found for found in d["subscriptions"]} for d in (stored, wanted))
    known = stored["computations"].keys() & wanted["computations"].keys()
    for place in before:
        stream, consumer, _ = place
        if consumer in known and place not in after:
            yield GraphChange("meaning", consumer, f"it no longer reads {stream}", addition=(SOURCE_PART, *place))
    for place, now in after.items():
        stream, consumer, _ = place
        if consumer not in known:
            if unknown := _unknown_to_some_windows(stream, stored):
                words = f"it reads {stream}, whose windows from before {', '.join(unknown)} was added lack its value"
                yield GraphChange("meaning", consumer, words)
            if _may_retract(stream, stored) and wanted["computations"][consumer]["kind"] != "archive":
                words = f"it reads {stream}, and would get retractions of records from before, which it did not get"
                yield GraphChange("meaning", consumer, words)
            continue
        was = before.get(place)
        if was is None:
            yield _united(place, stored, wanted)
            continue
        if was["key"] != now["key"]:
            words = _changed(f"the key of {stream}", fields_text(was["key"]), fields_text(now["key"]))
            yield GraphChange("meaning", consumer, words)
        if was["operators"] != now["operators"]:
            yield _operators(place, stored, wanted)


def _operators(place: Place, stored: Description, wanted: Description) -> GraphChange:
    """Compare the operators before a step. They may change if all that they made before stays readable and true."""
    stream, consumer, _ = place
    was, now = (_subscription(place, description) for description in (stored, wanted))
    texts = (" → ".join(map(identity_text, found["operators"])) or "none" for found in (was, now))
    words = _changed(f"the operators before it on {stream}", *texts)
    if _fields_behind(was, stored) != _fields_behind(now, wanted):
        return GraphChange("meaning", consumer, f"{words}, and with them the type of its records")
    if _may_retract(stream, stored):
        return GraphChange("meaning", consumer, f"{words}, and would miss retractions of what passed the earlier ones")
    if wanted["computations"][consumer]["kind"] == "archive":
        return GraphChange("meaning", consumer, f"{words}, and no reader could tell its files from the earlier ones")
    return GraphChange("setting", consumer, f"{words}, for records from now on", computation=consumer)


def _united(place: Place, stored: Description, wanted: Description) -> GraphChange:
    """Judge one more stream before a step. It needs the type and key that the step's other records have."""
    stream, consumer, number = place
    now = _subscription(place, wanted)
    others = [found for found in stored["subscriptions"] if found["consumer"] == consumer]
    first = next((found for found in others if found["input"] == 0), now)
    words = f"it reads {stream}, which it did not read before"
    kind = wanted["computations"][consumer]["identity"].get("kind")
    why = ""
    if number < len(others):
        why = "; a new stream comes after the others"
    elif kind not in UNITES:
        why = "; only windows and a Computation take one more"
    elif now["key"] != first["key"] or _fields_behind(now, wanted) != _fields_behind(first, stored):
        why = "; its records or their key have another type than those that the step reads"
    elif _may_retract(stream, wanted) or by_site(consumer, wanted):
        why = "; its records may be retracted, or their sites have a watermark each"
    if why:
        return GraphChange("meaning", consumer, words + why)
    words = f"it also reads {stream}, for records from now on; those behind its watermark are late"
    return GraphChange("setting", consumer, words, computation=consumer)


def _fields_behind(subscription: Description, description: Description) -> Any:
    """Return the described fields of the records behind the operators of a subscription."""
    made = [operator["fields"] for operator in subscription["operators"] if "fields" in operator]
    return made[-1] if made else description["streams"][subscription["stream"]]["fields"]


def _subscription(place: Place, description: Description) -> Description:
    return next(found for found in description["subscriptions"] if _place(found) == place)


def _place(subscription: Description) -> Place:
    return subscription["stream"], subscription["consumer"], subscription["input"]


def _unknown_to_some_windows(stream: str, stored: Description) -> list[str]:
    """Return the aggregates of a stream that were added live and may not be None, though older windows lack them."""
    found = stored["streams"].get(stream, {"producer": "", "fields": []})
    grown = stored["computations"].get(found["producer"], {}).get("grown", ())
    types = dict(found["fields"])
    return [name for name in grown if not allows_none(types.get(name, "none"))]


def _may_retract(stream: str, stored: Description) -> bool:
    """Tell whether a deployed stream may retract records that it has."""
    producer = stored["streams"].get(stream, {}).get("producer")
    found = stored["computations"].get(producer, {"identity": {}, "settings": {}})
    identity = found["identity"]
    if identity.get("kind") in ("deduplicate", "interval_join"):
        return bool(identity.get("takes_retractions"))
    repeats = bool(found["settings"].get(LATENESS)) or identity.get("trigger") != {"kind": "after_watermark"}
    return identity.get("accumulation") == "retracting" and repeats


# Result tables.


def _tables(stored: Description, wanted: Description) -> Iterator[GraphChange]:
    before, after = stored["tables"], wanted["tables"]
    for name in before:
        if name not in after:
            yield GraphChange("meaning", f"result table {name}", "it was removed")
    for name, table in after.items():
        subject = f"result table {name}"
        if name not in before:
            yield GraphChange("addition", subject, f"it is new; {FROM_NOW}", addition=("table", name))
            continue
        for part in ("kind", "stream"):
            if before[name][part] != table[part]:
                yield GraphChange("meaning", subject, _changed(f"the {part}", before[name][part], table[part]))
        if (had := "history" in before[name]) != ("history" in table):
            words = "it has a history, and would keep none" if had else "it would keep a history, and has none"
            yield GraphChange("meaning", subject, words)
        yield from _retention(subject, before[name].get("retention"), table.get("retention"))
        yield from _columns(subject, name, stored, wanted)


def _retention(subject: str, was: int | None, now: int | None) -> Iterator[GraphChange]:
    """Compare retentions, in µs. Only a table that was made with one has partitions."""
    if was is None and now is not None:
        yield GraphChange("meaning", subject, "it would have a retention, and has no partitions to drop")
    elif was is not None and now is None:
        words = "it has a retention, and would keep all rows: give a long one, such as days(36500), instead"
        yield GraphChange("meaning", subject, words)
    elif was is not None and now is not None and was != now:
        words = _changed("the retention", *(duration_text(length) for length in (was, now)))
        yield GraphChange("setting", subject, f"{words}; older rows are dropped" if now < was else words)


def _columns(subject: str, table: str, stored: Description, wanted: Description) -> Iterator[GraphChange]:
    before, after = stored["tables"][table], wanted["tables"][table]
    was, now = ({name: column for name, *column in found["columns"]} for found in (before, after))
    yield from _lost("column", subject, was, now)
    for name in nullable_columns(before, after):
        words = f"column {name!r} now allows NULL"
        yield GraphChange("addition", subject, words, addition=("nullable column", table, name))
    for name, (type_, nullable) in now.items():
        if name in was and [type_, nullable] != was[name] and [type_, False] != was[name]:
            words = _changed(f"the type of column {name!r}", _column_text(was[name]), _column_text([type_, nullable]))
            yield GraphChange("meaning", subject, words)
    aggregates = _new_aggregates(after["stream"], stored, wanted)
    for name in new_columns(before, after):
        type_ = now[name][0]
        words, addition = f"column {name!r} is new, {type_}", ("column", table, name, type_)
        if name in aggregates:
            yield GraphChange("addition", subject, f"{words}; NULL in existing windows", addition=addition)
        elif after["kind"] == "records" and name in _new_fields(after["stream"], stored, wanted):
            yield GraphChange("addition", subject, f"{words}; NULL in existing rows", addition=addition)
        else:
            yield GraphChange("meaning", subject, words)


def _column_text(column: Sequence[Any]) -> str:
    type_, nullable = column
    return f"{type_}{'' if nullable else ' NOT NULL'}"


# Formatting.


def _changed(what: str, was: str, now: str) -> str:
    """Return "`what` changed from … to …". Long texts are cut to the part around their first difference."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(was, now, strict=False)))
    start = max(same - 40, 0) if max(len(was), len(now)) > TEXT_MAX else 0
    return f"{what} changed from {_short(was, start)} to {_short(now, start)}"


def _short(text: str, start: int) -> str:
    end = start + TEXT_MAX
    return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")

"""Versions: how a graph differs from the one that is deployed, in words, and which differences may go in live.

    addition   nothing that is stored changes its meaning: a computation, stream, table, source partition or cell is
               new, a windowed step has one more aggregate at the end, or a record one more field, with a default
    setting    what is stored stays; from now on the watermark is estimated in another way
    state      cells of a computation have other types, or are gone: goes in with a function that migrates them
    meaning    stored state, positions or result rows would mean something else: refused
    back       an addition is gone, and what it has stored goes with it: only when a person says so (`taking_back.py`)

What an addition has brought is missing in the graph as it was, and missing things are a change of meaning. So the two
never take turns on one state; settings could, and change only when a person says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal

import msgspec

from millpy.errors import GraphError, GraphVersionError
from millpy.model.deployment import GraphSpec

Kind = Literal["addition", "setting", "state", "meaning", "back"]
Description = Mapping[str, Any]
CHANGES_SAID_MAX = 5
FROM_NOW = "it begins with what comes from now on"
NEW_GENERATION = "undo that, or make it the next generation: Graph(…, generation=…) runs beside it until a switch"


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between a deployed graph and a given one.

    Attributes:
        kind: whether it may go in; see above.
        subject: what differs, as "result table per_minute".
        words: how, for people.
        computation: whose state it is, for a change of state.
    """

    kind: Kind
    subject: str
    words: str
    computation: str = ""

    def __str__(self) -> str:
        return f"{self.subject} {self.words}"


def changes_between(stored: Description, wanted: Description) -> list[Change]:
    """What deploying `wanted` over `stored` would change.

    A program that knows fewer source partitions than are deployed runs those that are deployed: that is no change.
    """
    found = [*_computations(stored, wanted), *_streams(stored, wanted), *_subscriptions(stored, wanted)]
    found += _tables(stored, wanted)
    return found


def new_partitions(stored: Description, wanted: Description) -> dict[str, list[str]]:
    """The source partitions that deployed injectors do not have yet, by injector."""
    added = {}
    for name, computation in wanted["computations"].items():
        if name in stored["computations"]:
            before = stored["computations"][name]["partitions"]
            if new := [partition for partition in computation["partitions"] if partition not in before]:
                added[name] = new
    return added


def only_grows(stored: Description, wanted: Description, changes: Sequence[Change]) -> bool:
    """Whether the changes are new source partitions and nothing else, for which a worker has the rights."""
    return sum(map(len, new_partitions(stored, wanted).values())) == len(changes)


def merged(stored: Description, wanted: Description) -> dict[str, Any]:
    """The description of the deployed graph after its changes: no source partition is lost.

    `grown`: aggregates that were added live, which windows from before do not know.
    """
    added = new_partitions(stored, wanted)
    computations = {}
    for name, computation in wanted["computations"].items():
        before = stored["computations"].get(name, {})
        partitions = before.get("partitions", computation["partitions"])
        computations[name] = {**computation, "partitions": [*partitions, *added.get(name, ())]}
        known = {own for own, _ in before["meaning"].get("aggregates", ())} if before else set()
        new = [own for own, _ in computation["meaning"].get("aggregates", ()) if before and own not in known]
        own = {own for own, _ in computation["meaning"].get("aggregates", ())}
        if grown := [*(known for known in before.get("grown", ()) if known in own), *new]:
            computations[name]["grown"] = grown
    return {**wanted, "computations": computations}


def refuse(
    name: str,
    version: int,
    stored: Description,
    wanted: Description,
    *,
    on_purpose: bool,
    changes: Sequence[Change],
    upgrades: Collection[str] = (),
) -> None:
    """Raise when the changes may not go in.

    Args:
        name: of the graph.
        version: the one that is deployed.
        stored: its description.
        wanted: the description of the graph that is to be deployed.
        on_purpose: a person has asked for them.
        changes: from the one to the other.
        upgrades: computations whose state will be migrated.

    Raises:
        GraphVersionError: nothing but what is missing differs: an older version of the graph.
        GraphError: a change of meaning, or a setting that nobody has asked to change.
    """
    meanings, settings = only("meaning", changes), only("setting", changes)
    states = [change for change in only("state", changes) if change.computation not in upgrades]
    if version > 1 and not on_purpose and changes and len([*meanings, *states]) == len(changes):
        since = changes_between(wanted, stored)
        if since and len(only("addition", since)) == len(since):
            raise GraphVersionError(
                f"version {version} of graph {name!r} is deployed, which has more than this one: {said(since)}",
                hint="bring this file up to date; or take back what it lacks: millpy deploy FILE --back",
            )
    if meanings:
        raise GraphError(
            f"graph {name!r} is deployed with another meaning (version {version}): {said(meanings)}",
            hint=NEW_GENERATION,
        )
    if states:
        raise GraphError(
            f"graph {name!r} is deployed with other state (version {version}): {said(states)}",
            hint="give a function to graph.upgrade(…), and `millpy deploy --upgrade`; or make it a new generation",
        )
    if settings and not on_purpose:
        raise GraphError(
            f"graph {name!r} is deployed with other settings (version {version}): {said(settings)}",
            hint="when this file is the newer one, `millpy deploy` it; else bring it up to date",
        )


def refuse_older(spec: GraphSpec, newest: int) -> None:
    """Raise when a generation that is not deployed is older than the newest that is: its state is gone.

    Args:
        spec: of a graph whose generation is not deployed.
        newest: the highest generation that is; 0 for none.

    Raises:
        GraphVersionError: it is older.
    """
    if spec.generation < newest:
        raise GraphVersionError(
            f"generation {newest} of graph {spec.name!r} is deployed, and generation {spec.generation} is not any more",
            hint=f"a new generation has a higher number: Graph({spec.name!r}, generation={newest + 1})",
        )


def said(changes: Sequence[Change]) -> str:
    """Changes in one line; the first of many."""
    words = [str(change) for change in changes[:CHANGES_SAID_MAX]]
    more = len(changes) - len(words)
    return "; ".join([*words, f"and {more} more"] if more else words)


def only(kind: Kind, changes: Sequence[Change]) -> list[Change]:
    """Those of one kind."""
    return [change for change in changes if change.kind == kind]


# What differs.


def _computations(stored: Description, wanted: Description) -> Iterator[Change]:
    before, after = stored["computations"], wanted["computations"]
    added = new_partitions(stored, wanted)
    for name in before:
        if name not in after:
            yield Change("meaning", f"computation {name!r}", "is gone")
    for name, computation in after.items():
        subject = f"{'source' if computation['kind'] == 'injector' else 'computation'} {name!r}"
        if name not in before:
            yield Change("addition", subject, f"is new; {FROM_NOW}" if computation["kind"] == "stage" else "is new")
            continue
        for partition in added.get(name, ()):
            yield Change("addition", subject, f"has one more partition, {partition!r}")
        yield from _computation(subject, name, before[name], computation)


def _computation(subject: str, name: str, before: Description, after: Description) -> Iterator[Change]:
    for part in ("kind", "intervals"):
        if before[part] != after[part]:
            yield Change("meaning", subject, f"has another {part}: {_change(before[part], after[part])}")
    for part in sorted({*before["meaning"], *after["meaning"]}):
        was, now = before["meaning"].get(part), after["meaning"].get(part)
        if was == now:
            continue
        if isinstance(was, list) and isinstance(now, list):
            yield from _cells(subject, name, was, now) if part == "cells" else _aggregates_of(subject, was, now)
        else:
            yield Change("meaning", subject, f"has another {_word(part)}: {_change(was, now)}")
    for part in sorted({*before["settings"], *after["settings"]}):
        was, now = before["settings"].get(part), after["settings"].get(part)
        if was != now:
            yield Change("setting", subject, f"has another {_word(part)}: {_change(was, now)}")


def _cells(subject: str, name: str, before: list[list[str]], after: list[list[str]]) -> Iterator[Change]:
    """Cells are found by their names, so their order says nothing."""
    for change in _named(subject, "cell", "state", dict(before), dict(after)):
        yield replace(change, computation=name if change.kind == "state" else "")


def _aggregates_of(subject: str, before: list[list[str]], after: list[list[str]]) -> Iterator[Change]:
    """Aggregates are in the order of the accumulators in stored windows."""
    was, now = dict(before), dict(after)
    kept = [name for name in was if name in now]
    moved = list(now)[: len(kept)] != kept
    if moved:
        order = _change(_list(list(was)), _list(list(now)))
        yield Change("meaning", subject, f"has its aggregates in another order (new ones come last): {order}")
    for change in _named(subject, "aggregate", "meaning", was, now):
        if not (moved and change.kind == "addition"):
            yield change


def _named(subject: str, word: str, kind: Kind, was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Change]:
    for name in was:
        if name not in now:
            yield Change(kind, subject, f"has no {word} {name!r} any more")
        elif was[name] != now[name]:
            yield Change(kind, subject, f"has another {word} {name!r}: {_change(was[name], now[name])}")
    for name in now:
        if name not in was:
            yield Change("addition", subject, f"has a new {word} {name!r}, {now[name]}")


def _streams(stored: Description, wanted: Description) -> Iterator[Change]:
    before, after = stored["streams"], wanted["streams"]
    for name, stream in before.items():
        if name not in after and stream["producer"] in wanted["computations"]:
            yield Change("meaning", f"stream {name!r}", "is gone")
    for name, stream in after.items():
        subject = f"stream {name!r}"
        if name not in before:
            if stream["producer"] in stored["computations"]:
                yield Change("addition", subject, "is new")
            continue
        if before[name]["producer"] != stream["producer"]:
            was, now = before[name]["producer"], stream["producer"]
            yield Change("meaning", subject, f"comes from another computation: {_change(was, now)}")
        yield from _schema(subject, name, before[name]["schema"], stream["schema"], stored, wanted)


def _schema(
    subject: str, stream: str, before: list[str], after: list[str], stored: Description, wanted: Description
) -> Iterator[Change]:
    was, now = (dict(field.split(": ", 1) for field in fields) for fields in (before, after))
    yield from _lost("field", subject, was, now)
    for name in now:
        if name in was and now[name] == f"{was[name]} | None":
            yield Change("addition", subject, f"may have None in field {name!r}")
        elif name in was and was[name] != now[name]:
            yield Change("meaning", subject, f"has another type of field {name!r}: {_change(was[name], now[name])}")
    added = [name for name in now if name not in was]
    if added == _new_fields(stream, stored, wanted):
        for name in added:
            yield Change("addition", subject, f"has a new field {name!r}, {now[name]}")
    elif not set(added) <= _new_aggregates(stream, stored, wanted):
        fields = _list([f"{name!r}, {now[name]}" for name in added])
        yield Change("meaning", subject, f"has new fields: {fields}; only those with a default go in, after the others")
    elif added and (readers := _readers(stream, stored) | _readers(stream, wanted)):
        yield Change("meaning", subject, f"has new fields {_list(added)}, and is read by {_list(sorted(readers))}")


def _new_fields(stream: str, stored: Description, wanted: Description) -> list[str]:
    """Fields that come after those of the stored stream and have defaults: what is stored are records still."""
    before, after = (d["streams"].get(stream, {"schema": []}) for d in (stored, wanted))
    kept, now = ([field.split(": ", 1)[0] for field in fields] for fields in (before["schema"], after["schema"]))
    added = now[len(kept) :]
    return added if kept == now[: len(kept)] and set(added) <= set(after.get("optional", ())) else []


def _readers(stream: str, description: Description) -> set[str]:
    return {subscription[1] for subscription in description["subscriptions"] if subscription[0] == stream}


def _lost(word: str, subject: str, was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Change]:
    for name in was:
        if name not in now:
            yield Change("meaning", subject, f"has no {word} {name!r} any more")


def _aggregates(stream: str, description: Description) -> set[str]:
    producer = description["streams"].get(stream, {}).get("producer")
    meaning = description["computations"].get(producer, {}).get("meaning", {})
    return {name for name, _ in meaning.get("aggregates", ())}


def _new_aggregates(stream: str, stored: Description, wanted: Description) -> set[str]:
    return _aggregates(stream, wanted) - _aggregates(stream, stored)


def _subscriptions(stored: Description, wanted: Description) -> Iterator[Change]:
    before, after = ({(s[0], s[1], s[2]): s[3:] for s in d["subscriptions"]} for d in (stored, wanted))
    known = stored["computations"].keys() & wanted["computations"].keys()
    for stream, consumer, place in before:
        if consumer in known and (stream, consumer, place) not in after:
            yield Change("meaning", f"computation {consumer!r}", f"does not read {stream!r} any more")
    for (stream, consumer, place), now in after.items():
        if consumer not in known:
            if unknown := _unknown_to_some_windows(stream, stored):
                words = f"would read {stream!r}: windows from before {_list(unknown)} was added have no value for it"
                yield Change("meaning", f"computation {consumer!r}", words)
            continue
        subject = f"computation {consumer!r}"
        was = before.get((stream, consumer, place))
        if was is None:
            yield Change("meaning", subject, f"reads {stream!r}, which it did not read before")
            continue
        if was[0] != now[0]:
            yield Change("meaning", subject, f"has another key on {stream!r}: {_change(_list(was[0]), _list(now[0]))}")
        if was[1:] != now[1:]:
            yield Change("meaning", subject, f"reads {stream!r} through other operators: {_change(was[1:], now[1:])}")


def _unknown_to_some_windows(stream: str, stored: Description) -> list[str]:
    """Aggregates that were added live and are never None in a stream of panes: some windows lack them."""
    found = stored["streams"].get(stream, {"producer": "", "schema": []})
    grown = stored["computations"].get(found["producer"], {}).get("grown", ())
    types = dict(field.split(": ", 1) for field in found["schema"])
    return [name for name in grown if not types.get(name, "None").endswith("None")]


def _tables(stored: Description, wanted: Description) -> Iterator[Change]:
    before, after = stored["tables"], wanted["tables"]
    for name in before:
        if name not in after:
            yield Change("meaning", f"result table {name!r}", "is gone")
    for name, table in after.items():
        subject = f"result table {name!r}"
        if name not in before:
            yield Change("addition", subject, f"is new; {FROM_NOW}")
            continue
        for part in ("kind", "stream"):
            if before[name][part] != table[part]:
                yield Change("meaning", subject, f"has another {part}: {_change(before[name][part], table[part])}")
        yield from _columns(subject, before[name], table, stored, wanted)


def new_columns(before: Description, after: Description) -> list[str]:
    """Names of the columns that a result table does not have yet."""
    known = _types(before)
    return [name for name in _types(after) if name not in known]


def nullable_columns(before: Description, after: Description) -> list[str]:
    """Names of the columns that may be NULL only now."""
    was = _types(before)
    return [name for name, type_ in _types(after).items() if was.get(name) == f"{type_} NOT NULL"]


def _types(table: Description) -> dict[str, str]:
    return dict(column.split(" ", 1) for column in table["columns"])


def _columns(
    subject: str, before: Description, after: Description, stored: Description, wanted: Description
) -> Iterator[Change]:
    was, now = _types(before), _types(after)
    yield from _lost("column", subject, was, now)
    for name in nullable_columns(before, after):
        yield Change("addition", subject, f"may have NULL in column {name!r}")
    for name in now:
        if name in was and now[name] not in (was[name], was[name].removesuffix(" NOT NULL")):
            yield Change("meaning", subject, f"has another type of column {name!r}: {_change(was[name], now[name])}")
    aggregates = _new_aggregates(after["stream"], stored, wanted)
    for name in new_columns(before, after):
        words, type_ = f"has a new column {name!r}", now[name].removesuffix(" NOT NULL")
        if name in aggregates:
            yield Change("addition", subject, f"{words}, {type_}; NULL in windows that are open or over")
        elif after["kind"] == "records" and name in _new_fields(after["stream"], stored, wanted):
            yield Change("addition", subject, f"{words}, {type_}; NULL in rows that are there")
        else:
            yield Change("meaning", subject, f"{words}, {type_}")


# Words.


def _word(part: str) -> str:
    return part.replace("_", " ")


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(str, names))


def _change(before: object, after: object) -> str:
    """What differs, and a little of what stands before it: the whole of a long text would hide it."""
    was, now = (v if isinstance(v, str) else msgspec.json.encode(v).decode() for v in (before, after))
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(was, now, strict=False)))
    start = max(same - 40, 0)
    return f"was {_short(was, start)} and is {_short(now, start)}"


def _short(text: str, start: int) -> str:
    end = start + 160
    return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")

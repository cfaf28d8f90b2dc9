"""What the database tells of silent devices: events that commits store, one a minute, and who is silent now."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.rows import dict_row

from millpy.admin.events import list_events
from millpy.admin.queries import Admin
from millpy.model.checkpoint import Kind, Notice
from tests.conformance.store_builders import Owner, counters, entries

AGE = """
UPDATE mill.events SET detail = detail || jsonb_build_object('from', clock_timestamp() - interval '61 seconds')
 WHERE kind LIKE 'devices%'
"""


def told(database_url: str) -> list[str]:
    """Return the sentences of `millpy events`, oldest first."""
    kinds = ["devices_silent", "devices_back"]
    return [row["happened"] for row in list_events(Admin(database_url), None, start="", kinds=kinds, limit=10)]


async def test_notices_of_a_minute_are_one_event_of_their_commit(owner: Owner, database_url: str) -> None:
    alarms, sums = owner.deployment.intervals_of("alarms")[0], owner.deployment.intervals_of("sums")[0]

    async def commit(interval: Any, *notices: Notice) -> None:
        await owner.commit(owner.checkpoint(interval, notices=notices))

    await commit(alarms, Notice("devices_silent", 2, ["a", "b\x00"]), Notice("devices_back", 1, ["a"]))
    await commit(alarms, Notice("devices_silent", 12, ["a", *map(str, range(9))]))
    await commit(sums, Notice("devices_silent", 1, ["z"]))
    await commit(sums, Notice("devices_silent", 1, ["y"]), Notice("devices_back", 1, ["z"]))  # adds to one event only
    assert sorted(told(database_url)) == [
        "1 device of alarms is back: a",
        "1 device of sums is back: z",
        "14 devices of alarms are silent: a, b\ufffd, 0, 1, 2, 3, 4, 5, 6, 7 and 4 more",
        "2 devices of sums are silent: z, y",
    ]

    with psycopg.connect(database_url, autocommit=True) as connection:  # a minute passes
        connection.execute(AGE)
    await commit(alarms, Notice("devices_silent", 1, ["late"]))

    assert told(database_url)[-1] == "1 device of alarms is silent: late"
    assert len(told(database_url)) == 5


CELLS = """
UPDATE mill.graphs
   SET description = jsonb_set(description, '{computations,alarms,identity,cells}',
                               '[["gaps", {}], ["pending", {}], ["told", {}], ["known", {}], ["roster", {}]]')
"""


async def test_the_silent_devices_of_a_watching_step_are_listed_folded_or_not(owner: Owner, database_url: str) -> None:
    alarms, sums = owner.deployment.intervals_of("alarms")[0], owner.deployment.intervals_of("sums")[0]
    devices = (("k", ['"pump"', 1_000_000], "1"), ("k", ['["a",7]', None], "2"), ("k", ['"back"', 5], "3"))
    state = entries(Kind.STATE, "told", *devices)
    await owner.commit(
        owner.checkpoint(alarms, delta=(state, *counters(silent=("", 3)))),
        owner.checkpoint(sums, delta=(entries(Kind.STATE, "told", ("k", "no device")),)),  # a cell of a user
    )
    await owner.fold(alarms)
    await owner.commit(owner.checkpoint(alarms, delta=(entries(Kind.STATE, "told", ("k", None, "3")),)))

    with psycopg.connect(database_url, row_factory=dict_row) as connection:
        assert connection.execute("SELECT FROM millpy.silent_devices").fetchall() == []
        connection.execute(CELLS)
        connection.commit()
        found = connection.execute(
            "SELECT device, key, extract(epoch FROM last_event_time) AS s FROM millpy.silent_devices"
        )
        assert found.fetchall() == [
            {"device": '["a",7]', "key": '["a",7]', "s": None},
            {"device": "pump", "key": '"pump"', "s": 1},
        ]
    (silences,) = Admin(database_url).silences("factory")
    assert silences["silent_devices"] == 2
    assert silences["longest_silent"] == ['["a",7]', "pump"]

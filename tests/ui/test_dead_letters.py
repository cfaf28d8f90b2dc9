"""The view of dead letters, late records and parked keys in a browser: read, compare, replay, discard, release."""

from __future__ import annotations

import json
import time

from playwright.sync_api import expect

from tests.ui.browser import Visitor
from tests.ui.world import FAULTY, HOSTILE_NOTE, World
from tests.waiting import await_true

LIST = "/graphs/works/set-aside"
STATE = "SELECT state FROM millpy.dead_letters WHERE dead_letter_id = %s"


def made(world: World, payload: bytes) -> int:
    """Make a dead letter, and return its id."""
    world.feed.send_bytes("oslo", "clumsy", payload)
    word = payload.decode()[:20]
    found = await_true(
        lambda: world.rows("SELECT dead_letter_id FROM millpy.dead_letters WHERE strpos(payload_text, %s) > 0", word),
        "the dead letter",
    )
    return int(found[-1]["dead_letter_id"])


def test_a_new_dead_letter_appears_without_a_reload(world: World, viewer: Visitor) -> None:
    page = viewer.open(LIST)
    loads = viewer.loads

    number = made(world, b"not JSON at all")

    expect(page.locator(f"#record-{number}")).to_be_visible(timeout=15_000)
    assert viewer.loads == loads


def test_hostile_payloads_are_text(viewer: Visitor) -> None:
    for kind in ("dead-letters", "late-records", "parked"):
        page = viewer.open(f"{LIST}?kind={kind}")

        expect(page.locator("main")).to_contain_text("<script>alert('note')</script>")
        assert page.locator("main script, main img").count() == 0
        if kind != "parked":
            page.locator("#left-out tbody th a").last.click()
            expect(page.locator("#payload")).to_contain_text("<script>alert('note')</script>")
            assert not {"\x1b", "\u202e"} & set(page.content())


def test_marked_records_are_replayed_and_stay_marked_meanwhile(world: World, operator: Visitor) -> None:
    first, second = made(world, b"broken one"), made(world, b"broken two")
    page = operator.open(LIST)
    loads = operator.loads
    page.locator(f"#mark-{first}").check()
    third = made(world, b"broken three")
    expect(page.locator(f"#record-{third}")).to_be_visible(timeout=15_000)
    expect(page.locator(f"#mark-{first}")).to_be_checked()
    page.get_by_label("Why").fill("the gateway <b>was</b> reset")

    page.get_by_role("button", name="Replay").click()

    expect(page.locator("#note")).to_contain_text("1 of 1 dead letters requested for replay.")
    events = world.rows("SELECT detail FROM millpy.events WHERE kind = 'requested' ORDER BY event_id DESC LIMIT 1")
    assert (events[0]["detail"]["by"], events[0]["detail"]["ids"]) == ("olga", [first])
    assert events[0]["detail"]["why"] == "the gateway <b>was</b> reset"
    assert world.rows(STATE, second)[0]["state"] == "open"
    assert operator.loads == loads


def test_a_record_is_discarded(world: World, operator: Visitor) -> None:
    number = made(world, b"rubbish to discard")
    page = operator.open(LIST)
    page.locator(f"#mark-{number}").check()
    page.get_by_role("button", name="Discard").click()

    expect(page.locator("#note")).to_contain_text("1 of 1 dead letters discarded.")
    assert world.rows(STATE, number)[0]["state"] == "discarded"
    expect(page.locator(f"#record-{number}")).to_contain_text("discarded")


def test_a_corrected_payload_shows_its_difference_and_is_replayed(world: World, operator: Visitor) -> None:
    at = int(time.time() * 1000)
    wrong = json.dumps({"at": at, "id": at, "value": "4o", "note": "zeros\nand ones"})
    number = made(world, wrong.encode())
    page = operator.open(f"{LIST}/dead-letters/{number}")
    field = page.get_by_label("Another payload")
    given = field.input_value()
    assert json.loads(given) | {"value": "4o"} == json.loads(given)
    field.fill(given.replace('"4o"', "40.5"))
    page.get_by_role("button", name="Show the difference").click()
    expect(page.locator("del").first).to_be_visible()

    assert "4o" in "".join(page.locator("del").all_inner_texts())
    assert "40" in "".join(page.locator("ins").all_inner_texts())
    assert operator.violations() == []
    page.get_by_role("button", name="Replay with this payload").click()
    expect(page.locator("main")).to_contain_text("was requested")
    await_true(lambda: world.rows(STATE, number)[0]["state"] == "replayed", "the replay")
    await_true(
        lambda: world.rows("SELECT 1 FROM works.temperature_5s WHERE device = 'clumsy' AND high = 40.5"), "its window"
    )


def test_a_parked_key_is_released_without_its_record(world: World, operator: Visitor) -> None:
    parked = "SELECT 1 FROM millpy.parked WHERE key = %s AND NOT requested"
    page = operator.open(f"{LIST}?kind=parked")
    row = page.locator("#left-out tr", has_text=FAULTY)
    row.get_by_role("button", name="Without the failed record").click()
    expect(page.locator("#note")).to_contain_text("The release was requested.")

    await_true(lambda: not world.rows(parked, json.dumps(FAULTY)), "the release")
    letters = "SELECT detail FROM millpy.dead_letters WHERE computation = 'alarms' AND key = %s"
    await_true(lambda: world.rows(letters, json.dumps(FAULTY)), "its dead letter")
    expect(page.locator("#left-out")).not_to_contain_text(FAULTY)
    world.feed.send("lima", FAULTY, 13_000.0, note=HOSTILE_NOTE)  # as it was
    await_true(lambda: world.rows(parked, json.dumps(FAULTY)), "it is parked again")

"""The view of what did not reach its result: dead letters, late records and parked keys, and what to do with them."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

from fastapi import Request, Response

from millpy.admin import actions
from millpy.admin.actions import Actor
from millpy.admin.dead_letters import DEAD_LETTERS, LATE_RECORDS, RecordFilter
from millpy.admin.pages import decoded
from millpy.admin.queries import Admin, Row
from millpy.api.actions import IDS_MAX, PAYLOAD_CHARACTERS_MAX, WHY_CHARACTERS_MAX, act
from millpy.api.answers import find_page
from millpy.api.authentication import Caller
from millpy.api.dead_letters import GROUPED, VIEWS
from millpy.api.parameters import KEY_CHARACTERS_MAX, NAME_CHARACTERS_MAX, Cursor, GraphName, RecordId, Word
from millpy.api.problems import ProblemError, not_found
from millpy.config.escape import visible
from millpy.ui.payload_diff import difference
from millpy.ui.rendering import page, shared_page
from millpy.ui.routing import Form, OperatorForm, Visitor, done, page_router, read
from millpy.ui.tables import element_id
from millpy.ui.views import link

SHOWN_MAX = 100
GROUPS_MAX = 50
Kind = Literal["dead-letters", "late-records", "parked"]
KINDS: Mapping[str, str] = {"dead-letters": "Dead letters", "late-records": "Late records", "parked": "Parked keys"}
RECORDS = {"dead-letters": DEAD_LETTERS, "late-records": LATE_RECORDS}
IDS = {"dead-letters": "dead_letter_id", "late-records": "late_record_id"}
STATES = ("open", "requested", "replayed", "discarded")
Act = Callable[[Admin, Actor, str], int]
router = page_router()


@router.get("/graphs/{graph}/set-aside")
async def show_left_out(
    request: Request,
    caller: Visitor,
    graph: GraphName,
    kind: Kind = "dead-letters",
    computation: Word = None,
    stream: Word = None,
    reason: Word = None,
    state: Word = None,
    after: Cursor = "",
) -> Response:
    """Show records or keys of one kind, the newest first, and dead letters by their reason."""
    view = VIEWS[kind][0]
    given = {"computation": computation, "stream": stream, "reason": reason, "state": state}
    words = {name: value for name, value in given.items() if value and name in view.equal}
    cursor = decoded(after)

    def find(admin: Admin) -> dict[str, Any]:
        found = find_page(admin, view, graph, cursor, SHOWN_MAX, words=words)
        groups = admin.ask(GROUPED, graph=graph)[:GROUPS_MAX] if kind == "dead-letters" else []
        return {
            "kind": kind, "kinds": KINDS, "rows": found.rows, "next": found.next, "after": after, "groups": groups,
            "id_of": IDS.get(kind, ""), "states": STATES, "filters": [name for name in given if name in view.equal],
            "address": {"kind": kind, **words}, "element_id": element_id,
        }  # fmt: skip

    return await shared_page(request, caller, find, "left_out.html", view="set-aside", graph=graph)


@router.get("/graphs/{graph}/set-aside/{kind}/{number}")
async def show_record(
    request: Request, caller: Visitor, graph: GraphName, kind: Literal["dead-letters", "late-records"], number: RecordId
) -> Response:
    """Show a dead letter or late record whole."""
    row = await _record(request, caller, graph, kind, number)
    return _record_page(request, caller, graph, kind, row)


@router.post("/graphs/{graph}/set-aside/dead-letters/{number}/compare")
async def compare_payload(request: Request, form: OperatorForm, graph: GraphName, number: RecordId) -> Response:
    """Show the difference between a dead letter and another payload, which can then be replayed."""
    row = await _record(request, form.caller, graph, "dead-letters", number)
    before = bytes(row["payload"])
    after = _payload(form)
    pieces = await asyncio.to_thread(difference, _readable(before), _readable(after))
    return _record_page(
        request, form.caller, graph, "dead-letters", row, _text_of(form), form.text("encoding"),
        pieces=pieces, compared=True, equal=before == after,
    )  # fmt: skip


@router.post("/graphs/{graph}/set-aside/dead-letters/{number}/replay")
async def replay_payload(request: Request, form: OperatorForm, graph: GraphName, number: RecordId) -> Response:
    """Request the replay of a dead letter with another payload."""
    call = partial(
        actions.replay_corrected, number=number, payload=_payload(form), into_window=_into_window(form), why=_why(form)
    )
    count = await act(request, form.caller, graph, call)
    text = f"The replay of dead letter {number} with another payload was requested."
    if not count:
        text = f"Nothing was requested: dead letter {number} cannot be replayed, or is not open."
    return done(request, form.caller, text, link(f"set-aside/dead-letters/{number}", graph))


@router.post("/graphs/{graph}/set-aside/{kind}/{action}")
async def act_on_records(
    request: Request, form: OperatorForm, graph: GraphName, kind: Literal["dead-letters", "late-records"],
    action: Literal["replay", "discard"],
) -> Response:  # fmt: skip
    """Request the replay of records, or discard them."""
    ids = form.numbers("ids")
    word = KINDS[kind].lower()
    if not ids or len(ids) > IDS_MAX:
        raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, f"choose 1 to {IDS_MAX:,} {word}", hint="mark them first")
    replay: Callable[..., int] = actions.replay_dead_letters if kind == "dead-letters" else actions.replay_late_records
    call: Act = partial(replay, ids=ids, into_window=_into_window(form), why=_why(form))
    if action == "discard":
        call = partial(actions.discard_records, what=word, ids=ids, why=_why(form))
    count = await act(request, form.caller, graph, call)
    verb = "requested for replay" if action == "replay" else "discarded"
    text = f"{count} of {len(ids)} {word} {verb}." + ("" if count == len(ids) else " The others were not open.")
    return done(request, form.caller, text, link("set-aside", graph, kind=kind))


@router.post("/graphs/{graph}/set-aside/parked")
async def release(request: Request, form: OperatorForm, graph: GraphName) -> Response:
    """Request the release of a parked key, with the record that failed or without it."""
    computation, key = form.text("computation"), form.text("key")
    if not 0 < len(computation) <= NAME_CHARACTERS_MAX or not 0 < len(key) <= KEY_CHARACTERS_MAX:
        raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, "name a computation and a key")
    discard = form.text("discard") == "true"
    call = partial(actions.release_parked, computation=computation, key=key, discard=discard, why=_why(form))
    count = await act(request, form.caller, graph, call)
    text = "The release was requested." if count else "Nothing was requested: the key is not parked any more."
    return done(request, form.caller, text, link("set-aside", graph, kind="parked"))


async def _record(request: Request, caller: Caller, graph: str, kind: str, number: int) -> Row:
    records = RECORDS[kind]
    wanted = RecordFilter(graph=graph, ids=(number,))
    found = await read(request, caller, lambda admin: records.rows(admin, wanted, 1))
    if not found:
        raise not_found(f"graph {graph!r} has no {records.word} {number}")
    return found[0]


def _record_page(
    request: Request, caller: Caller, graph: str, kind: str, row: Row, edited: str | None = None, encoding: str = "",
    **compared: Any,
) -> Response:  # fmt: skip
    payload = bytes(row["payload"])
    plain = _is_plain(payload)
    if edited is None:
        encoding = "text" if plain else "base64"
        edited = payload.decode() if plain else base64.b64encode(payload).decode()
    given = {"pieces": None, "compared": False, "equal": False, **compared}
    return page(
        request, caller, "left_out_record.html", view="set-aside", graph=graph, kind=kind, row=row, id=row[IDS[kind]],
        edited=edited, encoding=encoding, plain=plain, payload=_readable(payload), word=RECORDS[kind].word, **given,
    )  # fmt: skip


def _is_plain(payload: bytes) -> bool:
    """Tell whether a field of a form shows a payload as it is, and sends it back unchanged."""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return False
    return visible(text, keep="\n\t") == text and len(text) <= PAYLOAD_CHARACTERS_MAX


def _readable(payload: bytes) -> str:
    return payload.decode(errors="backslashreplace")


def _text_of(form: Form) -> str:
    """Return the text of the field; a browser sends line ends as CR and LF."""
    return form.text("payload").replace("\r\n", "\n")


def _payload(form: Form) -> bytes:
    """Return the payload that a form gives, as text or as base64.

    Raises:
        ProblemError: it is too long, or not base64.
    """
    text = _text_of(form)
    if len(text) > PAYLOAD_CHARACTERS_MAX:
        raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, "the payload is too long")
    if form.text("encoding") != "base64":
        return text.encode()
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, "the payload is not base64") from None


def _into_window(form: Form) -> bool:
    return form.text("into_window") == "true"


def _why(form: Form) -> str:
    why = form.text("why")
    if len(why) > WHY_CHARACTERS_MAX:
        raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, f"the reason has more than {WHY_CHARACTERS_MAX} characters")
    return why

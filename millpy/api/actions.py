"""Requests of operators. Each happens whole or not, and `millpy.events` says who made it."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from millpy.admin import actions
from millpy.admin.actions import Actor
from millpy.admin.queries import Admin
from millpy.api.answers import OBJECT, as_json, check_graph, databases_of, described
from millpy.api.authentication import Administrator, Caller, Operator
from millpy.api.parameters import ID_MAX, KEY_CHARACTERS_MAX, NAME_CHARACTERS_MAX, TEXT, GraphName, RecordId
from millpy.api.problems import ProblemError
from millpy.api.switching import Switches

IDS_MAX = 10_000
WHY_CHARACTERS_MAX = 1_000
PAYLOAD_CHARACTERS_MAX = 1_400_000
Ids = Annotated[list[Annotated[int, Field(ge=1, le=ID_MAX)]], Field(min_length=1, max_length=IDS_MAX)]
Why = Annotated[str, Field(max_length=WHY_CHARACTERS_MAX, pattern=TEXT)]
Name = Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS_MAX, pattern=TEXT)]
DONE = described(OBJECT, "The number of records, keys, partitions or workers")
router = APIRouter(tags=["actions"])


class _Body(BaseModel):
    """The body of a request: exactly these fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class RecordsToReplay(_Body):
    """Dead letters or late records to replay."""

    ids: Ids
    into_window: bool = Field(default=False, description="Add those that are too late to their finished windows.")
    why: Why = ""


class RecordsToDiscard(_Body):
    """Dead letters or late records to discard."""

    ids: Ids
    why: Why = ""


class CorrectedPayload(_Body):
    """Another payload for a dead letter: as text or as base64."""

    payload_text: Annotated[str, Field(max_length=PAYLOAD_CHARACTERS_MAX)] | None = None
    payload_base64: Annotated[str, Field(max_length=PAYLOAD_CHARACTERS_MAX)] | None = None
    into_window: bool = False
    why: Why = ""

    def payload(self) -> bytes:
        """Return the payload.

        Raises:
            ProblemError: both are given, or none, or the text is no base64.
        """
        if (self.payload_text is None) == (self.payload_base64 is None):
            raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, "give payload_text, or payload_base64")
        try:
            if self.payload_text is not None:
                return self.payload_text.encode()
            return base64.b64decode(self.payload_base64 or "", validate=True)
        except (binascii.Error, ValueError):
            raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, "the payload cannot be read") from None


class KeysToRelease(_Body):
    """Parked keys of a computation: one, or all."""

    computation: Name
    key: Annotated[str, Field(max_length=KEY_CHARACTERS_MAX, pattern=TEXT)] | None = Field(
        default=None, description="The key, as text or as JSON; null for all keys."
    )
    discard: bool = Field(default=False, description="Without the record that failed, which becomes a dead letter.")
    why: Why = ""


class WorkerToDrain(_Body):
    """Why a worker is to drain."""

    why: Why = ""


class GenerationToSwitch(_Body):
    """The generation to make current."""

    generation: Annotated[int, Field(ge=1, le=2**31 - 1)]
    anyway: bool = Field(default=False, description="Even if it has not caught up.")
    rights: Literal["current", "new"] | None = Field(
        default=None, description="Which rights to keep where those on the tables differ."
    )


@router.post("/v1/graphs/{graph}/dead-letters/replay", responses=DONE, response_class=Response)
async def replay_dead_letters(request: Request, caller: Operator, graph: GraphName, body: RecordsToReplay) -> Response:
    """Request the replay of dead letters. Those of other graphs, and those that are not open, do not count."""
    call = partial(actions.replay_dead_letters, ids=body.ids, into_window=body.into_window, why=body.why)
    return await _done(request, caller, graph, call, "requested")


@router.post("/v1/graphs/{graph}/dead-letters/discard", responses=DONE, response_class=Response)
async def discard_dead_letters(
    request: Request, caller: Operator, graph: GraphName, body: RecordsToDiscard
) -> Response:
    """Discard dead letters; they stay counted."""
    call = partial(actions.discard_records, what="dead letters", ids=body.ids, why=body.why)
    return await _done(request, caller, graph, call, "discarded")


@router.post("/v1/graphs/{graph}/dead-letters/{number}/replay", responses=DONE, response_class=Response)
async def replay_corrected(
    request: Request, caller: Operator, graph: GraphName, number: RecordId, body: CorrectedPayload
) -> Response:
    """Request the replay of a dead letter with another payload; the stored one stays as it is."""
    call = partial(
        actions.replay_corrected, number=number, payload=body.payload(), into_window=body.into_window, why=body.why
    )
    return await _done(request, caller, graph, call, "requested")


@router.post("/v1/graphs/{graph}/late-records/replay", responses=DONE, response_class=Response)
async def replay_late_records(request: Request, caller: Operator, graph: GraphName, body: RecordsToReplay) -> Response:
    """Request that late records are judged again, or added to their finished windows."""
    call = partial(actions.replay_late_records, ids=body.ids, into_window=body.into_window, why=body.why)
    return await _done(request, caller, graph, call, "requested")


@router.post("/v1/graphs/{graph}/late-records/discard", responses=DONE, response_class=Response)
async def discard_late_records(
    request: Request, caller: Operator, graph: GraphName, body: RecordsToDiscard
) -> Response:
    """Discard late records; they stay counted."""
    call = partial(actions.discard_records, what="late records", ids=body.ids, why=body.why)
    return await _done(request, caller, graph, call, "discarded")


@router.post("/v1/graphs/{graph}/parked/release", responses=DONE, response_class=Response)
async def release_parked(request: Request, caller: Operator, graph: GraphName, body: KeysToRelease) -> Response:
    """Request the release of parked keys."""
    call = partial(
        actions.release_parked, computation=body.computation, key=body.key, discard=body.discard, why=body.why
    )
    return await _done(request, caller, graph, call, "requested")


@router.post("/v1/graphs/{graph}/sources/{stream}/resume", responses=DONE, response_class=Response)
async def resume_source(request: Request, caller: Operator, graph: GraphName, stream: GraphName) -> Response:
    """Resume a source that was paused because too many of its records became dead letters."""
    return await _done(request, caller, graph, partial(actions.resume_source, stream=stream), "resumed")


@router.post("/v1/graphs/{graph}/workers/{worker}/drain", responses=DONE, response_class=Response)
async def drain_worker(
    request: Request, caller: Operator, graph: GraphName, worker: UUID, body: WorkerToDrain
) -> Response:
    """Request that a worker gives its intervals to other workers and ends with status 0, as on SIGTERM."""
    return await _done(request, caller, graph, partial(drain, worker=worker, why=body.why), "requested")


@router.post(
    "/v1/graphs/{graph}/switch", responses=described(OBJECT, "Whether it was switched"), response_class=Response
)
async def switch(request: Request, caller: Administrator, graph: GraphName, body: GenerationToSwitch) -> Response:
    """Make another generation of a graph the current one."""
    return as_json(await switch_to(request, caller, graph, body))


async def switch_to(request: Request, caller: Caller, graph: str, body: GenerationToSwitch) -> dict[str, Any]:
    """Make a generation the current one; return what was done."""
    switches: Switches = request.app.state.switches
    try:
        return await switches.switch(
            caller.principal.name, graph, body.generation, anyway=body.anyway, rights=body.rights
        )
    finally:
        databases_of(request).reading.forget()


def drain(admin: Admin, actor: Actor, graph: str, worker: UUID, why: str) -> int:
    """Request that a worker drains; return 1, or 0 if it does already.

    Raises:
        ProblemError: the graph has no such worker, or it cannot drain.
    """
    done = actions.drain_worker(admin, actor, graph, worker, why)
    if not done and (refused := actions.refused_drain(admin, graph, worker)):
        status = HTTPStatus.NOT_FOUND if refused.unknown else HTTPStatus.CONFLICT
        raise ProblemError(status, refused.message, hint=refused.hint)
    return done


async def act(request: Request, caller: Caller, graph: str, call: Callable[[Admin, Actor, str], int]) -> int:
    """Do what a user requests of a graph; return the number of records, keys or partitions.

    Raises:
        ProblemError: the graph is not deployed.
    """
    actor = Actor(caller.principal.name, caller.principal.token_id)

    def acted(admin: Admin) -> int:
        check_graph(admin, graph)
        return call(admin, actor, graph)

    databases = databases_of(request)
    try:
        return await databases.acting.run(acted, None)
    finally:
        databases.reading.forget()


async def _done(
    request: Request, caller: Caller, graph: str, call: Callable[[Admin, Actor, str], int], word: str
) -> Response:
    return as_json({word: await act(request, caller, graph, call)})

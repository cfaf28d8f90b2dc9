"""A file of records, whose running sums are posted; a trap kills or freezes the process around a request."""

from __future__ import annotations

import os
from typing import Any

from millpy import EventTime, File, Graph, Webhook, seconds
from millpy.sinks import SendBound, SinkConnection, SinkMessages, SinkSetup
from tests.crash.sinks import BOUND, Reading, Total, Totals, Trap

TRAP = Trap(os.environ.get("HOOK_TRAP", ""))


class TrappedWebhook(Webhook):
    """A webhook with a trap in each connection."""

    __slots__ = ()

    def connect(self, setup: SinkSetup) -> SinkConnection:
        return TrappedConnection(super().connect(setup))


class TrappedConnection:
    def __init__(self, inner: Any) -> None:
        self.inner = inner
        post = inner.post

        async def trapped(request: Any) -> Any:
            TRAP.reach("before")
            answer = await post(request)
            TRAP.reach("answered")
            return answer

        inner.post = trapped

    async def open(self) -> None:
        await self.inner.open()

    async def send(self, messages: SinkMessages) -> None:
        await self.inner.send(messages)
        TRAP.reach("sent")

    async def close(self) -> None:
        await self.inner.close()


graph = Graph("plant")
readings = graph.inject(
    "readings",
    File(os.environ["CRASH_INPUT"]),
    schema=Reading,
    event_time=EventTime("at", unit="s", max_disorder=seconds(5)),
)
totals = readings.key_by("device").process(Totals(), name="totals", output=Total)
webhook = TrappedWebhook(
    os.environ["HOOK_URL"],
    batch=os.environ.get("HOOK_BATCH") or None,
    bound=SendBound(records=BOUND),
    fixed_headers={"X-Pid": str(os.getpid())},
)
totals.to_sink(webhook, key="device", name="to_hook", intervals=2)

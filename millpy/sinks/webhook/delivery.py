"""WebhookDelivery: posts the requests of one `send`, repeats those that fail, and finds out which are refused.

A `send` of which nothing has arrived is given back to the runtime as a whole, and comes again later, with whatever else
waits by then. As soon as something has arrived, what cannot be delivered counts as refused: so the rest is done with,
and a message that an endpoint cannot digest stops only its own key. Every `send` ends.

Of a batch, which may have arrived although it seems to have failed, nothing may come again in another request. So only
its content can be refused; in all other cases the whole `send` is given back.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from millpy.errors import MessagesRefusedError, SinkUnavailableError
from millpy.sinks.messages import SinkMessages
from millpy.sinks.protocol import SinkSetup
from millpy.sinks.webhook.answers import Meaning, WebhookAnswer
from millpy.sinks.webhook.requests import RequestBuilder, WebhookRequest, runs

Post = Callable[[WebhookRequest], Awaitable[WebhookAnswer]]
RETRY_S_MIN, RETRY_S_MAX = 0.1, 30.0
FAILURES_MAX = 3
"""Failures in a row, before anything has arrived, after which the endpoint counts as away."""
ATTEMPTS_MAX, BUSY_ATTEMPTS_MAX = 5, 30
"""Attempts at a request, others of its `send` having arrived; the second while the endpoint says that it is busy."""
BEHIND = "it is behind a refused message of its key"


class WebhookDelivery:
    """Posts the messages of one `send`.

    Args:
        post: makes one attempt at a request.
        setup: the setup of the connection.
        in_flight: the most requests at once.
    """

    def __init__(self, post: Post, setup: SinkSetup, in_flight: int) -> None:
        self._post = post
        self._setup = setup
        self._slots = asyncio.Semaphore(in_flight)
        self._failures_max = ATTEMPTS_MAX * in_flight
        self._random = random.Random()
        self._settled = 0
        self._is_batch = False
        self._failures = 0
        self._gone = ""
        self._resumes_at = float("-inf")
        self._wait_s: float | None = None
        self._reasons: dict[int, str] = {}
        self._final: set[int] = set()
        self._untried: set[int] = set()

    async def send_singly(self, builder: RequestBuilder, messages: SinkMessages) -> None:
        """Post each message, those of different keys at once.

        Raises:
            SinkUnavailableError: nothing has arrived.
            MessagesRefusedError: some are refused.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for requests in builder.by_key(messages):
                    tasks.create_task(self._send_key(requests), name="millpy-webhook-key")
        except ExceptionGroup as group:  # Python before 3.11.4 wraps what `except*` raises in another group
            if group.split(SinkUnavailableError)[1] is not None:
                raise
            raise group.exceptions[0] from None
        self._raise_refused()

    async def _send_key(self, requests: Sequence[WebhookRequest]) -> None:
        for number, request in enumerate(requests):
            if await self._settle(request) is not Meaning.DELIVERED:
                for behind in requests[number + 1 :]:
                    self._reasons |= dict.fromkeys(behind.places, BEHIND)
                return

    async def send_batch(self, builder: RequestBuilder, messages: SinkMessages) -> None:
        """Post the messages in one request, in pieces if there are gaps or the endpoint refuses their content.

        Raises:
            SinkUnavailableError: the endpoint is away, or refuses us.
            MessagesRefusedError: the content of some is refused.
        """
        self._is_batch = True
        waiting = list(runs(messages.positions, range(len(messages))))
        refused_keys: set[bytes] = set()
        while waiting:
            piece = waiting.pop(0)
            taken = [place for place in piece if messages.keys[place] not in refused_keys]
            if len(taken) < len(piece):
                self._reasons |= dict.fromkeys(set(piece) - set(taken), BEHIND)
                waiting[:0] = runs(messages.positions, taken)
                continue
            request = builder.batch(messages, piece)
            meaning = await self._settle(request, divisible=len(piece) > 1)
            if meaning is Meaning.FINAL and len(piece) > 1:
                middle = len(piece) // 2
                waiting[:0] = [piece[:middle], piece[middle:]]
            elif meaning is not Meaning.DELIVERED:
                refused_keys |= {messages.keys[place] for place in piece}
        self._raise_refused()

    def _raise_refused(self) -> None:
        if self._reasons:
            raise MessagesRefusedError(
                self._reasons, final=self._final, untried=self._untried, retry_after_s=self._wait_s
            )

    async def _settle(self, request: WebhookRequest, *, divisible: bool = False) -> Meaning:
        """Post a request until it is delivered or refused, and note the reason of a refusal.

        Raises:
            SinkUnavailableError: the endpoint is away, and nothing of this `send` is known to have arrived, or it comes
                again as it is; or our grant has ended.
        """
        failures, answer = 0, WebhookAnswer(Meaning.FINAL, request.refused)
        while not request.refused:
            async with self._slots:
                await self._await_turn()
                if self._gone:
                    answer = WebhookAnswer(Meaning.REFUSED, self._gone)
                    if not failures:
                        self._untried.update(request.places)
                    break
                if not self._setup.trusted():
                    raise SinkUnavailableError("this worker does not own the interval any more")
                answer = await self._post(request)
            if answer.meaning is not Meaning.AGAIN:
                self._settled, self._failures = self._settled + 1, 0
                break
            failures += 1
            self._note_failure(answer)
            attempts_max = BUSY_ATTEMPTS_MAX if answer.is_busy else ATTEMPTS_MAX
            if self._settled and not self._is_batch and failures >= attempts_max:
                answer = replace(answer, meaning=Meaning.REFUSED, why=f"{answer.why}; {failures} attempts have failed")
                break
            delay_s = min(RETRY_S_MAX, RETRY_S_MIN * 2 ** (failures - 1))
            await self._setup.clock.sleep(delay_s * self._random.uniform(0.5, 1.0))
        if self._is_batch and answer.meaning is Meaning.REFUSED:
            raise SinkUnavailableError(answer.why, retry_after_s=answer.retry_after_s)
        is_final = answer.meaning is Meaning.FINAL
        if answer.meaning is not Meaning.DELIVERED and not (is_final and divisible):
            self._reasons |= dict.fromkeys(request.places, answer.why)
            self._final |= set(request.places) if is_final else set()
            if answer.retry_after_s is not None:
                self._wait_s = max(self._wait_s or 0.0, answer.retry_after_s)
        return answer.meaning

    async def _await_turn(self) -> None:
        """Wait as long as the endpoint has asked for."""
        clock = self._setup.clock
        while (wait_s := self._resumes_at - clock.monotonic()) > 0:
            await clock.sleep(wait_s)

    def _note_failure(self, answer: WebhookAnswer) -> None:
        self._failures += 1
        if answer.retry_after_s is not None:
            resumes_at = self._setup.clock.monotonic() + answer.retry_after_s
            self._resumes_at = max(self._resumes_at, resumes_at)
        if (self._is_batch or not self._settled) and self._failures >= FAILURES_MAX:
            raise SinkUnavailableError(answer.why, retry_after_s=answer.retry_after_s)
        if self._failures >= self._failures_max:
            self._gone = answer.why

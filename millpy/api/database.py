"""The connections of an API: few, whatever the number of users, and none in a transaction between requests.

reading         `connections_max` connections, for all that is shown
authenticating  one, for tokens and sessions
acting          one, for requests of operators, one after another
examining       one, for the doctor, which opens it for each examination
switching       none (`millpy.api.switching`): a switch opens its own
listening       one (`millpy.api.live`)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from millpy.admin.queries import Admin
from millpy.api.configuration import ApiConfiguration
from millpy.api.kept_answers import KeptAnswer, KeptAnswers
from millpy.api.problems import busy
from millpy.clock import SystemClock
from millpy.store.postgres.statements import statement
from millpy.store.revision import check_revision

STATEMENT_S_MAX = 5.0
WAITING_MAX = 500
REST_S_MIN, REST_S_MAX = 0.02, 1.0
"""A shared call that took longer than the first rests as long as it took, but no longer than the second."""
_READ = "SELECT FROM millpy.graphs LIMIT 1"
_FOUND = "SELECT FROM mill.tokens LIMIT 1"
P = ParamSpec("P")
T = TypeVar("T")


def check_databases(configuration: ApiConfiguration) -> None:
    """Ask the database once with each login, so that a wrong one is an error at the start.

    Raises:
        MillError: it cannot be reached, is not migrated to this version, or lacks rights.
    """
    revision = statement("read_revision").decode()
    for row in Admin(configuration.operator_url, statement_s_max=STATEMENT_S_MAX).ask(revision):
        check_revision(row["version_num"], row["build"])
    for url, look in (
        (configuration.operator_url, _FOUND),
        (configuration.reader_url, _READ),
        (configuration.owner_url, _READ),
    ):
        Admin(url, statement_s_max=STATEMENT_S_MAX).ask(look)


class ConnectionLane:
    """Threads with a connection each, and a bounded queue before them.

    Args:
        admin: the database; it has as many connections as the lane has threads.
        threads: the number of threads.
        name: the name of the threads.
        waiting_max: how many calls may wait.

    Attributes:
        is_crowded: whether more than a few look, so that answers are kept for a moment.
    """

    def __init__(self, admin: Admin, threads: int, name: str, waiting_max: int = WAITING_MAX) -> None:
        self.admin = admin
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._calls_max = threads + waiting_max
        self._calls = 0
        self._shared: dict[Hashable, asyncio.Future[Any]] = {}
        self._last: dict[Hashable, asyncio.Future[Any]] = {}
        self._rests_until: dict[Hashable, float] = {}
        self.is_crowded = False
        self._clock = SystemClock()
        self._kept = KeptAnswers(self._clock.monotonic)

    async def run(
        self, call: Callable[Concatenate[Admin, P], T], role: str | None, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a call in a thread, with the database under a role; None for the login's.

        Raises:
            ProblemError: too many calls wait.
        """
        if self._calls >= self._calls_max:
            raise busy()
        self._calls += 1
        loop = asyncio.get_running_loop()

        def ended(_: Future[T]) -> None:
            loop.call_soon_threadsafe(self._count_down)

        # A caller that has gone does not end its call, so the call counts until it has ended.
        submitted = self._pool.submit(call, self.admin.acting_as(role), *args, **kwargs)
        submitted.add_done_callback(ended)
        return await asyncio.wrap_future(submitted)

    async def share(
        self, key: Hashable, call: Callable[[Admin], T], role: str | None, *, size: Callable[[T], int] | None = None
    ) -> T:
        """Run a call like `run`; requests with the same key that come before it begins share its answer.

        Calls with the same key run one after another, and a slow one rests before the next: however many viewers a list
        has, it takes one connection for half of the time. No answer is older than its request, unless the lane is
        crowded and `size` is given: then requests share the answer to what more than ASKED_MAX have asked for in
        KEPT_S, for KEPT_S, or until `forget` is called.

        Args:
            key: what the call depends on.
            call: reads.
            role: the role of the database; None for the login's.
            size: returns the bytes of an answer.

        Raises:
            ProblemError: too many calls wait.
        """
        kept = self._kept.find(key) if size is not None else None
        if kept is not None:
            return cast("T", kept.value)
        found: asyncio.Future[KeptAnswer[T]] | None = self._shared.get(key)
        if found is None:

            def begun(admin: Admin) -> KeptAnswer[T]:
                self._shared.pop(key, None)  # in the thread: who comes from now on asks again
                began_at = self._clock.monotonic()
                try:
                    return KeptAnswer(began_at, call(admin))
                finally:
                    loop.call_soon_threadsafe(self._rest, key, self._clock.monotonic() - began_at)

            loop = asyncio.get_running_loop()
            found = asyncio.ensure_future(self._run_after(self._last.get(key), key, begun, role))
            self._shared[key] = self._last[key] = found
            found.add_done_callback(partial(self._end, key, size))
        return (await asyncio.shield(found)).value

    def forget(self) -> None:
        """Forget all answers that are kept, because something has changed."""
        self._kept.forget()

    async def _run_after(
        self, before: asyncio.Future[Any] | None, key: Hashable, call: Callable[[Admin], T], role: str | None
    ) -> T:
        """Run a call when the one before it with the same key has ended, and has rested."""
        if before is not None:
            await asyncio.wait([before])
        rest_s = self._rests_until.get(key, 0.0) - asyncio.get_running_loop().time()
        if rest_s > 0:
            await self._clock.sleep(rest_s)
        return await self.run(call, role)

    def _rest(self, key: Hashable, took_s: float) -> None:
        if took_s < REST_S_MIN:
            return
        loop, rest_s = asyncio.get_running_loop(), min(took_s, REST_S_MAX)
        self._rests_until[key] = loop.time() + rest_s
        loop.call_later(rest_s, self._end_rest, key)

    def _end_rest(self, key: Hashable) -> None:
        if self._rests_until.get(key, 0.0) <= asyncio.get_running_loop().time():
            self._rests_until.pop(key, None)

    def _end(self, key: Hashable, size: Callable[[T], int] | None, ended: asyncio.Future[KeptAnswer[T]]) -> None:
        for futures in (self._shared, self._last):
            if futures.get(key) is ended:  # of those that are shared, one that never began
                del futures[key]
        if ended.cancelled() or ended.exception() is not None:  # those that wait have it, too, unless all have gone
            return
        if size is not None and self.is_crowded:
            answer = ended.result()
            self._kept.keep(key, answer, size(answer.value))

    def _count_down(self) -> None:
        self._calls -= 1

    def close(self) -> None:
        """Wait for the calls that run, forget those that wait, and close the connections."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.admin.close()


class Databases:
    """The lanes of an API."""

    def __init__(self, configuration: ApiConfiguration) -> None:
        def lane(url: str, threads: int, name: str) -> ConnectionLane:
            return ConnectionLane(Admin(url, statement_s_max=STATEMENT_S_MAX, connections_max=threads), threads, name)

        self.reading = lane(configuration.reader_url, configuration.connections_max, "reading")
        self.authenticating = lane(configuration.operator_url, 1, "authenticating")
        self.acting = lane(configuration.operator_url, 1, "acting")
        self.examining = lane(configuration.operator_url, 1, "examining")

    def close(self) -> None:
        """Close all lanes."""
        for lane in (self.reading, self.authenticating, self.acting, self.examining):
            lane.close()

"""An API that is killed, or hangs, while it is asked without a pause: the engine does not notice."""

from __future__ import annotations

import http.client
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from millpy.hosting.failpoints import Failpoint
from tests.api_server import ApiServer, running_api
from tests.crash.world import Case, World

LISTS = ("accounting", "watermarks", "workers", "sources", "events", "backlog")


def cases() -> Iterator[Case]:
    """One API is killed while the worker commits, and another one hangs until the end."""
    yield Case("the API is killed and hangs", "", _api_ends)


class Viewers:
    """Threads that ask an API for lists until they are stopped."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api
        self._stopped = threading.Event()
        self.answers = 0
        token = api.token(f"viewer-{api.port}")
        self._threads = [threading.Thread(target=self._ask, args=(token, name)) for name in LISTS]
        for one in self._threads:
            one.start()

    def stop(self) -> None:
        self._stopped.set()
        for one in self._threads:
            one.join()

    def _ask(self, token: str, name: str) -> None:
        while not self._stopped.is_set():
            with suppress(OSError, http.client.HTTPException):
                answer = self._api.get(f"/v1/graphs/crash/{name}", token)
                self.answers += answer.status == 200


@contextmanager
def watched_api(world: World) -> Iterator[tuple[ApiServer, Viewers]]:
    """An API that is asked without a pause, and killed at the end."""
    with running_api(world.url) as api:
        viewers = Viewers(api)
        try:
            yield api, viewers
        finally:
            api.process.kill()
            viewers.stop()


def _api_ends(world: World) -> None:
    with watched_api(world) as (first, asked), watched_api(world) as (second, asked_too):
        worker = world.worker(bundle_records_max=30)
        worker.await_reached(Failpoint.AFTER_COMMIT, 10)
        worker.await_while_running(lambda: min(asked.answers, asked_too.answers) > 0, "both APIs answer")
        first.process.kill()
        second.process.send_signal(signal.SIGSTOP)
        committed = worker.reached(Failpoint.AFTER_COMMIT)
        worker.await_reached(Failpoint.AFTER_COMMIT, committed + 20)
        world.await_finished(worker)
        world.notes.append(f"{asked.answers + asked_too.answers} answers, {committed} commits before")

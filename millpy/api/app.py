"""The app: all paths, with what every request shares."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI, Response
from starlette.types import ASGIApp

from millpy.api import actions, dead_letters, events, graphs, live, sessions, sources, windows, workers
from millpy.api.answers import as_json
from millpy.api.authentication import Gate
from millpy.api.configuration import ApiConfiguration
from millpy.api.database import Databases
from millpy.api.events import Doctor
from millpy.api.limits import RequestLimits
from millpy.api.live import Hub
from millpy.api.problems import handle_problems
from millpy.api.switching import Switches
from millpy.clock import SystemClock

DESCRIPTION = """
What millpy knows and what an operator can request, as JSON.

* **Users** have tokens (`millpy token create`), which they send as `Authorization: Bearer …`, or a session.
* **Lists** have `rows` and `next`. Send `next` as `after` for the next page; it is null on the last one.
* **Values**: instants are RFC 3339 in UTC, durations ISO 8601, bytes base64, keys JSON text. The columns are those of
  the views in schema `millpy`, which `docs/views.md` describes.
* **Errors** are problem details (RFC 9457) with a `hint`.
"""


def create_app(configuration: ApiConfiguration, add_site: Callable[[FastAPI], None] | None = None) -> ASGIApp:
    """Return the app of an API. It connects to the database when it is first asked.

    Args:
        configuration: the settings.
        add_site: adds the page (`millpy.ui.site`), which is above this package; None for the API alone.
    """
    clock = SystemClock()
    databases = Databases(configuration)

    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        app.state.hub = Hub(databases, clock)
        app.state.hub.start()
        try:
            yield
        finally:
            await app.state.hub.stop()
            databases.close()

    app = bare_app(running)
    app.state.configuration = configuration
    app.state.databases = databases
    app.state.gate = Gate(configuration, databases, clock)
    app.state.doctor = Doctor()
    app.state.switches = Switches(configuration.owner_url)
    if add_site is not None:
        add_site(app)
    return RequestLimits(app, encrypted=bool(configuration.certificate))


def bare_app(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None) -> FastAPI:
    """Return an app with the paths of the API and no state: its OpenAPI document is whole, but no path answers."""
    app = FastAPI(
        title="millpy", version=version("millpy"), description=DESCRIPTION, openapi_url="/v1/openapi.json",
        docs_url=None, redoc_url=None, lifespan=lifespan,
        redirect_slashes=False,  # it would lead from a reverse proxy with TLS to an address without
    )  # fmt: skip
    handle_problems(app)
    for module in (graphs, workers, sources, windows, dead_letters, events, actions, sessions, live):
        app.include_router(module.router)
    app.add_api_route("/live", is_alive, methods=["GET"], include_in_schema=False)
    return app


async def is_alive() -> Response:
    """Answer a probe, without the database."""
    return as_json({"live": True})

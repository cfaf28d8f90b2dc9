"""What the suites of promises share: a bounded run of a check, and what it says when a promise is broken."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from millpy.model.identity_text import GraphPart

CHECK_S_MAX = 240.0
CLOSE_S_MAX = 20.0


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a check in an event loop of its own. Raises TimeoutError after CHECK_S_MAX seconds."""

    async def bounded() -> None:
        async with asyncio.timeout(CHECK_S_MAX):
            await coroutine

    asyncio.run(bounded())


async def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the user's, which may be a coroutine."""
    found = function(*arguments)
    return await found if inspect.isawaitable(found) else found


def check(holds: bool, otherwise: str) -> None:
    """Raise AssertionError unless something holds."""
    if not holds:
        raise AssertionError(otherwise)


def check_identity(part: GraphPart) -> None:
    """Raise AssertionError unless an identity fits into JSON, is the same from call to call, and names its kind."""
    identity = json.loads(json.dumps(part.identity()))
    check(part.identity() == identity, f"the identity {identity!r} differs from call to call, or in JSON")
    check("kind" in identity, f"the identity {identity!r} has no `kind`")


async def close_in_time(closing: Coroutine[Any, Any, None]) -> None:
    """Raise AssertionError if a `close` takes more than CLOSE_S_MAX seconds."""
    try:
        await asyncio.wait_for(closing, CLOSE_S_MAX)
    except TimeoutError:
        raise AssertionError(f"close takes more than {CLOSE_S_MAX} s") from None


def check_equal(found: Sequence[int], wanted: Sequence[int], what: str) -> None:
    """Raise AssertionError, with the differences, unless two lists of numbers are equal."""
    missing, doubled = sorted(set(wanted) - set(found)), sorted({n for n in found if found.count(n) > 1})
    unwanted = sorted(set(found) - set(wanted))
    order = "" if missing or doubled or unwanted else ": they come in another order"
    text = f"{what} are not as promised: missing {missing}, doubled {doubled}, others {unwanted}{order}"
    check(list(found) == list(wanted), text)

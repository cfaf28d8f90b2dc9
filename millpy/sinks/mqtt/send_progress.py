"""SendProgress: the messages of one `send`, which of them may leave now, and what the broker has said of each. No I/O.

Those of a key leave one after the other: the next one when the broker has taken the one before. So a message that is
refused is never overtaken by a later one of its key, and those of other keys do not wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from millpy.errors import MessagesRefusedError

BEHIND_REFUSED = "an earlier message of its key was refused"


class SendProgress:
    """The state of each message of a `send`.

    Args:
        keys: the key of each message.

    Attributes:
        left: how many the broker has neither taken nor refused.
        on_way: the places of those whose answer is awaited, in the order in which they have left.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = keys
        self._waiting: dict[bytes, deque[int]] = {}
        self._ready: deque[int] = deque()
        self._reasons: dict[int, str] = {}
        self._final: set[int] = set()
        self.on_way: dict[int, None] = {}
        self.left = len(keys)
        for place, key in enumerate(keys):
            if key in self._waiting:
                self._waiting[key].append(place)
            else:
                self._waiting[key] = deque()
                self._ready.append(place)

    def next(self) -> int | None:
        """Return the place of a message that may leave now, and is then on its way; None if there is none."""
        if not self._ready:
            return None
        place = self._ready.popleft()
        self.on_way[place] = None
        return place

    def delivered(self, place: int) -> None:
        """Note that the broker has a message, and let the next one of its key leave."""
        del self.on_way[place]
        self.left -= 1
        behind = self._waiting[self._keys[place]]
        if behind:
            self._ready.append(behind.popleft())

    def refused(self, place: int, why: str, *, final: bool) -> None:
        """Note that the broker does not take a message, so that those of its key behind it do not leave."""
        del self.on_way[place]
        self._reasons[place] = why
        if final:
            self._final.add(place)
        behind = self._waiting[self._keys[place]]
        self._reasons |= dict.fromkeys(behind, BEHIND_REFUSED)
        self.left -= 1 + len(behind)
        behind.clear()

    def restart(self) -> None:
        """Let those on their way leave again, on another connection, before all others."""
        self._ready.extendleft(reversed(self.on_way))
        self.on_way.clear()

    def raise_refused(self) -> None:
        """Raise MessagesRefusedError if any was refused."""
        if self._reasons:
            raise MessagesRefusedError(self._reasons, final=self._final)

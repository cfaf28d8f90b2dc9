"""Files of TLS that are replaced while a worker runs: certificates are renewed every few weeks or months."""

from __future__ import annotations

import os
from collections.abc import Iterable

from millpy.clock import Clock

LOOK_EVERY_S = 10.0


class TlsFiles:
    """Tells when files were replaced.

    Args:
        paths: the files; None for one that is not set.
        clock: tells when to look at them again.
    """

    def __init__(self, paths: Iterable[str | None], clock: Clock) -> None:
        self._paths = [path for path in paths if path]
        self._clock = clock
        self._looked_at = clock.monotonic()
        self._seen = [_version(path) for path in self._paths]

    def replaced(self) -> bool:
        """Tell whether a file is another one than at the last look, which is ten seconds ago or more."""
        now = self._clock.monotonic()
        if now - self._looked_at < LOOK_EVERY_S:
            return False
        self._looked_at, before = now, self._seen
        self._seen = [_version(path) for path in self._paths]
        return self._seen != before


def _version(path: str) -> tuple[int, int] | None:
    """Return what differs after a file was written, replaced or made readable; None without the file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ctime_ns, found.st_ino

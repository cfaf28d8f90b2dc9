"""A status line at the bottom of a terminal; without a terminal on standard error, nothing is shown.

Code that may take seconds logs what it does to the channel `millpy.observability.status_line`, at level debug. The line
shows the last message, below the log, and disappears afterwards.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Self, TextIO, cast

from millpy.config.escape import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

CHANNEL = "millpy.observability.status_line"
SHOWN_AFTER_S = 0.5
FRAMES = "-\\|/"
FRAMES_PER_S = 4.0
Say = Callable[[str], None]
log = logging.getLogger(CHANNEL)


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show a text while the block runs, if it takes longer than half a second."""
    if log.handlers or not is_watched():  # a line that is already shown shows this as well
        log.debug("%s", text)
        yield
        return
    with _StatusLine(text, moves=True):
        yield


@contextmanager
def line() -> Iterator[Say | None]:
    """Show a status line while the block runs. Yield the function that changes its text; None without a terminal."""
    if not is_watched():
        yield None
        return
    with _StatusLine("", moves=False) as shown:
        yield shown.say


def is_watched() -> bool:
    """Tell whether standard error is a terminal that can erase a line."""
    if not sys.stderr.isatty():
        return False
    from rich.console import Console  # imported here: pipes do not need it

    return Console(stderr=True).is_interactive


class _StatusLine:
    """The status line. Log lines, and the output of a graph to the same terminal, go above it.

    Args:
        text: the first text.
        moves: whether a separate thread animates the line, to show that the process lives.
    """

    def __init__(self, text: str, *, moves: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        self._real = sys.stderr
        self._console = Console(file=self._real)
        self._text = visible(text)
        self._moves = moves
        self._began = self._console.get_time()
        self._live = Live(
            console=self._console,
            get_renderable=self._picture,
            auto_refresh=moves,
            refresh_per_second=FRAMES_PER_S,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=False,
        )
        self._heard = _LogHandler(self.say)
        self._above = _OutputAbove(self._console, self._real)
        self._before = log.level, log.propagate

    def __enter__(self) -> Self:
        self._live.start()
        self._console.show_cursor(True)  # a killed process could not restore it
        sys.stderr = cast(TextIO, self._above)
        _redirect_log(self._real, self._above)
        log.addHandler(self._heard)
        log.propagate = log.isEnabledFor(logging.DEBUG)  # above debug, only the line shows them
        log.setLevel(logging.DEBUG)
        return self

    def __exit__(self, *_: object) -> None:
        level, log.propagate = self._before
        log.setLevel(level)
        log.removeHandler(self._heard)
        _redirect_log(self._above, self._real)
        sys.stderr = self._real
        with suppress(OSError):  # the terminal is gone
            self._above.end()
            self._live.stop()

    def say(self, text: str) -> None:
        """Show this text from now on."""
        self._text = visible(text)
        if not self._moves:
            with suppress(OSError):  # the terminal is gone
                self._live.refresh()

    def _picture(self) -> Text:
        from rich.text import Text

        elapsed_s = self._console.get_time() - self._began
        if self._moves and elapsed_s < SHOWN_AFTER_S:
            return Text("")
        text = self._text
        if self._moves:
            frame = FRAMES[int(elapsed_s * FRAMES_PER_S) % len(FRAMES)]
            text = f"{frame} {text} ({elapsed_s:.0f} s)"
        return Text(text, style="dim", no_wrap=True, overflow="ellipsis")


class _LogHandler(logging.Handler):
    """A log handler that shows the messages of the channel."""

    def __init__(self, say: Say) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Show a message."""
        self._say(record.getMessage())


class _OutputAbove(io.TextIOBase):
    """Standard error above the status line. Long lines are not broken, so that they can be copied."""

    def __init__(self, console: Console, real: TextIO) -> None:
        self._console = console
        self._real = real
        self._rest = ""

    def write(self, text: str) -> int:
        """Write the complete lines; keep the rest until its line ends."""
        from rich.text import Text

        lines, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._console.print(Text.from_ansi(lines), soft_wrap=True)
        return len(text)

    def end(self) -> None:
        """Write the rest."""
        if self._rest:
            self.write("\n")

    def fileno(self) -> int:
        """Return the descriptor of the terminal."""
        return self._real.fileno()

    def isatty(self) -> bool:
        """Return True."""
        return True


def _redirect_log(before: TextIO | _OutputAbove, now: TextIO | _OutputAbove) -> None:
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is before:
            handler.setStream(now)

"""What goes on, in one line at the bottom of a terminal; nothing at all where standard error is none.

Whoever does something that may take seconds says so on the log channel `millpy.progress`, at level debug; who calls
it needs to pass nothing on. The line shows what was said last, below the log, and is gone afterwards.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Self, TextIO, cast

from millpy.visible import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

CHANNEL = "millpy.progress"
SHOWN_AFTER_S = 0.5
FRAMES = "-\\|/"
FRAMES_PER_S = 4.0
Say = Callable[[str], None]
log = logging.getLogger(CHANNEL)


@contextmanager
def working(text: str) -> Iterator[None]:
    """Say what is being done, while inside; for work that leaves no time to say so itself.

    Shows nothing for work that is done in no time.
    """
    if log.handlers or not is_watched():  # whoever shows a line already shows this too
        log.debug("%s", text)
        yield
        return
    with _Line(text, moves=True):
        yield


@contextmanager
def line() -> Iterator[Say | None]:
    """A line that changes when it is told to, by the thread that tells it; None where nobody would see it."""
    if not is_watched():
        yield None
        return
    with _Line("", moves=False) as shown:
        yield shown.say


def is_watched() -> bool:
    """Whether standard error is a terminal that can take a line back."""
    if not sys.stderr.isatty():
        return False
    from rich.console import Console  # programs and pipes need none of it

    return Console(stderr=True).is_interactive


class _Line:
    """The line. Log lines, and what a graph prints to the same terminal, go above it.

    Args:
        text: what it says at first.
        moves: it turns, by a thread of its own, so that a person sees that the process lives.
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
        self._heard = _Heard(self.say)
        self._above = _Above(self._console, self._real)
        self._before = log.level, log.propagate

    def __enter__(self) -> Self:
        self._live.start()
        self._console.show_cursor(True)  # a process that is killed could not bring it back
        sys.stderr = cast(TextIO, self._above)
        _redirect_log(self._real, self._above)
        log.addHandler(self._heard)
        log.propagate = log.isEnabledFor(logging.DEBUG)  # else what is said there is for the line alone
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
        """Show this from now on."""
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


class _Heard(logging.Handler):
    """Takes what is said on the channel."""

    def __init__(self, say: Say) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Show it."""
        self._say(record.getMessage())


class _Above(io.TextIOBase):
    """Standard error meanwhile: whole lines go above the line. A long one is not broken, so that it can be copied."""

    def __init__(self, console: Console, real: TextIO) -> None:
        self._console = console
        self._real = real
        self._rest = ""

    def write(self, text: str) -> int:
        """Write lines; what is not ended waits for its end."""
        from rich.text import Text

        lines, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._console.print(Text.from_ansi(lines), soft_wrap=True)
        return len(text)

    def end(self) -> None:
        """Write what waits."""
        if self._rest:
            self.write("\n")

    def fileno(self) -> int:
        """The terminal's."""
        return self._real.fileno()

    def isatty(self) -> bool:
        """It is one."""
        return True


def _redirect_log(before: TextIO | _Above, now: TextIO | _Above) -> None:
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is before:
            handler.setStream(now)

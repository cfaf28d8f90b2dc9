"""Ask the database at an interval, and redraw the answers in place: `--watch` of `millpy status` and `sources list`.

A thread asks, so that the picture also tells of a database that does not answer. There is one look at a time, over one
connection, which has no transaction between looks. Standard output decides how a look is shown: a terminal is redrawn,
a pipe or a file gets a block of lines for each look, and with --json one line.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Annotated, Any, Protocol

import typer

from millpy.admin.json_output import json_text
from millpy.admin.queries import Admin, Row
from millpy.cli import text_table as tables
from millpy.cli.options import READING_S_MAX, connected_to, duration_option, graph_in, settings_of
from millpy.cli.sections import Section, lay_out
from millpy.clock import Clock, SystemClock
from millpy.config.durations import format_duration
from millpy.config.escape import visible_lines
from millpy.errors import MillError, UsageError
from millpy.model.time import Instant, describe, to_datetime

Answers = Mapping[str, Sequence[Row]]
Ask = Callable[[Admin, str | None], Answers]
Picture = Callable[["Look", "Look | None"], Sequence[Section]]
"""Makes the sections of a look; the look before it is for rates."""
Events = SimpleQueue["Look | Exception | None"]
"""Outcomes of looks, and None for the request to end."""
EVERY_S = 2.0
EVERY_S_MIN, EVERY_S_MAX = 0.5, 86_400.0
RETRY_S = 1.0
"""Seconds between looks at a database that is away."""
LOOK_SHARE_MAX = 0.25
"""Share of the time for looks: where they take long, they are made less often."""
PATIENCE_S = 5.0
"""Seconds after which a look without an answer is shown as a database that does not answer."""
TICK_S = 1.0
WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="Look again and again until Ctrl-C or SIGTERM.")]
EveryOption = Annotated[
    float | None, duration_option("--every", None, f"With --watch: time between looks; default {EVERY_S:g}s.")
]


@dataclass(frozen=True, slots=True)
class Look:
    """What the database answered to one look.

    Attributes:
        at_us: when it answered.
        at_s: the same on the clock that never runs backwards.
        answers: rows by title.
    """

    at_us: Instant
    at_s: float
    answers: Answers


@dataclass(frozen=True, slots=True)
class DatabaseOutage:
    """A time in which the database did not answer; `until_us` is None while it lasts."""

    since_us: Instant
    why: str
    until_us: Instant | None = None


def interval_of(watch: bool, every_s: float | None) -> float | None:
    """Return the seconds between looks; None without --watch.

    Raises:
        UsageError: the interval is out of bounds, or does not belong here.
    """
    if every_s is not None and not watch:
        raise UsageError("--every is the interval of --watch", hint="add --watch")
    if every_s is not None and not EVERY_S_MIN <= every_s <= EVERY_S_MAX:
        raise UsageError(f"--every must be between 500ms and 1d, not {every_s:g}s", hint="for example --every 5s")
    return (EVERY_S if every_s is None else every_s) if watch else None


def watch_answers(
    graph: str | None,
    database: str | None,
    every_s: float,
    ask: Ask,
    picture: Picture,
    *,
    as_json: bool,
) -> None:
    """Look until SIGINT or SIGTERM, and show each look.

    Args:
        graph: the graph's file or name; None for all.
        database: the URL of the database, if it was given.
        every_s: seconds between looks.
        ask: makes a look.
        picture: makes the sections of a look.
        as_json: whether each look is a line of JSON.

    Raises:
        MillError: the first look failed.
    """
    clock = SystemClock()
    connection = connected_to(settings_of(database), graph, READING_S_MAX, "", connections_max=1)
    with connection as admin, _requests() as events:
        name = graph_in(admin, graph)
        looker = _Looker(lambda: ask(admin, name), events, clock)
        state = WatchState(name, every_s, picture, clock)
        display: WatchDisplay = JsonLines() if as_json else Screen() if is_screen() else Blocks()
        try:
            _follow(looker, events, state, display)
        finally:
            display.end()


def _follow(looker: _Looker, events: Events, state: WatchState, display: WatchDisplay) -> None:
    due_s = looker.clock.monotonic()
    while True:
        now_s = looker.clock.monotonic()
        if not looker.is_looking and now_s >= due_s:
            looker.look()
        wait_s = TICK_S if looker.is_looking else min(TICK_S, max(0.0, due_s - now_s))
        try:
            event = events.get(timeout=wait_s)
        except Empty:
            if looker.is_looking:
                state.notice_silence(looker.began_us)
            display.tick(state)
            continue
        if event is None:
            return
        took_s = looker.end()
        if isinstance(event, Exception) and not isinstance(event, MillError):
            raise event
        if isinstance(event, MillError):
            state.fail(event, looker.began_us)
            due_s = looker.clock.monotonic() + min(RETRY_S, state.every_s)
        else:
            state.answer(event)
            due_s = looker.clock.monotonic() + max(state.every_s, took_s / LOOK_SHARE_MAX)
        display.show(state)


class _Looker:
    """Makes one look at a time, each in a thread that an end of the process need not wait for."""

    def __init__(self, ask: Callable[[], Answers], events: Events, clock: Clock) -> None:
        self.clock = clock
        self.is_looking = False
        self.began_us = clock.now_us()
        self._began_s = clock.monotonic()
        self._ask = ask
        self._events = events

    def look(self) -> None:
        """Begin a look, whose outcome becomes an event."""
        self.is_looking, self.began_us, self._began_s = True, self.clock.now_us(), self.clock.monotonic()
        Thread(target=self._run, name="look", daemon=True).start()

    def end(self) -> float:
        """Note that the look has ended, and return the seconds that it took."""
        self.is_looking = False
        return self.clock.monotonic() - self._began_s

    def _run(self) -> None:
        try:
            answers = self._ask()
        except MillError as error:
            self._events.put(error)
        except Exception as error:  # a defect: it ends the watch
            self._events.put(error)
            raise
        else:
            self._events.put(Look(self.clock.now_us(), self.clock.monotonic(), answers))


class WatchState:
    """What is known: the last two looks, and when the database did not answer."""

    def __init__(
        self,
        name: str | None,
        every_s: float,
        picture: Picture,
        clock: Clock,
    ) -> None:
        self.every_s = every_s
        self.now: Look | None = None
        self.outage: DatabaseOutage | None = None
        self._before: Look | None = None
        self._of = "all graphs" if name is None else f"graph {name}"
        self._picture = picture
        self._clock = clock

    def answer(self, look: Look) -> None:
        """Take a look."""
        self._before, self.now = self.now, look
        if self.outage is not None and self.outage.until_us is None:
            self.outage = replace(self.outage, until_us=look.at_us)

    def fail(self, error: MillError, began_us: Instant) -> None:
        """Take a failure: raise it if nothing is shown yet, else note since when the database is away."""
        if self.now is None:
            raise error
        if self.outage is None or self.outage.until_us is not None:
            self.outage = DatabaseOutage(began_us, error.message)
        self.outage = replace(self.outage, why=error.message)

    def notice_silence(self, began_us: Instant) -> None:
        """Note that the database does not answer, if a look has waited for long."""
        is_long = self._clock.now_us() - began_us > PATIENCE_S * 1e6
        if is_long and self.now is not None and not self.is_away:
            self.outage = DatabaseOutage(began_us, "it does not answer")

    @property
    def is_away(self) -> bool:
        """Whether the database is away."""
        return self.outage is not None and self.outage.until_us is None

    def head(self) -> list[str]:
        """Return the lines above the sections."""
        assert self.now is not None, "nothing is shown before the first answer"
        every = format_duration(self.every_s)
        lines = [f"{self._of}, {_time(self.now.at_us)}, every {every}"]
        if self.outage is not None:
            lines.append(self.outage_text())
        return lines

    def outage_text(self) -> str:
        """Say since when the database is away, or from when until when it was."""
        assert self.outage is not None, "there was none"
        since_us, until_us = self.outage.since_us, self.outage.until_us
        lasted = format_duration(((until_us or self._clock.now_us()) - since_us) / 1e6)
        if until_us is not None:
            return f"The database was away from {_time(since_us)} to {_time(until_us)} ({lasted})."
        return f"DATABASE AWAY since {_time(since_us)} ({lasted}): {self.outage.why}. Below is what was before."

    def sections(self) -> Sequence[Section]:
        """Return what the last look showed."""
        assert self.now is not None, "nothing is shown before the first answer"
        return self._picture(self.now, self._before)


def _time(at_us: Instant) -> str:
    return describe(Instant(at_us - at_us % 1_000_000)).replace("T", " ").replace("+00:00", "Z")


class WatchDisplay(Protocol):
    """Where looks are shown."""

    def show(self, state: WatchState) -> None:
        """Show what a look has changed."""
        ...

    def tick(self, state: WatchState) -> None:
        """Show that time has passed."""
        ...

    def end(self) -> None:
        """Leave what is shown."""
        ...


class Screen:
    """A terminal, redrawn from its first line. The last picture stays when the watch ends, or is killed.

    It keeps to the terminal's ordinary screen and leaves the cursor visible, because a killed process could restore
    neither. Each line is erased before it is written: erasing after a full line would take its last character.
    """

    def __init__(self) -> None:
        self._lines = 0

    def show(self, state: WatchState) -> None:
        """Redraw."""
        self.tick(state)

    def tick(self, state: WatchState) -> None:
        """Redraw, unless there was no answer yet."""
        if state.now is None:
            return
        size = shutil.get_terminal_size()
        lines = [_cut(line, size.columns) for line in lay_out(state.head(), state.sections(), size.columns, size.lines)]
        first = "" if self._lines else "\n" * size.lines  # what was there stays above
        self._lines = len(lines)
        blank = [""] * (size.lines - len(lines))
        self._write(first + "\x1b[H" + "\n".join(f"\x1b[2K{visible_lines(line)}" for line in [*lines, *blank]))

    def end(self) -> None:
        """Move the cursor below the picture."""
        if self._lines:
            with suppress(OSError):  # the terminal is gone
                self._write(f"\x1b[{self._lines};1H\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _cut(line: str, columns: int) -> str:
    """Return a line of at most `columns` columns; a character may take two of them."""
    from rich.cells import cell_len, set_cell_size  # imported here: pipes do not need it

    return line if cell_len(line) <= columns else set_cell_size(line, columns)


class Blocks:
    """A pipe or a file: a block of lines for each look, one line when the database goes, and one when it is back."""

    def __init__(self) -> None:
        self._told: DatabaseOutage | None = None

    def show(self, state: WatchState) -> None:
        """Write a block, or what has changed."""
        if state.is_away:
            self.tick(state)
            return
        if state.outage != self._told:
            tables.say(state.outage_text())
            self._told = state.outage
        tables.say("\n".join([*lay_out(state.head()[:1], state.sections(), None, None), ""]))
        sys.stdout.flush()

    def tick(self, state: WatchState) -> None:
        """Write that the database is away, once."""
        if state.outage is None or state.outage.until_us is not None:
            return
        if self._told is None or self._told.since_us != state.outage.since_us:
            tables.say(state.outage_text().replace(" Below is what was before.", ""))
            sys.stdout.flush()
            self._told = state.outage

    def end(self) -> None:
        """Do nothing: what was written is complete."""


class JsonLines:
    """One line of JSON for each look; while the database is away, one for each attempt."""

    def show(self, state: WatchState) -> None:
        """Write the line."""
        assert state.now is not None, "nothing is shown before the first answer"
        found: dict[str, Any] = {"at": to_datetime(state.now.at_us), **state.now.answers}
        if state.outage is not None and state.is_away:
            found = {"away_since": to_datetime(state.outage.since_us), "why": state.outage.why}
        typer.echo(json_text(found, indent=0))
        sys.stdout.flush()

    def tick(self, state: WatchState) -> None:
        """Do nothing: lines tell of looks."""

    def end(self) -> None:
        """Do nothing: what was written is complete."""


def is_screen() -> bool:
    """Tell whether standard output is a terminal that can be redrawn."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


@contextmanager
def _requests() -> Iterator[Events]:
    """Yield the queue of events, into which the first SIGINT or SIGTERM puts None; the second one ends the process."""
    events: Events = SimpleQueue()

    def stop(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        events.put(None)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield events
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

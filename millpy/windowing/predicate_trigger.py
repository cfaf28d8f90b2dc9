"""`When`: a trigger that asks a user's function about the pane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millpy.model.arguments import check_function
from millpy.model.identity import Identity, identity_of_function
from millpy.model.step_progress import is_user_error
from millpy.model.time import INSTANT_MAX, Instant
from millpy.windowing.triggers import FiringMoment, Predicate, State, Trigger

_UNKNOWN = -1


@dataclass(frozen=True, slots=True, repr=False)
class When(Trigger):
    """Once, when a function of the window's results is true: `When(lambda pane: pane.total >= 100)`.

    The function gets the record that consumers of the stream would get now, in every mode with all of the window's
    records: keys and aggregates by name, `window_start` and `window_end`, `pane_index`, `pane_timing` and
    `late_count`. It is asked once for each bundle that changes the window, and must depend on nothing else. If it
    raises, it is not true, and the pane becomes a dead letter: the first time, and again after it has answered.

    State: [0, its answer; -1 if it has not been asked since records came].

    Raises:
        GraphError: the predicate is no function, or has to be awaited.
    """

    predicate: Predicate

    def __post_init__(self) -> None:
        check_function("When", self.predicate, "for example When(lambda pane: pane.n >= 100)")

    def identity(self) -> Identity:
        """Describe the trigger by the name of its function."""
        return {"kind": "when", "predicate": identity_of_function(self.predicate)}

    @property
    def calls_user(self) -> bool:
        """Whether it calls a user's function: it does."""
        return True

    @property
    def may_finish(self) -> bool:
        """Whether the trigger can be finished: it fires once."""
        return True

    def fresh(self) -> State:
        """Return [0, false]."""
        return [0, 0]

    def add(self, state: State, count: int, moment: FiringMoment) -> None:
        """Forget the answer."""
        state[1] = _UNKNOWN

    def merged(self, states: Sequence[State], moment: FiringMoment) -> State:
        """Forget the answers; it is finished if it was in any session."""
        return [1, 0] if any(state[0] for state in states) else [0, _UNKNOWN]

    def ready(self, state: State, moment: FiringMoment) -> bool:
        """Return the answer; ask if records have come since."""
        if state[1] == _UNKNOWN:
            if moment.judge is None:
                return False
            state[1] = int(moment.judge(self.predicate))
        return bool(state[1])

    def fire(self, state: State, moment: FiringMoment) -> None:
        """Finish."""
        self._restart(state, finished=True)

    def alarm(self, state: State, moment: FiringMoment) -> Instant:
        """Return INSTANT_MAX: only records can make it ready."""
        return INSTANT_MAX


def answer_of(ask: Callable[[], object]) -> bool | BaseException:
    """Return what a predicate says, or what it raises."""
    try:
        return bool(ask())
    except BaseException as error:  # user code: the pane is dead-lettered
        if not is_user_error(error):
            raise
        return error

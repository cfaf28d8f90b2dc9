"""Takes: what each step of a stage has consumed, as records of a stream that an archive keeps.

The archives of the sources have the records. A take says what a stage made of them in one bundle: in which order it
consumed its producers, how far, at which watermarks and at what time. With both, every bundle can be computed again as
it was, however many producers there are (MillWheel, section 5: only input and order make a computation's output).

The number of the bundle and its time are those of the archived record: `_seq`, and the event time, which is the
processing time of the step.
"""

from __future__ import annotations

import msgspec

from millpy.model.record import RecordType


class TakeRun(msgspec.Struct, frozen=True, array_like=True):
    """The bundles that a step consumed from one producer, one after the other.

    Attributes:
        producer: the interval that made them, "COMPUTATION/PARTITION", or the place of a key interval.
        through: number of the last bundle; the cursor is there afterwards.
        watermark: the producer's low watermark at that position, µs.
        records: number of records for the interval.
        newest: number of the last bundle with such records; 0 if there are none.
    """

    producer: str
    through: int
    watermark: int
    records: int = 0
    newest: int = 0


class StepInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a step consumed, and where it ended.

    Attributes:
        runs: what was consumed, in order.
        joined: source partitions that were added to the running graph, as long as nothing of them is consumed: where
            the interval begins to read them. Bundles before the first that names them did not have them. In the first
            bundle of a computation that was added, all producers that had committed before.
        moved: how far cursors had moved since the bundle before, without records; before any of `runs`.
        panes_max: the number of panes that were permitted, if more were due.
        timers: (key as JSON text, number of its timers that fired at the end), if more timers were due.
    """

    runs: list[TakeRun] = []
    moved: list[TakeRun] = []
    joined: list[TakeRun] = []
    panes_max: int | None = None
    timers: list[tuple[str, int]] | None = None


class Take(msgspec.Struct, frozen=True):
    """What one step of one interval consumed. Flat, because a nested column costs five times as much for one record.

    Attributes:
        interval: the place of the interval among those of its stage.
        version: the version of the deployed graph.
        watermark: the input watermark behind the step, µs.
        input: a `StepInput` as JSON.
        unarchived: what else made the bundle that no archive has: "replay" of dead letters or late records, "release"
            of a parked key, "refused" records, which the database did not accept, "lookup" in a table; empty if there
            was nothing.
    """

    interval: int
    version: int
    watermark: int
    input: str
    unarchived: str = ""


TAKE_TYPE = RecordType(Take)

"""Dead letters of a batch, and batches of dead letters that are replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpy.formats import BadPart, Message
from millpy.ingest.decode import DecodeResult
from millpy.ingest.expansion import Expander
from millpy.ingest.protocol import SourceBatch
from millpy.limits import KEY_BYTES_MAX
from millpy.model.checkpoint import DeadLetter, Request, RequestOutcome
from millpy.model.dead_letter import error_text, printable
from millpy.model.ids import ID_BYTES
from millpy.model.keys import key_text
from millpy.model.record import Instants, column_of, getter
from millpy.model.step_progress import is_user_error
from millpy.model.time import Instant

Mask = npt.NDArray[np.bool_]


class PayloadFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """The format of a dead letter's payload, stored with it as `DeadLetter.wire` so that a replay can decode it.

    A "message" is in the source's own format; the rest of it, beside its payload, is stored here.
    """

    format: Literal["json", "csv", "message"] = "json"
    header: tuple[str, ...] = ()
    topic: str = ""
    key: bytes | None = None
    headers: dict[str, bytes] = {}
    arrived_at: int = 0
    first_line: bytes | None = None
    ending: bytes = b""
    decoded: bool = False

    @classmethod
    def from_batch(cls, taken: SourceBatch) -> PayloadFormat:
        """Return the format of a batch's payloads."""
        return cls("csv", tuple(taken.header)) if taken.format == "csv" else cls()

    @classmethod
    def from_message(cls, message: Message) -> PayloadFormat:
        """Return what a replay needs of a message."""
        return cls(
            "message",
            topic=printable(message.topic),
            key=message.key,
            headers=dict(message.headers),
            arrived_at=message.arrived_at,
            first_line=message.header,
            ending=message.ending,
            decoded=message.decoded,
        )

    def message(self, payload: bytes) -> Message:
        """Return the message again, with a payload that may be corrected."""
        return Message(
            payload, self.topic, self.key, self.headers, self.arrived_at, self.first_line, self.ending, self.decoded
        )


def is_message(wire: str | None) -> bool:
    """Tell whether a dead letter's payload is in its source's own format."""
    return bool(wire) and msgspec.json.decode(wire or "{}", type=PayloadFormat).format == "message"


@dataclass(frozen=True, slots=True)
class ReplayRows:
    """Requests as a batch of their source.

    Attributes:
        taken: the batch.
        requests: the request of each row.
        places: the place of that request among all; -1 for the rows of a message that became several. Such a message is
            replayed for good, and those of its records that fail are dead letters of their own: replaying it once more
            would repeat the others.
    """

    taken: SourceBatch
    requests: Sequence[Request]
    places: Sequence[int]


def replay_rows_of(requests: Sequence[Request], arrived_at: Instant, expander: Expander | None) -> ReplayRows:
    """Return the payloads of dead letters as a batch of their source.

    All must have the same `wire`. A message of a payload format comes alone: it may become as many records, and bytes,
    as one turn may have.
    """
    assert len({request.wire for request in requests}) == 1, "requests with several wires"
    wire = msgspec.json.decode(requests[0].wire or b"{}", type=PayloadFormat)
    if wire.format != "message" or expander is None:  # a source that has given up its format takes JSON
        plain = wire if wire.format != "message" else PayloadFormat()
        return ReplayRows(_batch_of(requests, arrived_at, plain), requests, range(len(requests)))
    (request,) = requests
    message = wire.message(request.payload)
    found = expander.expand([message], records_max=0, bytes_max=0)
    if not found.payloads:  # else it would count as replayed, and be gone
        found.add(message, [BadPart(request.payload, "the payload gives no record")])
    taken = SourceBatch(
        "json",
        arrived_at,
        payloads=found.payloads,
        refused=found.refused,
        messages=found.messages,
        describe=found.describe(lambda _: request.position),
    )
    of_rows = [request if part < 0 else replace(request, dedupe_id=None) for _, part in found.origins]
    return ReplayRows(taken, of_rows, [0 if part < 0 else -1 for _, part in found.origins])


def _batch_of(requests: Sequence[Request], arrived_at: Instant, wire: PayloadFormat) -> SourceBatch:
    assert wire.format != "message"
    return SourceBatch(
        wire.format,
        arrived_at,
        payloads=[request.payload for request in requests],
        header=wire.header,
        describe=lambda row: requests[row].position,
    )


def outcomes_of(
    requests: Sequence[Request], places: Sequence[int], letters: DeadLetterCollector
) -> tuple[list[RequestOutcome], list[DeadLetter]]:
    """Return the outcome of each request, and the dead letters of the records that messages became."""
    failed = {place: letters.of_row(row) for row, place in enumerate(places) if place >= 0}
    further = [letter for row, place in enumerate(places) if place < 0 and (letter := letters.of_row(row)) is not None]
    return [RequestOutcome(request, failed.get(place)) for place, request in enumerate(requests)], further


@dataclass(slots=True)
class DeadLetterCollector:
    """Collects the dead letters of one batch.

    Attributes:
        stream, computation: the names that each dead letter gets.
        taken, decoded: the batch, and the result of decoding it.
        requests: the requests for the rows of `taken`, if it is a replay; otherwise empty.
        judged, ids: which decoded records have a dedupe id, and those ids, 16 bytes each; empty without `Dedupe`.
        devices: the fields that name a device.
        arrivals: when each row of `taken` arrived, if that is the event time.
    """

    stream: str
    computation: str
    taken: SourceBatch
    decoded: DecodeResult
    requests: Sequence[Request] = ()
    judged: Mask = field(default_factory=lambda: np.zeros(0, bool))
    ids: bytes = b""
    devices: tuple[str, ...] = ()
    arrivals: Instants | None = None
    _by_row: dict[int, DeadLetter] = field(default_factory=dict)
    _wire: str | None = None
    _wires: dict[tuple[object, ...], str] = field(default_factory=dict)
    _named: list[list[Any]] | None = None

    def __len__(self) -> int:
        return len(self._by_row)

    def in_order(self) -> list[DeadLetter]:
        """Return all dead letters in the order of their rows."""
        return [self._by_row[row] for row in sorted(self._by_row)]

    def of_row(self, row: int) -> DeadLetter | None:
        """Return the dead letter of a row of the batch, or None."""
        return self._by_row.get(row)

    def add_refused(self) -> None:
        """Dead-letter the rows that did not decode."""
        for refused in self.decoded.refused:
            self._by_row[refused.row] = self._letter_of_row(refused.row, refused.reason, refused.detail)

    def add(self, which: Mask, reason: str, detail: str | Callable[[int], str], times: Instants | None = None) -> None:
        """Dead-letter the decoded records that `which` selects.

        Args:
            which: which of the decoded records.
            reason: the reason.
            detail: more about it; or a function from the index of a decoded record.
            times: the event times of all of them, if known.
        """
        for index in np.flatnonzero(which).tolist():
            more = detail if isinstance(detail, str) else detail(index)
            letter = self.letter_of(index, reason, more, None if times is None else int(times[index]))
            self._by_row[int(self.decoded.rows[index])] = letter

    def letter_of(self, index: int, reason: str, detail: str, event_time: int | None) -> DeadLetter:
        """Return a dead letter for the decoded record at `index`, without adding it to the batch's."""
        letter = self._letter_of_row(int(self.decoded.rows[index]), reason, detail)
        at = letter.event_time if event_time is None else event_time
        return replace(letter, event_time=at, dedupe_id=self.id_of(index), key=self.device_of(index))

    def long_devices(self) -> npt.NDArray[np.int64]:
        """Return the indexes of the records whose device key may be too long, as JSON writes a byte as up to six."""
        sizes = np.zeros(len(self.decoded.rows), np.int64)
        for name in self.devices:
            if self.decoded.objects is not None:
                values = map(getter(name), self.decoded.objects)
                sizes += np.array([len(v) if isinstance(v, str | bytes) else 0 for v in values], np.int64)
                continue
            column = column_of(self.decoded.batch, name)
            if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
                sizes += pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
        return np.flatnonzero(sizes > KEY_BYTES_MAX // 6)

    def device_of(self, index: int) -> bytes | None:
        """Return the device key (JSON text) of a decoded record, or None if the source names no devices."""
        if not self.devices:
            return None
        if self._named is None:
            if self.decoded.objects is not None:
                self._named = [list(map(getter(name), self.decoded.objects)) for name in self.devices]
            else:
                self._named = [column_of(self.decoded.batch, name).to_pylist() for name in self.devices]
        named = [values[index] for values in self._named]
        return key_text(named[0] if len(named) == 1 else tuple(named))

    def id_of(self, index: int) -> bytes | None:
        """Return the dedupe id of a decoded record, or None if it has none."""
        if not len(self.judged) or not self.judged[index]:
            return None
        place = int(np.count_nonzero(self.judged[:index]))
        return self.ids[place * ID_BYTES : (place + 1) * ID_BYTES]

    def keep_original_ids(self, timed: Mask) -> Mask:
        """Restore the original ids of replayed records. Return which of the timed records had one."""
        if not self.requests:
            return np.zeros(len(timed), bool)
        rows = zip(self.decoded.rows.tolist(), timed.tolist(), strict=True)
        original = [self.requests[row].dedupe_id if is_timed else None for row, is_timed in rows]
        held = np.array([known is not None for known in original], bool)
        if held.any():
            found = [known or self.id_of(index) for index, known in enumerate(original)]
            self.judged = self.judged | held
            self.ids = b"".join(known for known in found if known is not None)
        return held

    def _wire_of(self, message: Message) -> str:
        """Return the wire of a message. Those that differ in their payload only share it: a header may be long."""
        same = (
            message.topic,
            message.key,
            tuple(message.headers.items()),
            message.arrived_at,
            message.header,
            message.ending,
        )
        if same not in self._wires:
            self._wires[same] = msgspec.json.encode(PayloadFormat.from_message(message)).decode()
        return self._wires[same]

    def _position_of(self, row: int) -> str:
        """Return where a row comes from, as its source says; the row is a dead letter also if that fails."""
        try:
            return printable(str(self.taken.describe(row)))
        except BaseException as error:  # of a user's source
            if not is_user_error(error):
                raise
            return f"row {row} of a batch; its source cannot describe it: {error_text(error)}"

    def _letter_of_row(self, row: int, reason: str, detail: str) -> DeadLetter:
        message = self.taken.messages.get(row)
        if message is not None:
            wire = self._wire_of(message)
        else:
            if self._wire is None:
                self._wire = msgspec.json.encode(PayloadFormat.from_batch(self.taken)).decode()
            wire = self._wire
        return DeadLetter(
            reason=printable(reason),
            detail=printable(detail),
            payload=self.decoded.payload(row),
            stream=self.stream,
            computation=self.computation,
            position=self._position_of(row),
            wire=wire,
            event_time=None if self.arrivals is None else int(self.arrivals[row]),
        )

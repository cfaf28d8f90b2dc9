"""Sparkplug sessions: of each edge node, metrics out of messages, by the births before them (Sparkplug 3.0).

A birth defines the metrics of an edge node or device: names, data types and aliases. Data then carries aliases. What a
birth has defined is keyed state, so it is in the commit of the birth, and a metric is a function of the messages before
it: a takeover, a replay after a crash or another bundling changes nothing.

    node      NBIRTH begins a session and forgets the devices; NDEATH ends it, if it has the bdSeq of that birth
    device    DBIRTH, DDEATH; each has metrics of its own
    sequence  every message but NDEATH counts from 0 to 255, over node and devices; another number is a gap

After a gap, metrics still go by the last birth: messages are lost, but an edge node renames its aliases only in a
birth, and a new session begins with NDEATH, which the broker sends with QoS 1. A metric that no birth names, or whose
value is none, goes to the stream of rejected metrics with the reason; the others of its message pass.

When metadata is missing, or after a gap, the edge node should be asked for a rebirth; the events tell, at most once in
`rebirth_every` of each edge node, by the time of messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from millpy.computation import Computation, Context, MapCell, Value
from millpy.formats.sparkplug import BD_SEQ, SparkplugMessage
from millpy.formats.sparkplug_schema import payload_class
from millpy.model.time import Instant, check_positive, microseconds, to_datetime
from millpy.operators.sparkplug_values import NAMES, is_known, value_of

DEFINITIONS_MAX = 100_000
"""The most metrics that the births of one edge node define."""
DEVICES_MAX = 10_000
"""The most devices of one edge node that are remembered."""
FUTURE_TOLERANCE_US = 300_000_000
"""How far the time of a metric may be after the arrival of its message."""


class SparkplugMetric(msgspec.Struct, frozen=True):
    """A metric of an edge node or device, with the name that its birth gave it.

    Attributes:
        group, edge_node, device: whose it is; `device` is empty for the edge node itself.
        name: its name.
        at: its own time, or else that of its message; also the event time.
        value: a number or truth value, as a float; the ms since the epoch of a DateTime.
        whole: the same as an exact integer, where it is one of at most 63 bits.
        text: a string, UUID, DateTime (RFC 3339) or large UInt64; bytes and files as base64; arrays, DataSets and
            Templates as JSON.
        datatype: its data type, such as "Int32".
        is_null: whether it says that it has no value.
        is_historical: whether it was stored and is sent late.
        is_birth: whether it is the value in a birth, and not a change.
    """

    group: str
    edge_node: str
    device: str
    name: str
    at: datetime
    value: float | None
    whole: int | None
    text: str | None
    datatype: str
    is_null: bool
    is_historical: bool
    is_birth: bool


class SparkplugEvent(msgspec.Struct, frozen=True):
    """What happened to the session of an edge node.

    Attributes:
        kind: node_birth, node_death, device_birth, device_death, gap, or rebirth_needed.
        detail: more about a gap, or why a rebirth is needed.
    """

    group: str
    edge_node: str
    device: str
    at: datetime
    kind: str
    detail: str


class RejectedMetric(msgspec.Struct, frozen=True):
    """A metric that has no name or no valid value.

    Attributes:
        name: its name or alias (`alias 7`).
        type: the type of its message.
        reason: why it is rejected.
    """

    group: str
    edge_node: str
    device: str
    at: datetime
    name: str
    type: str
    reason: str


class MetricDefinition(msgspec.Struct, array_like=True):
    """What a birth says of a metric."""

    name: str
    datatype: int


class NodeSession(msgspec.Struct, array_like=True):
    """The session of an edge node.

    Attributes:
        online: whether there was a birth, and no death after it.
        bd_seq: the number of the session, from its birth; None if that had none.
        seq: the last sequence number; None before the first message.
        asked_us: the time of the message at which a rebirth was needed last.
    """

    online: bool = False
    bd_seq: int | None = None
    seq: int | None = None
    asked_us: int | None = None


class SparkplugSession(Computation):
    """Makes metrics of the messages of an edge node.

    Args:
        name: the beginning of the names of its streams.
        rebirth_every: the least time between two events `rebirth_needed` of one edge node.
    """

    immediate = True
    session = Value(NodeSession)
    defined = MapCell(str, MetricDefinition)
    devices = MapCell(str, bool)

    def __init__(self, name: str, rebirth_every: timedelta) -> None:
        check_positive("rebirth_every", rebirth_every, "for example rebirth_every=seconds(30)")
        self.outputs: dict[str, type[msgspec.Struct]] = {
            f"{name}_metrics": SparkplugMetric,
            f"{name}_events": SparkplugEvent,
            f"{name}_rejected": RejectedMetric,
        }
        self._every_us = microseconds(rebirth_every)
        self._payloads = payload_class()

    def process_record(self, context: Context, record: Any) -> None:
        """Take one message of an edge node."""
        message: SparkplugMessage = record
        payload = self._payloads.FromString(message.payload)
        call = _Call(context, message, payload, self._every_us, tuple(self.outputs))
        if message.type == "NDEATH":
            call.end_session()
        elif message.type == "NBIRTH":
            call.begin_session()
        else:
            call.follow()


class _Call:
    """The processing of one message."""

    def __init__(
        self, context: Context, message: SparkplugMessage, payload: Any, every_us: int, streams: Sequence[str]
    ) -> None:
        self._metrics, self._events, self._rejected = streams
        self._context, self._message, self._payload, self._every_us = context, message, payload, every_us
        timed = payload.HasField("timestamp") and message.type != "NDEATH"  # its time is when the node connected
        own = payload.timestamp * 1_000 if timed else message.arrived_at
        self._own_us = own
        self._at_us = int(context.event_time_us)
        latest = max(self._at_us, message.arrived_at)
        self._told_us = own if own <= latest + FUTURE_TOLERANCE_US else latest
        self._node: NodeSession = context[SparkplugSession.session]
        self._defined = context[SparkplugSession.defined]
        self._devices = context[SparkplugSession.devices]

    def begin_session(self) -> None:
        """Take a NBIRTH: the session begins, and devices are unknown until their births."""
        node, payload = self._node, self._payload
        node.online, node.bd_seq, node.asked_us = True, _bd_seq(payload), None
        node.seq = payload.seq & 255 if payload.HasField("seq") else 0
        self._devices.clear()
        self._defined.clear()
        self._define()
        self._tell("node_birth", "" if node.bd_seq is None else f"bdSeq {node.bd_seq}")
        self._pass(is_birth=True)

    def end_session(self) -> None:
        """Take a NDEATH, unless it is of an earlier session."""
        node, number = self._node, _bd_seq(self._payload)
        if node.online and (number is None or node.bd_seq is None or number == node.bd_seq):
            node.online = False
            self._devices.clear()
            self._tell("node_death", "" if number is None else f"bdSeq {number}")

    def follow(self) -> None:
        """Take a message within a session."""
        node, kind, device = self._node, self._message.type, self._message.device
        if not node.online:
            why = "the edge node is not born" if node.seq is None else "the edge node is dead"
            self._need_birth(why)
            if kind != "DDEATH":
                self._reject_all(why)
            return
        self._count()
        if kind == "DBIRTH":
            self._forget(device)
            if device not in self._devices and len(self._devices) >= DEVICES_MAX:
                raise ValueError(f"the edge node has more than {DEVICES_MAX} devices")
            self._devices[device] = True
            self._define()
            self._tell("device_birth")
            self._pass(is_birth=True)
        elif kind == "DDEATH":
            if self._devices.get(device):
                self._devices[device] = False
                self._tell("device_death")
        elif device and not self._devices.get(device):
            why = "dead" if device in self._devices else "not born"
            self._need_birth(f"device {device[:200]} is {why}")
            self._reject_all(f"the device is {why}")
        else:
            self._pass(is_birth=False)

    def _count(self) -> None:
        """Compare the sequence number with the last one."""
        node = self._node
        if not self._payload.HasField("seq"):
            return
        seq = self._payload.seq & 255
        expected = seq if node.seq is None else (node.seq + 1) & 255
        if seq != expected:
            self._tell("gap", f"seq {seq} instead of {expected}")
            self._need_birth(f"messages are lost: seq {seq} instead of {expected}")
        node.seq = seq

    def _forget(self, device: str) -> None:
        begin = f"{device}/"
        for name in [name for name in self._defined if name.startswith(begin)]:
            del self._defined[name]

    def _define(self) -> None:
        """Remember the metrics of a birth.

        Raises:
            ValueError: there are too many, or two have one name or alias.
        """
        device = self._message.device
        found: dict[str, MetricDefinition] = {}
        for metric in self._payload.metrics:
            if not metric.name or metric.name == BD_SEQ or not is_known(metric.datatype):
                continue  # `_pass` rejects it
            own = MetricDefinition(metric.name, metric.datatype)
            for key in _keys(device, metric):
                if found.setdefault(key, own) != own:
                    raise ValueError(f"two metrics of a birth have {key.partition('/')[2][:200]!r}")
        if len(self._defined) + len(found) > 2 * DEFINITIONS_MAX:  # by name and by alias
            raise ValueError(f"the births of the edge node define more than {DEFINITIONS_MAX} metrics")
        self._defined.update(found)

    def _pass(self, *, is_birth: bool) -> None:
        """Emit the metrics of the message that have a name and a value."""
        message, unknown = self._message, ""
        for metric in self._payload.metrics:
            if metric.name == BD_SEQ and not message.device:
                continue
            own = self._definition(metric)
            if own is None:
                unknown = unknown or _called(metric)
                self._reject(metric, "no birth names it" if not is_birth else "the birth names no data type of it")
                continue
            at = self._time_of(metric)
            if at > message.arrived_at + FUTURE_TOLERANCE_US:
                self._reject(metric, "its time is in the future", own.name)
                continue
            try:
                value, whole, text = value_of(metric, own.datatype)
            except ValueError as error:
                self._reject(metric, str(error)[:500], own.name)
                continue
            whose = (message.group, message.edge_node, message.device)
            when, kind = to_datetime(Instant(at)), NAMES[own.datatype]
            marks = metric.is_null, metric.is_historical, is_birth
            made = SparkplugMetric(*whose, own.name, when, value, whole, text, kind, *marks)
            self._context.produce(made, to=self._metrics, at=at)
        if unknown and not is_birth:
            self._need_birth(f"{unknown} is in no birth")

    def _definition(self, metric: Any) -> MetricDefinition | None:
        """Return what is known of a metric; None without a name or data type."""
        known = next((own for key in _keys(self._message.device, metric) if (own := self._defined.get(key))), None)
        if known is not None or not metric.name or not is_known(metric.datatype):
            return known
        return MetricDefinition(metric.name, metric.datatype)  # it says everything itself

    def _time_of(self, metric: Any) -> int:
        at = metric.timestamp * 1_000 if metric.HasField("timestamp") else self._own_us
        return max(at, self._at_us)

    def _reject_all(self, reason: str) -> None:
        for metric in self._payload.metrics:
            self._reject(metric, reason)

    def _reject(self, metric: Any, reason: str, name: str = "") -> None:
        message = self._message
        made = RejectedMetric(
            message.group, message.edge_node, message.device, to_datetime(Instant(self._told_us)),
            name or _called(metric), message.type, reason,
        )  # fmt: skip
        self._context.produce(made, to=self._rejected, at=self._told_us)

    def _need_birth(self, why: str) -> None:
        """Tell that the edge node should be born again, unless that was told shortly before."""
        node = self._node
        if node.asked_us is not None and 0 <= self._told_us - node.asked_us < self._every_us:
            return
        node.asked_us = self._told_us
        self._tell("rebirth_needed", why)

    def _tell(self, kind: str, detail: str = "") -> None:
        message = self._message
        at = to_datetime(Instant(self._told_us))
        made = SparkplugEvent(message.group, message.edge_node, message.device, at, kind, detail.replace("\0", " "))
        self._context.produce(made, to=self._events, at=self._told_us)


def _keys(device: str, metric: Any) -> Iterable[str]:
    """Yield what a metric is found by: its alias, and its name. A device has no / in its name."""
    if metric.HasField("alias"):
        yield f"{device}/#{metric.alias}"
    if metric.name:
        yield f"{device}/={metric.name}"


def _called(metric: Any) -> str:
    return metric.name or (f"alias {metric.alias}" if metric.HasField("alias") else "a metric without name and alias")


def _bd_seq(payload: Any) -> int | None:
    """Return the number of the session that a birth or death names."""
    for metric in payload.metrics:
        if metric.name == BD_SEQ and metric.WhichOneof("value") in ("int_value", "long_value"):
            return int(metric.long_value or metric.int_value)
    return None

"""TopicTemplate: the topic of a record, such as `alerts/{device}`, and what no topic may be.

Brokers close the connection of a client that publishes to a topic that they find malformed, so such a topic must not
reach the outbox: the message would come again on every connection.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from typing import Any
from uuid import UUID

from millpy.errors import GraphError, RefusedValueError
from millpy.model.arguments import check_function
from millpy.model.dead_letter import error_text
from millpy.model.record import RecordType, getter
from millpy.model.step_progress import is_user_error

TOPIC_BYTES_MAX = 1_024
LEVELS_MAX = 128
"""mosquitto takes 200 levels, EMQX 128 by default."""
FIELD_TYPES = (str, int, UUID)
_FIELD = re.compile(r"\{([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}", re.ASCII)
_NONCHARACTERS = "".join(chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF))
_UNSENDABLE = re.compile(f"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef{_NONCHARACTERS}]")
"""Characters that the standard forbids in its strings, or for which brokers may close the connection."""
Topic = str | Callable[[Any], str]
ReadTopic = Callable[[Any], str]


def unsendable(text: str) -> bool:
    """Tell whether a text has a character that cannot be in a topic or a user property."""
    return _UNSENDABLE.search(text) is not None


def topic_fault(topic: object) -> str:
    """Return why messages cannot be sent to a topic; "" if they can."""
    if not isinstance(topic, str):
        return f"{topic!r} is not a text"
    if not topic:
        return "it is empty"
    if unsendable(topic):
        return "it has a control character, or another one that no topic may have"
    if wildcard := re.search("[+#]", topic):
        return f"it has the wildcard {wildcard[0]!r}"
    if topic.startswith("$"):
        return "topics that begin with $ belong to the broker"
    if (size := len(topic.encode())) > TOPIC_BYTES_MAX:
        return f"it has {size:,} bytes; the limit is {TOPIC_BYTES_MAX:,}"
    if (levels := topic.count("/") + 1) > LEVELS_MAX:
        return f"it has {levels:,} levels; the limit is {LEVELS_MAX:,}"
    return ""


def checked_topic(topic: object) -> Topic:
    """Check the topic of a sink as far as it is known without a record. Raises GraphError."""
    if callable(topic):
        check_function("topic", topic, 'for example lambda record: f"alerts/{record.device}"')
        return topic
    if isinstance(topic, str):
        filled = _FIELD.sub("x", topic)
        fault = "it has a brace that names no field" if re.search("[{}]", filled) else topic_fault(filled)
    else:
        fault = "it is neither a text nor a function"
    if fault:
        raise GraphError(
            f"messages cannot be sent to topic {topic!r}: {fault}",
            hint='for example "alerts/{device}", or a function from a record to its topic',
        )
    return str(topic)


def validate(topic: Topic, record_type: RecordType) -> None:
    """Check the fields that a topic names. Raises GraphError, SchemaError."""
    for name in _FIELD.findall(topic) if isinstance(topic, str) else ():
        found = record_type.field_type(name)
        if found not in FIELD_TYPES and not (isinstance(found, type) and issubclass(found, Enum)):
            raise GraphError(
                f"field {name!r} of {record_type.struct.__name__} cannot be a part of a topic",
                hint="name a field of text, whole numbers, UUIDs or an Enum, or give a function of the record",
            )


def topic_reader(topic: Topic) -> ReadTopic:
    """Return a function from a record to its topic, which raises RefusedValueError if there is none."""
    if not isinstance(topic, str):
        return _called(topic)
    parts = _FIELD.split(topic)  # texts and names alternate
    texts, fields = parts[::2], [(name, getter(name)) for name in parts[1::2]]

    def read(record: Any) -> str:
        found = texts[0]
        for (name, value), text in zip(fields, texts[1:], strict=True):
            found += _level(name, value(record)) + text
        return _checked(found)

    return read


def _level(name: str, value: Any) -> str:
    """Return the value of a field as a part of a topic, which must stay within its level."""
    if isinstance(value, Enum):
        value = value.value
    text = "" if value is None else str(value)
    if not text or "/" in text:
        raise RefusedValueError(f"field {name!r} is {value!r}, which cannot be a part of a topic")
    return text


def _called(function: Callable[[Any], str]) -> ReadTopic:
    def read(record: Any) -> str:
        try:
            found = function(record)
        except BaseException as error:  # user code
            if not is_user_error(error):
                raise
            raise RefusedValueError(f"the function of the topic raised {error_text(error)}") from error
        return _checked(found)

    return read


def _checked(topic: str) -> str:
    if fault := topic_fault(topic):
        raise RefusedValueError(f"no message can be sent to topic {topic!r:.200}: {fault}")
    return topic

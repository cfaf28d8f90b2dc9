"""Topic filters with named levels: `sensors/{site}/{device}` is the filter `sensors/+/+` with names for its levels.

A named level becomes a field of the record, written into the payload (`json_append.py`). It overrides a field of the
same name in the payload.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from millpy.errors import ConfigError
from millpy.formats import Format
from millpy.ingest.json_append import EMPTY_OR_SPACED, completed
from millpy.ingest.named_text import NAMED, NamedText, check_named
from millpy.model.record import RecordType

TOPIC_BYTES_MAX = 65_535
_KNOWN_TOPICS_MAX = 100_000
_KNOWN_BYTES_MAX = 32_000_000


@dataclass(frozen=True, slots=True)
class TopicPattern:
    """A topic filter with names for some levels.

    Attributes:
        filter: the filter as it is sent to the broker.
        levels: the index and name of each named level.
    """

    filter: str
    levels: tuple[tuple[int, str], ...]

    @staticmethod
    def parse(text: str) -> TopicPattern:
        """Parse a filter.

        Raises:
            ConfigError: the text is not a topic filter, or names two levels alike.
        """
        if (
            not isinstance(text, str)
            or not text
            or "\0" in text
            or len(text.encode(errors="surrogatepass")) > TOPIC_BYTES_MAX
        ):
            raise ConfigError(f"invalid MQTT topic filter {text!r}", hint='an example: Mqtt("sensors/+/reading")')
        if text.startswith("$share/"):
            raise ConfigError(
                f"{text!r} is a shared subscription, which loses the order of a device's messages",
                hint="name several topic filters: each is a separate source partition",
            )
        levels, names = [], []
        parts = text.split("/")
        for index, level in enumerate(parts):
            named = NAMED.fullmatch(level)
            if named:
                names.append((index, named[1]))
                levels.append("+")
                continue
            inside = level not in ("+", "#") and re.search(r"[+#{}]", level)
            if inside or (level == "#" and index < len(parts) - 1):
                raise ConfigError(
                    f"MQTT topic filter {text!r} has the invalid level {level!r}",
                    hint="use +, {name} and # for whole levels, and # only at the end",
                )
            levels.append(level)
        if len({name for _, name in names}) < len(names):
            raise ConfigError(f"two levels of {text!r} have the same name", hint="rename one: each fills a field")
        return TopicPattern("/".join(levels), tuple(names))

    def matches(self) -> re.Pattern[bytes]:
        """Return a pattern whose `fullmatch` tells whether the filter matches a topic."""
        levels = self.filter.split("/")
        named = levels[:-1] if levels[-1] == "#" else levels
        text = b"/".join(b"[^/]*" if level == "+" else re.escape(level.encode()) for level in named)
        if not named:
            text = b".*"
        elif named is not levels:
            text += b"(/.*)?"  # a/# matches a and all topics below it
        # A wildcard does not match the broker's own topics.
        return re.compile((b"(?!\\$)" if levels[0] in ("+", "#") else b"") + text, re.DOTALL)

    def validate(self, record_type: RecordType, format: Format | None = None) -> None:
        """Check that each named level is a field of the record that can hold the text of a topic level.

        Raises:
            GraphError: a name is not a field, the field is not a str, int or UUID, the format fills it, or records are
                written as arrays.
        """
        check_named([name for _, name in self.levels], record_type, "topic level", format)


def overlap(one: str, other: str) -> bool:
    """Tell whether some topic matches both filters."""
    first = {one[:1], other[:1]}
    if "$" in first and first & {"+", "#"}:
        return False  # a wildcard does not match the broker's own topics
    left, right = one.split("/"), other.split("/")
    for index in range(max(len(left), len(right))):
        levels = [parts[index] if index < len(parts) else None for parts in (left, right)]
        if "#" in levels:
            return True
        if None in levels or ("+" not in levels and levels[0] != levels[1]):
            return False
    return True


class TopicFields:
    """A function that writes the named levels of topics into payloads.

    Args:
        pattern: the validated filter, with named levels.
        record_type: the record type of the stream.
    """

    def __init__(self, pattern: TopicPattern, record_type: RecordType) -> None:
        self._levels = [index for index, _ in pattern.levels]
        self._fields = NamedText([name for _, name in pattern.levels], record_type)
        self._endings: dict[bytes, bytes] = {}
        self._endings_bytes = 0

    def __call__(self, topics: Sequence[bytes], payloads: Sequence[bytes]) -> list[bytes]:
        """Append the fields to objects, where they override earlier ones; return other payloads unchanged."""
        endings = {topic: self.ending(topic) for topic in set(topics)}
        return [
            payload[:-1] + endings[topic]
            if payload[-1:] == b"}" and payload[-2:-1] not in EMPTY_OR_SPACED
            else completed(payload, endings[topic])
            for topic, payload in zip(topics, payloads, strict=True)
        ]

    def ending(self, topic: bytes) -> bytes:
        """Return the bytes that a payload gets from its topic."""
        known = self._endings.get(topic)
        if known is None:
            known = self._ending(topic)
            self._endings_bytes += len(topic) + len(known)
            if len(self._endings) >= _KNOWN_TOPICS_MAX or self._endings_bytes > _KNOWN_BYTES_MAX:
                self._endings.clear()
                self._endings_bytes = len(topic) + len(known)
            self._endings[topic] = known
        return known

    def _ending(self, topic: bytes) -> bytes:
        levels = topic.decode(errors="replace").split("/")
        return self._fields.ending([levels[index] for index in self._levels])

"""How often each word occurs in each minute of a speech. Its lines arrive as they are spoken, one every five seconds.

millpy run examples/word_count.py
millpy sql "SELECT word, sum(n) AS n FROM word_count.per_minute GROUP BY word ORDER BY n DESC, word LIMIT 5"
"""

import re
from datetime import datetime
from pathlib import Path

import msgspec

from millpy import Count, EventTime, File, FixedWindows, Graph, minutes


class Line(msgspec.Struct):
    at: datetime
    text: str


class Word(msgspec.Struct):
    word: str


def words_of(line: Line) -> list[Word]:
    """Return the words of a line, in order."""
    return [Word(word) for word in re.findall(r"[a-z]+(?:'[a-z]+)*", line.text.lower())]


graph = Graph("word_count")
lines = graph.inject(
    "lines", File(Path(__file__).parent / "data/speech.ndjson"), schema=Line, event_time=EventTime("at", sorted=True)
)
(
    lines.flat_map(words_of, Word)
    .key_by("word")
    .window(FixedWindows(minutes(1)))
    .aggregate(n=Count())
    .to_table("per_minute")
)

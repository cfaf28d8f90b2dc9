"""Where the records of a CSV file end, found without a loop over its lines.

A CSV record may span several lines if a quoted field does. A quote counts only at the beginning of a field, as in
Python's csv module. A quote that is not closed before the end of the file, or within the longest permitted record,
spoils only its own line.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from millpy.ingest.text_columns import quotes_are_regular

Positions = npt.NDArray[np.int64]
_QUOTE, _NEWLINE = b'"\n'


def record_ends(data: bytes, record_bytes_max: int, *, at_end: bool) -> Positions:
    """Return the ends of the records in CSV data: the newlines outside of quotes.

    Args:
        data: the bytes, which begin with a record.
        record_bytes_max: the longest record; a longer one with an open quote ends with its first line.
        at_end: whether the file ends here, so that an open quote does not count.
    """
    codes = np.frombuffer(data, np.uint8)
    newlines = np.flatnonzero(codes == _NEWLINE)
    quotes = np.flatnonzero(codes == _QUOTE)
    if quotes_are_regular(codes, quotes):
        ends: Positions = newlines[np.searchsorted(quotes, newlines) % 2 == 0]
        longest = int(np.diff(ends, prepend=-1).max(initial=0))
        begin = int(ends[-1]) + 1 if len(ends) else 0
        reaches = len(data) - begin <= record_bytes_max or not len(newlines) or int(newlines[-1]) < begin
        if longest <= record_bytes_max and reaches and (len(quotes) % 2 == 0 or not at_end):
            return ends
    return _ends_by_lines(data, newlines, record_bytes_max, at_end=at_end)


# _FIELD matches a quoted field within one line, with the bytes from its closing quote to the next comma, or any other
# field. Each byte of a line can match in one way only, so matching is linear. Groups are not possessive: before 3.11.5
# Python matches such groups wrongly (gh-106052).
_TO_QUOTE = rb'[^"\n]*+(?:""[^"\n]*+)*"(?!")[^,\n]*+'
_FIELD = rb'(?:"' + _TO_QUOTE + rb'|(?!")[^,\n]*+)'
_OUTSIDE = re.compile(rb"^" + _FIELD + rb"(?:," + _FIELD + rb")*$", re.MULTILINE)
_CLOSES = re.compile(rb"^" + _TO_QUOTE + rb"(?:," + _FIELD + rb")*$", re.MULTILINE)


def _ends_by_lines(data: bytes, newlines: Positions, record_bytes_max: int, *, at_end: bool) -> Positions:
    """Return the ends of records with irregular quotes: a record ends with the first line that closes its quotes.

    Two facts about each line decide, each found in one pass: whether a record that begins with the line ends with it,
    and whether a quoted field that began before the line is closed at its end. So the cost is linear in the bytes for
    any input.
    """
    starts = np.concatenate([np.zeros(1, np.int64), newlines + 1])
    whole = np.zeros(len(starts), bool)
    whole[np.searchsorted(starts, [match.start() for match in _OUTSIDE.finditer(data)])] = True
    closing = np.searchsorted(starts, [match.start() for match in _CLOSES.finditer(data)])
    closing = closing[closing < len(newlines) + at_end].tolist()
    stops = [*newlines.tolist(), len(data)]
    found: list[int] = []
    start = line = at = 0
    for_whole = whole.tolist()
    while line < len(newlines):
        last = line
        if not for_whole[line]:
            while at < len(closing) and closing[at] <= line:
                at += 1
            if at < len(closing) and stops[closing[at]] - start <= record_bytes_max:
                last = closing[at]
            elif at == len(closing) and not at_end and len(data) - start <= record_bytes_max:
                break
        if last == len(newlines):
            break  # the record extends to the end of the data
        found.append(stops[last])
        line, start = last + 1, stops[last] + 1
    return np.array(found, np.int64)

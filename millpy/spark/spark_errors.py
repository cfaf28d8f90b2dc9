"""Errors of Spark, as the one line that a user needs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.errors import PySparkException

from millpy.errors import MillError


def readable_error(text: str) -> str:
    """Return the message of the millpy error that an error of Spark contains, else the first line of Spark's error."""
    lines = text.strip().splitlines()
    ours = [found[1] for line in lines if (found := re.match(r"millpy\.[\w.]+Error: (.+)", line))]
    return ours[-1] if ours else f"Spark: {lines[0]}"


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turn an error of Spark into one readable line."""
    try:
        yield
    except PySparkException as error:
        raise MillError(readable_error(str(error)), hint="the log of Spark has the whole error") from error

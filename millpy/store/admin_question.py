"""Ask a person's own question in SQL, and change nothing by it.

READ ONLY alone does not hold: of several statements in one text the first may be COMMIT; COPY … TO PROGRAM, DO, LOCK
and NOTIFY are allowed under it; and functions of the server write files, end sessions and keep locks. So a statement

    is one         it goes by the extended protocol, which takes no second
    is a question  EXPLAIN takes it, so that the server's own grammar decides, or it is SHOW or EXPLAIN itself
    does not act   every volatile function in its plan, where views are open, is known to be harmless
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, LiteralString, cast

import psycopg
from psycopg.rows import dict_row

from millpy.errors import UsageError

READ_ONLY = "25006"
SYNTAX_ERROR = "42601"
SEVERAL = "cannot insert multiple commands"
HINT = "use psql for that"
HARMLESS = (
    r"^(amvalidate|array_(sample|shuffle)|bernoulli|system|clock_timestamp|timeofday|current_query|currval|lastval"
    r"|gen_random_uuid|uuidv[47]|random|random_normal|setseed|txid_status|pg_sleep(_for|_until)?|pg_xact_\w+"
    r"|pg_(relation|table|indexes|total_relation|database|tablespace)_size|pg_(\w+_)?collation_actual_version"
    r"|pg_(get|stat_get|show|is|last|current|control|partition)_\w+|pg_(lock_status|prepared_xact|jit_available)"
    r"|pg_(safe_snapshot_)?blocking_pids|pg_stat_have_stats|pg_sequence_last_value|pg_notification_queue_usage"
    r"|pg_(hba_file_rules|ident_file_mappings)|pg_replication_origin_(progress|session_progress|session_is_setup))$"
)
"""The volatile functions of the server that only look, or only wait (and the statement's time is limited)."""
_TOKEN = re.compile(r"""E'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|(?:"((?:[^"]|"")*)"|([^\W\d][\w$]*))\s*(\()?""", re.DOTALL)
_UNEXPLAINED = re.compile(r"\s*(show|explain)\b", re.IGNORECASE)
_RUNS = re.compile(r"\banaly[sz]e\b", re.IGNORECASE)
_COMMANDS = frozenset(
    "abort alter analyze begin call checkpoint close cluster comment commit copy create deallocate delete discard do"
    " drop end fetch grant import insert listen load lock merge move notify prepare reassign refresh reindex release"
    " reset revoke rollback savepoint security select set start truncate unlisten update vacuum".split()
)
ACTING: LiteralString = """
    SELECT proname FROM pg_catalog.pg_proc
     WHERE proname = ANY (%(names)s) AND provolatile = 'v'
       AND (pronamespace <> 'pg_catalog'::pg_catalog.regnamespace OR proname !~ %(harmless)s) LIMIT 1
"""


def answer(connection: psycopg.Connection[Any], statement: str) -> list[dict[str, Any]]:
    """Rows of one question; none when it has no rows to give.

    Args:
        connection: in a transaction, which is read-only from now on.
        statement: without parameters.

    Raises:
        UsageError: it is not one question, or it would change something.
        psycopg.Error: what else the server says.
    """
    statement.encode()  # what is no text is told as it was given
    try:
        _run(connection, "SET TRANSACTION READ ONLY")
        if not _UNEXPLAINED.match(statement):
            _refuse_acting(connection, statement)
        elif _RUNS.search(statement):
            raise UsageError("EXPLAIN ANALYZE runs what it explains", hint=HINT)
        return _run(connection, statement)
    except psycopg.Error as error:
        if error.sqlstate == READ_ONLY:
            raise UsageError("this would change something", hint=HINT) from None
        if error.sqlstate == SYNTAX_ERROR and SEVERAL in str(error):
            raise UsageError("one statement at a time", hint="ask for each by itself") from None
        if error.sqlstate == SYNTAX_ERROR and _first_word(statement) in _COMMANDS - {"select"}:
            raise UsageError("this would change something", hint=HINT) from None
        raise


def _refuse_acting(connection: psycopg.Connection[Any], statement: str) -> None:
    (row,) = _run(connection, f"EXPLAIN (VERBOSE, COSTS OFF, FORMAT JSON) {statement}")
    names = sorted({name for text in _texts(row["QUERY PLAN"]) for name in functions_in(text)})
    acting = connection.execute(ACTING, {"names": names, "harmless": HARMLESS}).fetchone()
    if acting is not None:
        raise UsageError(
            f"{acting[0]}() may change something", hint=f"{HINT}; a function of yours that only reads may be STABLE"
        )


def _run(connection: psycopg.Connection[Any], statement: str) -> list[dict[str, Any]]:
    """By the extended protocol: a pipeline has no other."""
    with connection.cursor(row_factory=dict_row) as cursor:
        with connection.pipeline() as pipeline:
            cursor.execute(cast("Any", statement))
            pipeline.sync()
        return cursor.fetchall() if cursor.description is not None else []


def functions_in(text: str) -> Iterator[str]:
    """Names before a parenthesis in an expression as the server prints it, outside literals and quoted names."""
    for quoted, plain, called in _TOKEN.findall(text):
        if called:
            yield quoted.replace('""', '"') if quoted else plain


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name == "Function Name":
                yield f'"{str(inner).replace(chr(34), chr(34) * 2)}"('
            else:
                yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _first_word(statement: str) -> str:
    bare = re.sub(r"--[^\n]*|/\*.*?\*/", " ", statement, flags=re.DOTALL).split(None, 1)
    return re.split(r"\W", bare[0].lower(), maxsplit=1)[0] if bare else ""

"""Run an operator's SQL statement so that it cannot change anything.

READ ONLY alone does not suffice: of several statements in one text the first may be COMMIT; COPY … TO PROGRAM, DO, LOCK
and NOTIFY are allowed under it; and functions of the server write files, end sessions and keep locks. So a statement

    is one         the extended protocol, by which it is sent, takes only one
    is a query     EXPLAIN takes it, so that the server's own grammar decides, or it is SHOW or EXPLAIN itself
    does not act   every volatile function in its text, in the views that it names and in its plan is known to be
                   harmless: the plan alone does not show functions behind LIMIT, OFFSET or VALUES
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, LiteralString, cast

import psycopg
from psycopg.rows import tuple_row

from millpy.errors import UsageError
from millpy.limits import NAME_BYTES_MAX

READ_ONLY = "25006"
SYNTAX_ERROR = "42601"
SEVERAL = "cannot insert multiple commands"
HINT = "use psql for that"
ROWS_MAX = 100_000
"""Rows of an answer. A million rows of a dozen columns take three gigabytes as values of Python."""
HARMLESS = (
    r"^(amvalidate|array_(sample|shuffle)|bernoulli|system|clock_timestamp|timeofday|current_query|currval|lastval"
    r"|gen_random_uuid|uuidv[47]|random|random_normal|setseed|txid_status|pg_sleep(_for|_until)?|pg_xact_\w+"
    r"|pg_(relation|table|indexes|total_relation|database|tablespace)_size|pg_(\w+_)?collation_actual_version"
    r"|pg_(get|stat_get|show|is|last|current|control|partition)_\w+|pg_(lock_status|prepared_xact|jit_available)"
    r"|pg_(safe_snapshot_)?blocking_pids|pg_stat_have_stats|pg_sequence_last_value|pg_notification_queue_usage"
    r"|pg_(hba_file_rules|ident_file_mappings)|pg_replication_origin_(progress|session_progress|session_is_setup))$"
)
"""The server's volatile functions that only read, or only wait (and the statement's time is limited)."""
OURS = ("account", "alive", "devices", "silent_devices")
"""Functions of ours that only read; they are volatile so that each takes a separate snapshot, behind its locks."""
_CALL = re.compile(r"""E'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|(?:"((?:[^"]|"")*)"|([^\W\d][\w$]*))\s*(\()?""", re.DOTALL)
# Splits a statement as the server does. Where the two could differ, the statement is refused (`_UNCLEAR`): a quote
# behind a backslash may or may not end a literal, and a name written in escapes may be any name.
_PART = re.compile(
    r"""'[^']*'|\$(?P<tag>(?:[A-Za-z_\x80-\U0010ffff][\w\x80-\U0010ffff]*)?)\$.*?\$(?P=tag)\$|--[^\n\r]*|(?P<remark>/\*)"""
    r"""|"(?P<quoted>(?:[^"]|"")*)"|(?P<plain>[A-Za-z_\x80-\U0010ffff][\w$\x80-\U0010ffff]*)|(?P<sign>[.(])""",
    re.DOTALL,
)
_REMARK_EDGE = re.compile(r"/\*|\*/")
_UNCLEAR = re.compile(r"""\\'|u&\"""", re.IGNORECASE)
_UNEXPLAINED = re.compile(r"\s*(show|explain)\b", re.IGNORECASE)
_RUNS = re.compile(r"\banaly[sz]e\b", re.IGNORECASE)
_COMMANDS = frozenset(
    "abort alter analyze begin call checkpoint close cluster comment commit copy create deallocate delete discard do"
    " drop end fetch grant import insert listen load lock merge move notify prepare reassign refresh reindex release"
    " reset revoke rollback savepoint security select set start truncate unlisten update vacuum".split()
)
ACTING: LiteralString = r"""
    WITH RECURSIVE views (oid) AS (
        SELECT c.oid FROM pg_catalog.pg_class AS c WHERE c.relkind = 'v' AND c.relname = ANY (%(named)s)
         UNION
        SELECT c.oid FROM views AS v
          JOIN pg_catalog.pg_rewrite AS r ON r.ev_class = v.oid AND r.ev_type = '1'
          JOIN pg_catalog.pg_depend AS d ON d.classid = 'pg_catalog.pg_rewrite'::pg_catalog.regclass AND d.objid = r.oid
          JOIN pg_catalog.pg_class AS c ON d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass
               AND c.oid = d.refobjid AND c.relkind = 'v'
    ), inside (oid) AS (
        SELECT (pg_catalog.regexp_matches(
                   r.ev_action::text, ':(?:funcid|opfuncid|aggfnoid|winfnoid|tsmhandler) (\d+)', 'g'))[1]::oid
          FROM views AS v JOIN pg_catalog.pg_rewrite AS r ON r.ev_class = v.oid AND r.ev_type = '1'
    )
    SELECT proname FROM pg_catalog.pg_proc AS p
     WHERE provolatile = 'v' AND (proname = ANY (%(called)s) OR p.oid IN (SELECT i.oid FROM inside AS i))
       AND (pronamespace <> 'pg_catalog'::pg_catalog.regnamespace OR proname !~ %(harmless)s)
       AND NOT (pronamespace = pg_catalog.to_regnamespace('mill') AND proname = ANY (%(ours)s)) LIMIT 1
"""
"""Selects the name of one function that acts, among those `called` and those inside the views `named`."""


def answer(connection: psycopg.Connection[Any], statement: str) -> list[dict[str, Any]]:
    """Run one query and return its rows; an empty list for a statement without rows.

    Columns with equal names get numbers, so that no value is lost: `SELECT 1 AS n, 2 AS n` has columns `n` and `n_2`.

    Args:
        connection: a connection in a transaction, which is read-only from now on.
        statement: a statement without parameters.

    Raises:
        UsageError: the text is not one query, would change the database, or returns more than ROWS_MAX rows.
        psycopg.Error: any other error of the server.
    """
    statement.encode()  # invalid Unicode raises here
    if _UNCLEAR.search(statement):
        raise UsageError(
            "the statement can be read in two ways", hint="write '' for a quote, and no backslashes in names"
        )
    try:
        _run(connection, "SET TRANSACTION READ ONLY")
        if not _UNEXPLAINED.match(statement):
            _refuse_acting(connection, statement)
        elif _RUNS.search(statement):
            raise UsageError("EXPLAIN ANALYZE runs the statement that it explains", hint=HINT)
        return _run(connection, statement)
    except psycopg.Error as error:
        if error.sqlstate == READ_ONLY:
            raise UsageError("this statement would change the database", hint=HINT) from None
        if error.sqlstate == SYNTAX_ERROR and SEVERAL in str(error):
            raise UsageError("the text has several statements", hint="run them one at a time") from None
        if error.sqlstate == SYNTAX_ERROR and _first_word(statement) in _COMMANDS - {"select"}:
            raise UsageError("this statement would change the database", hint=HINT) from None
        raise


def _refuse_acting(connection: psycopg.Connection[Any], statement: str) -> None:
    (row,) = _run(connection, f"EXPLAIN (VERBOSE, COSTS OFF, FORMAT JSON) {statement}")
    names = list(names_in(statement))
    called = {name for text in _texts(row["QUERY PLAN"]) for name in functions_in(text)}
    called.update(name for name, is_called in names if is_called)
    given = {
        "called": sorted(called),
        "named": sorted({name for name, _ in names}),
        "harmless": HARMLESS,
        "ours": list(OURS),
    }
    acting = connection.execute(ACTING, given).fetchone()
    if acting is not None:
        raise UsageError(
            f"{acting[0]}() may change the database", hint=f"{HINT}; declare your functions that only read STABLE"
        )


def _run(connection: psycopg.Connection[Any], statement: str) -> list[dict[str, Any]]:
    """Run a statement by the extended protocol, the only one that a pipeline speaks."""
    with connection.cursor(row_factory=tuple_row) as cursor:
        with connection.pipeline() as pipeline:
            cursor.execute(cast("Any", statement))
            pipeline.sync()
        if cursor.description is None:
            return []
        if cursor.rowcount > ROWS_MAX:
            raise UsageError(
                f"{cursor.rowcount:,} rows are too many to show", hint="add a condition or LIMIT, or use psql"
            )
        names = distinct_names([column.name for column in cursor.description])
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return names of columns that differ: the second `n` becomes `n_2`, or the next that no column has."""
    taken, found = set(names), list[str]()
    for name in names:
        number, own = 2, name
        if name in found:
            while (own := f"{name}_{number}") in taken:
                number += 1
            taken.add(own)
        found.append(own)
    return found


def names_in(statement: str) -> Iterator[tuple[str, bool]]:
    """Yield each name in a statement as the server reads it, and whether it may name a function.

    It may if a parenthesis follows, or if a dot precedes, because `row.name` can be a call.
    """
    parts = [("", ""), *_parts(statement), ("", "")]
    for (_, before), (name, _), (_, behind) in zip(parts, parts[1:], parts[2:], strict=False):
        if name:
            yield name, before == "." or behind == "("


def _parts(statement: str) -> Iterator[tuple[str, str]]:
    """Yield (name, "") for a name, ("", sign) for a sign and ("", "") for a literal; skip comments."""
    at = 0
    while part := _PART.search(statement, at):
        at = part.end()
        if part["remark"]:
            at = _after_remark(statement, part.start())
        elif part["plain"] is not None or part["quoted"] is not None:
            name = (part["plain"] or "").encode().lower() or part["quoted"].replace('""', '"').encode()
            yield name[:NAME_BYTES_MAX].decode(errors="ignore"), ""
        elif not part[0].startswith("--"):
            yield "", part["sign"] or ""


def _after_remark(statement: str, at: int) -> int:
    """Return the end of the comment that begins at `at`; comments nest."""
    depth = 0
    for edge in _REMARK_EDGE.finditer(statement, at):
        depth += 1 if edge[0] == "/*" else -1
        if not depth:
            return edge.end()
    return len(statement)


def functions_in(text: str) -> Iterator[str]:
    """Yield the names before a parenthesis in an expression that the server printed, outside literals."""
    for quoted, plain, called in _CALL.findall(text):
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

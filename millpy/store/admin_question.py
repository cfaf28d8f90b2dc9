"""Ask a person's own question in SQL, and change nothing by it.

READ ONLY alone does not hold: of several statements in one text the first may be COMMIT; COPY … TO PROGRAM, DO, LOCK
and NOTIFY are allowed under it; and functions of the server write files, end sessions and keep locks. So a statement

    is one         it goes by the extended protocol, which takes no second
    is a question  EXPLAIN takes it, so that the server's own grammar decides, or it is SHOW or EXPLAIN itself
    does not act   every volatile function in its text, in the views that it names and in its plan is known to be
                   harmless: the plan alone does not show what stands behind LIMIT, OFFSET or VALUES
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
OURS = ("account", "alive", "devices")
"""Ours that only look: they are volatile so that each takes a snapshot of its own, behind its locks."""
_CALL = re.compile(r"""E'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|(?:"((?:[^"]|"")*)"|([^\W\d][\w$]*))\s*(\()?""", re.DOTALL)
# A person's text as the server takes it apart. Where the two could differ, it is refused (`_UNCLEAR`): whether a quote
# behind a backslash ends a text, and what a name means that is written in escapes.
_PART = re.compile(
    r"""'[^']*'|\$(?P<tag>(?:[A-Za-z_\x80-\U0010ffff][\w\x80-\U0010ffff]*)?)\$.*?\$(?P=tag)\$|--[^\n\r]*|(?P<remark>/\*)"""
    r"""|"(?P<quoted>(?:[^"]|"")*)"|(?P<plain>[A-Za-z_\x80-\U0010ffff][\w$\x80-\U0010ffff]*)|(?P<sign>[.(])""",
    re.DOTALL,
)
_REMARK_EDGE = re.compile(r"/\*|\*/")
_UNCLEAR = re.compile(r"""\\'|u&\"""", re.IGNORECASE)
_NAME_BYTES_MAX = 63
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
"""The name of one that acts, of those that are `called` and those inside of views that are `named`."""


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
    if _UNCLEAR.search(statement):
        raise UsageError("it can be read in two ways", hint="write '' for a quote, and no backslashes in names")
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
            f"{acting[0]}() may change something", hint=f"{HINT}; a function of yours that only reads may be STABLE"
        )


def _run(connection: psycopg.Connection[Any], statement: str) -> list[dict[str, Any]]:
    """By the extended protocol: a pipeline has no other."""
    with connection.cursor(row_factory=dict_row) as cursor:
        with connection.pipeline() as pipeline:
            cursor.execute(cast("Any", statement))
            pipeline.sync()
        return cursor.fetchall() if cursor.description is not None else []


def names_in(statement: str) -> Iterator[tuple[str, bool]]:
    """Names in a statement as the server understands them, and whether each may be that of a function.

    It may when a parenthesis follows, or when it stands behind a dot: `row.name` is a call, too.
    """
    parts = [("", ""), *_parts(statement), ("", "")]
    for (_, before), (name, _), (_, behind) in zip(parts, parts[1:], parts[2:], strict=False):
        if name:
            yield name, before == "." or behind == "("


def _parts(statement: str) -> Iterator[tuple[str, str]]:
    """(name, "") or ("", sign); texts are neither, and remarks nothing."""
    at = 0
    while part := _PART.search(statement, at):
        at = part.end()
        if part["remark"]:
            at = _after_remark(statement, part.start())
        elif part["plain"] is not None or part["quoted"] is not None:
            name = (part["plain"] or "").encode().lower() or part["quoted"].replace('""', '"').encode()
            yield name[:_NAME_BYTES_MAX].decode(errors="ignore"), ""
        elif not part[0].startswith("--"):
            yield "", part["sign"] or ""


def _after_remark(statement: str, at: int) -> int:
    """Where a remark ends that begins there; remarks hold remarks."""
    depth = 0
    for edge in _REMARK_EDGE.finditer(statement, at):
        depth += 1 if edge[0] == "/*" else -1
        if not depth:
            return edge.end()
    return len(statement)


def functions_in(text: str) -> Iterator[str]:
    """Names before a parenthesis in an expression as the server prints it, outside literals and quoted names."""
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

"""If the database refuses large turns for any reason, turns shrink until they pass, and no record is dead-lettered."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from tests.crash.sizes import WHOLE, Feed, worker

BYTES_MAX = 8_000
"""What one turn may write; the turns of the feed would have about eight times that."""
REFUSALS = {
    "out of memory": "RAISE EXCEPTION 'out of memory' USING ERRCODE = '53200'",
    "temp_file_limit": "RAISE EXCEPTION 'temporary file size exceeds temp_file_limit' USING ERRCODE = '53400'",
    "program limit": "RAISE EXCEPTION 'array size exceeds the maximum allowed' USING ERRCODE = '54000'",
    "value too large": "RAISE EXCEPTION 'invalid memory alloc request size 1073741824' USING ERRCODE = 'XX000'",
    "message too large": "RAISE EXCEPTION 'invalid message length' USING ERRCODE = '08P01'",
    "statement_timeout": "PERFORM pg_sleep(600)",
    "connection lost": "PERFORM pg_terminate_backend(pg_backend_pid())",
}
SHORT = ("out of memory", "program limit", "statement_timeout")
SETTINGS = {"bundle_records_max": 1_200, "turn_panes_max": 600, "statement_s": 1.0, "retry_s_max": 0.1}
REFUSE = """
    CREATE SEQUENCE mill.refusals;
    CREATE FUNCTION mill.refuse_large() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
    BEGIN
        IF (SELECT sum(bytes) FROM sent) > {bytes_max} THEN
            PERFORM nextval('mill.refusals');  -- no rollback takes that back
            {refusal};
        END IF;
        RETURN NULL;
    END $$;
    CREATE TRIGGER refuse_large AFTER INSERT ON mill.deltas REFERENCING NEW TABLE AS sent
    FOR EACH STATEMENT EXECUTE FUNCTION mill.refuse_large();
"""


@pytest.mark.parametrize("reason", REFUSALS if WHOLE else SHORT)
def test_turns_get_smaller_until_they_pass(tmp_path: Path, database_url: str, reason: str) -> None:
    # Both the input and the output of a turn are too large.
    feed = Feed(tmp_path / "feed.ndjson", keys=600).write()
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(REFUSE.format(bytes_max=BYTES_MAX, refusal=REFUSALS[reason]))
        with worker(feed, database_url, **SETTINGS) as one:
            one.await_finished(within_s=150)
        (refusals, called) = connection.execute("SELECT last_value, is_called FROM mill.refusals").fetchone() or (0, 0)
        (dead_letters,) = connection.execute("SELECT count(*) FROM mill.dead_letters").fetchone() or (None,)

    assert feed.faults(database_url) == []
    assert dead_letters == 0
    assert called, "nothing was refused"
    assert refusals < 60

"""Changes of a table: pgbench's updates, by logical decoding, through exactly-once windows, into a table.

    python -m benchmarks.cdc [--records 200000]

First a backlog of updates in transactions of 100, while no worker runs: `changes_per_s` is timed from the source's
claim, before it connects, to the commit of the last change. Then as many again while the worker reads: `live_lag_s` is
from the last commit of the load to ours. pgbench's table of history is the oracle: the windows of a branch must have as
many changes, and as much money, as a recount of it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import psycopg

from benchmarks.harness import Bench, Worker, arguments, wait_until
from benchmarks.w3_mqtt import RUN_S_MAX, injected

BRANCHES, ACCOUNTS = 10, 100_000
SCHEMA = """
CREATE TABLE public.pgbench_accounts (
    aid int PRIMARY KEY, bid int NOT NULL, abalance int NOT NULL, filler char(84) NOT NULL) WITH (fillfactor = 80);
CREATE TABLE public.pgbench_history (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, aid int, bid int, delta int, abalance bigint);
INSERT INTO public.pgbench_accounts SELECT aid, aid %% {branches}, 0, '' FROM generate_series(1, {accounts}) AS aid;
CREATE PROCEDURE public.load(transactions int) LANGUAGE plpgsql AS $$
BEGIN
    FOR one IN 1..transactions LOOP
        FOR each IN 1..100 LOOP
            WITH updated AS (
                UPDATE public.pgbench_accounts AS a SET abalance = a.abalance + d.delta
                  FROM (SELECT 1 + floor(random() * {accounts})::int AS aid, floor(random() * 9999)::int - 5000 AS delta
                        OFFSET 0) AS d
                 WHERE a.aid = d.aid RETURNING a.aid, a.bid, d.delta, a.abalance)
            INSERT INTO public.pgbench_history (aid, bid, delta, abalance) SELECT * FROM updated;
        END LOOP;
        COMMIT;
    END LOOP;
END $$;
""".replace("%%", "%")
RECOUNT = """
SELECT count(*) FROM (SELECT bid, count(*) AS n, sum(abalance) AS total FROM public.pgbench_history GROUP BY bid) AS h
  FULL JOIN (SELECT bid, sum(n) AS n, sum(total) AS total FROM cdc.by_branch GROUP BY bid) AS w USING (bid)
 WHERE h.n IS DISTINCT FROM w.n OR h.total IS DISTINCT FROM w.total
"""


def main(options: argparse.Namespace) -> None:
    with Bench("cdc", options) as bench:
        url = bench.database()
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(SCHEMA.format(branches=BRANCHES, accounts=ACCOUNTS))
            first = bench.worker("cdc.py", url)
            wait_until(lambda: first.running() and begun(connection), "the slot is there", timeout_s=RUN_S_MAX)
            first.drain()
            transactions = options.records // 100
            connection.execute("CALL public.load(%s)", [transactions])
            made = updates(connection)
            worker = bench.worker("cdc.py", url)
            worker.wait_claimed()
            until_injected(worker, url, made)
            drained_at = time.monotonic()
            connection.execute("CALL public.load(%s)", [transactions])
            ended_at = time.monotonic()
            live = updates(connection)
            until_injected(worker, url, live)
            lag_s = time.monotonic() - ended_at
            for _ in range(2):  # they close the windows before them, by the time of their commit
                time.sleep(1.5)
                connection.execute("UPDATE public.pgbench_accounts SET abalance = abalance WHERE aid = 1")
            until_injected(worker, url, live + 2)
            wait_until(lambda: windows(connection) >= live, "the windows are closed", timeout_s=RUN_S_MAX)
            worker.drain()
            report = worker.report
            connection.execute(
                "INSERT INTO public.pgbench_history (aid, bid, abalance) SELECT aid, bid, abalance"
                " FROM public.pgbench_accounts WHERE aid = 1 AND (SELECT sum(n) FROM cdc.by_branch) > %s",
                [live],
            )
            (wrong,) = connection.execute(RECOUNT).fetchone() or (-1,)
        bench.show("peak_rss_mb", report["peak_rss_mb"])
        bench.finish(
            changes_per_s=made / (drained_at - report["claimed_at"]),
            live_changes_per_s=(live - made) / (ended_at + lag_s - drained_at),
            live_lag_s=lag_s,
            differences=wrong,
        )


def begun(connection: psycopg.Connection[Any]) -> bool:
    """Tell whether a worker has committed where it begins."""
    query = "SELECT EXISTS (SELECT FROM mill.intervals WHERE bundle > 0 AND key_lo IS NULL)"
    return connection.execute(query).fetchone() == (True,)


def updates(connection: psycopg.Connection[Any]) -> int:
    """Return the number of updates so far."""
    return int((connection.execute("SELECT count(*) FROM public.pgbench_history").fetchone() or (0,))[0])


def windows(connection: psycopg.Connection[Any]) -> int:
    """Return the number of changes in closed windows."""
    return int((connection.execute("SELECT coalesce(sum(n), 0) FROM cdc.by_branch").fetchone() or (0,))[0])


def until_injected(worker: Worker, url: str, changes: int) -> None:
    """Wait until this number of changes is committed."""
    wait_until(
        lambda: worker.running() and injected(url) >= changes, "all is committed", timeout_s=RUN_S_MAX, every_s=0.1
    )


if __name__ == "__main__":
    main(arguments(__doc__, "differences<=0", records=200_000).parse_args())

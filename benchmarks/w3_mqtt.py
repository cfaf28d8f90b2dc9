"""W3: a backlog of 200,000 messages at the broker, through exactly-once windows, into a table.

    python -m benchmarks.w3_mqtt [--records 200000]

mosquitto holds the same messages for three persistent sessions: ours without dedupe ids, ours with them, and that of a
bare aiomqtt client which drains its queue in batches and does nothing (benchmarks/bare_client.py). Publishing is over
before any clock starts; they drain one after the other. Ours are timed from the source's claim, before it connects, to
the commit of the last record; the bare client from before it connects to its last message. `client_ratio` = our
records/s by the bare client's. Without dedupe ids a message that the broker delivers again counts again: only the
figures with them (`dedupe_…`) are exactly once through a reconnect.

Afterwards one more record closes the windows, and all are compared with a recomputation by DuckDB as in W1.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import psutil
import psycopg

from benchmarks.bundles import committed_bundles
from benchmarks.harness import Bench, Worker, arguments, wait_until
from benchmarks.publisher import Publisher
from benchmarks.readings import START_MS, write_readings
from benchmarks.traffic import result_of
from benchmarks.w1_windows import differences

DEVICES = 1_000
RUN_S_MAX = 600
AT_ONCE = 500
UNACKNOWLEDGED_MAX = 20_000
HOUR_MS = 3_600_000


def publish(port: int, payloads: list[bytes]) -> None:
    """Publish all payloads, and wait until the broker has acknowledged them."""
    publisher = Publisher("127.0.0.1", port)
    for start in range(0, len(payloads), AT_ONCE):
        publisher.publish(payloads[start : start + AT_ONCE])
        while publisher.sent - publisher.acknowledged > UNACKNOWLEDGED_MAX:
            time.sleep(0.001)
    publisher.drain()
    if publisher.acknowledged != len(payloads):
        raise SystemExit(f"the broker took {publisher.acknowledged} of {len(payloads)} messages")


def injected(url: str) -> int:
    """Return the number of records committed so far."""
    with psycopg.connect(url, autocommit=True) as connection:
        found = connection.execute("SELECT sum(injected) FROM millpy.accounting").fetchone()
    return int(found[0] or 0) if found else 0


def run_until(bench: Bench, url: str, port: int, records: int, *, dedupe: bool) -> Worker:
    """Run a worker from its start until it has committed a number of records."""
    environment = {"BENCH_PORT": str(port), "BENCH_DEDUPE": "1" if dedupe else ""}
    worker = bench.worker("mqtt_windows.py", url, environment=environment)
    worker.wait_claimed()
    wait_until(
        lambda: worker.running() and injected(url) >= records, "all is committed", timeout_s=RUN_S_MAX, every_s=0.1
    )
    worker.drain()
    return worker


def show_run(bench: Bench, what: str, url: str, seconds: float, worker: Worker) -> None:
    """Print one line about a drained backlog."""
    peak = worker.report["peak_rss_mb"]
    bench.show(what, {"seconds": seconds, **committed_bundles(url), "peak_rss_mb": peak})


def bare(bench: Bench, port: int, messages: int) -> dict[str, Any]:
    """Run the bare client; return its report."""
    return result_of(bench.child("benchmarks.bare_client", "--port", port, "--messages", messages), RUN_S_MAX)


def main(options: argparse.Namespace) -> None:
    with Bench("w3", options) as bench:
        broker = bench.broker()
        path: Path = bench.directory / "readings.ndjson"
        bench.show("bytes_per_record", write_readings(path, options.records, DEVICES, value="temperature"))
        urls = {dedupe: bench.database() for dedupe in (False, True)}
        for dedupe, url in urls.items():
            run_until(bench, url, broker.port, 0, dedupe=dedupe)
        bare(bench, broker.port, 0)
        publish(broker.port, path.read_bytes().splitlines())
        server = psutil.Process(broker.pid())
        spent = [sum(server.cpu_times()[:2])]
        seconds = {}
        for dedupe, url in urls.items():
            worker = run_until(bench, url, broker.port, options.records, dedupe=dedupe)
            seconds[dedupe] = worker.report["committed_at"] - worker.report["claimed_at"]
            spent.append(sum(server.cpu_times()[:2]))
            show_run(bench, "with dedupe" if dedupe else "ours", url, seconds[dedupe], worker)
        client = bare(bench, broker.port, options.records)
        spent.append(sum(server.cpu_times()[:2]))
        bench.show("bare_client", client)
        consumers = ("ours", "with dedupe", "bare_client")
        bench.show("broker_cpu_s", {name: spent[n + 1] - spent[n] for n, name in enumerate(consumers)})
        publish(broker.port, [json.dumps(CLOSING | {"event_ms": START_MS + options.records + HOUR_MS}).encode()])
        wrong = 0
        for dedupe, url in urls.items():
            run_until(bench, url, broker.port, options.records + 1, dedupe=dedupe)
            wrong += differences(url, path, table=f"{'w3_dedupe' if dedupe else 'w3'}.temperature_10s")
        bench.finish(
            records_per_s=options.records / seconds[False],
            client_ratio=client["seconds"] / seconds[False],
            dedupe_records_per_s=options.records / seconds[True],
            dedupe_client_ratio=client["seconds"] / seconds[True],
            bare_client_per_s=options.records / client["seconds"],
            differences=wrong,
        )


CLOSING = {"device": "last", "temperature": 0.0, "humidity": 0.0, "seq": -1}

if __name__ == "__main__":
    main(arguments(__doc__, "differences<=0", records=200_000).parse_args())

"""Publishes the messages of a `MessageLoad` at a steady rate, in its own process; prints the outcome as JSON."""

from __future__ import annotations

import argparse
import json
import time

from benchmarks.publisher import Publisher
from tests.crash.message_load import MessageLoad

PAUSE_S = 0.002
BURST = 500


def main() -> None:
    """Entry of the process."""
    options = argparse.ArgumentParser(prog="tests.crash.steady_publisher")
    for name in ("port", "rate", "count", "start-us", "step-us"):
        options.add_argument(f"--{name}", type=int, required=True)
    chosen = options.parse_args()
    load = MessageLoad(chosen.start_us, chosen.step_us)
    publisher = Publisher("127.0.0.1", chosen.port)
    started, done, behind_s = time.monotonic(), 0, 0.0
    while done < chosen.count:
        elapsed_s = time.monotonic() - started
        due = min(chosen.count, int(elapsed_s * chosen.rate) + 1, done + BURST)
        if due > done:
            behind_s = max(behind_s, elapsed_s - done / chosen.rate)
            publisher.publish([load.payload(seq) for seq in range(done, due)])
            done = due
        else:
            time.sleep(PAUSE_S)
    publisher.drain()
    figures = {"published": publisher.sent, "acknowledged": publisher.acknowledged, "behind_s_max": behind_s}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

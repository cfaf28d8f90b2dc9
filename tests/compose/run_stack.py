"""`make compose-test`: the whole stack in containers, under load, each part killed in turn; windows against an oracle.

Publishes READINGS readings in parts. In the middle of each of the first parts one container dies by SIGKILL and is
started again by the engine; the next part begins when all are well again. In the end every window in SQL must be what
the publisher's own list gives. The last line is JSON; the exit status is 0 only without a difference.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import psycopg

from millpy.embedded import free_port
from tests.compose.gateway import Gateway, Window
from tests.compose.stack import ROOT, Stack, StackError, missing

READINGS = 50_000
VICTIMS = ("worker", "injector", "mosquitto", "postgres")
PER_SECOND = 1_000.0
HEALTHY_S_MAX = 120.0
CLOSING_S_MAX = 180.0
PLACE = ROOT / ".millpy" / "compose-test"
GRAPH = Path(__file__).with_name("graph.py")
TABLE = "SELECT device, window_start, n, total, high FROM plant.per_device"
ACCOUNTS = "SELECT stream, consumer FROM millpy.accounting WHERE NOT balanced"
DEAD_AND_LATE = "SELECT count(*) FROM millpy.dead_letters UNION ALL SELECT count(*) FROM millpy.late_records"
SOURCE = "SELECT injected, duplicate FROM millpy.sources"


def main() -> int:
    """Run the whole test; return the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if lack := missing():
        print(f"compose-test: {lack}", file=sys.stderr)
        print("  hint: it needs a Docker engine with Compose v2", file=sys.stderr)
        return 2
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)
    stack = Stack(PLACE, {"MQTT_PORT": free_port(), "POSTGRES_PORT": free_port()}, GRAPH)
    started = time.monotonic()
    kills, differences = 0, -1
    try:
        stack.down()  # what an earlier run has left
        stack.up()
        say(f"the stack is up after {time.monotonic() - started:.0f} s")
        fleet = stack.url("fleet_mqtt_url")
        with closing(Gateway(stack.ports["MQTT_PORT"], fleet.username or "", fleet.password or "", seed=7)) as gateway:
            kills = load_and_kill(stack, gateway)
            differences = compare(stack, gateway)
    except StackError as error:
        print(f"compose-test: {error}", file=sys.stderr)
    finally:
        if differences != 0:
            print(f"what the containers said is in {stack.keep_logs()}", file=sys.stderr)
        stack.down()
        shutil.rmtree(stack.secrets, ignore_errors=True)
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({"readings": READINGS, "kills": kills, "differences": differences, "seconds": seconds}))
    return 0 if differences == 0 and kills == len(VICTIMS) else 1


def load_and_kill(stack: Stack, gateway: Gateway) -> int:
    """Publish everything; return how many containers were killed meanwhile."""
    part = READINGS // (len(VICTIMS) + 1)
    for victim in VICTIMS:
        publishing = threading.Thread(target=gateway.publish, args=(part, PER_SECOND), daemon=True)
        publishing.start()
        publishing.join(part / PER_SECOND / 2)
        struck = time.monotonic()
        name = stack.kill(victim)
        stack.wait(HEALTHY_S_MAX)
        say(f"SIGKILL of {name}: all healthy again after {time.monotonic() - struck:.1f} s")
        publishing.join()
    gateway.publish(READINGS - gateway.published, PER_SECOND)
    if not gateway.settle(CLOSING_S_MAX):
        raise StackError("the broker does not acknowledge everything")
    say(f"{gateway.published} readings published, {gateway.again} messages once more after lost connections")
    return len(VICTIMS)


def compare(stack: Stack, gateway: Gateway) -> int:
    """Wait for the last windows; return how many are wrong, and other faults."""
    with psycopg.connect(stack.database_url(), autocommit=True) as connection:
        deadline = time.monotonic() + CLOSING_S_MAX
        while (actual := windows(connection)) != gateway.expected and time.monotonic() < deadline:
            time.sleep(1)
        wrong = [
            f"{key[0]} {key[1]:%H:%M:%S}: in SQL {actual.get(key)}, published {gateway.expected.get(key)}"
            for key in sorted(actual.keys() | gateway.expected.keys())
            if actual.get(key) != gateway.expected.get(key)
        ]
        wrong += [f"the account of {stream} to {consumer} is open" for stream, consumer in connection.execute(ACCOUNTS)]
        dead, late = (count for (count,) in connection.execute(DEAD_AND_LATE))
        wrong += [f"{dead} dead letters and {late} late records"] if dead or late else []
        ((injected, duplicate),) = connection.execute(SOURCE).fetchall()
    for line in wrong[:20]:
        print(f"  DIFFERENT {line}")
    say(f"{len(actual)} windows; {injected} messages taken in, {duplicate} of them known already")
    return len(wrong)


def windows(connection: psycopg.Connection) -> dict[Window, tuple[int, int, int]]:
    """The result table."""
    return {
        (device, start): (int(n), int(total), int(high)) for device, start, n, total, high in connection.execute(TABLE)
    }


def say(text: str) -> None:
    """A line about what happens."""
    print(f"== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

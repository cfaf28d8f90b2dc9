"""Random SIGKILLs under a steady load: three workers, one broker, one PostgreSQL; are the results equal in the end?

    python -m tests.crash.long_run [--minutes 10] [--kills 200] [--rate 5000] [--workers 3] [--seed 1]

A worker that was killed is started again at once. A publisher of its own process sends `rate` messages a second with
QoS 1. The windows and the marks (a running count and sum by device, which depend on the order) are compared with
numpy's. The last line is one JSON object: cases, intervals_recovered (that committed again after a kill), kills (of
workers that owned one), idle_kills (of others), lost, doubled, changed, recovery_median_s, recovery_max_s, and
violations, records, minutes, rate, behind_s_max (of the publisher), lease_s. The exit status is 0 only when nothing is
lost, doubled, changed or violated. Recovery is counted from SIGKILL to the next commit of everything that was lost.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np

from millpy.hosting.failpoints import Failpoint
from tests.crash.cases.broker import Scene
from tests.crash.harness import LEASE_S, ROOT
from tests.crash.message_load import MessageLoad
from tests.crash.workload import START_US
from tests.crash.world import Case, Inputs, Verdict, World, play
from tests.databases import passing_server

SETTINGS = {"bundle_records_max": 20_000, "fold_every_s": 2, "epoch_s": 20, "progress_every_s": 0.1}
EVERY = 100
SETTLE_S = 3.0
FLOW_S_MAX = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status."""
    options = _options().parse_args(arguments)
    directory = Path(tempfile.mkdtemp(prefix="millpy-crash-long-"))
    figures: dict[str, float] = {}
    try:
        with passing_server(directory / "postgres") as server:
            case = Case("random SIGKILLs under load", "", partial(_run, options=options, figures=figures))
            verdict = play(case, directory / "case", server, Inputs(directory, expected=None))  # type: ignore[arg-type]
    finally:
        if not options.keep:
            shutil.rmtree(directory, ignore_errors=True)
    for fault in verdict.faults:
        print(fault)
    print(json.dumps(_summary(verdict, figures)), flush=True)
    return int(bool(verdict.faults))


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m tests.crash.long_run")
    options.add_argument("--minutes", type=float, default=10)
    options.add_argument("--kills", type=int, default=200)
    options.add_argument("--rate", type=int, default=5_000)
    options.add_argument("--workers", type=int, default=3)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--keep", action="store_true", help="leave logs and database behind")
    return options


def _run(world: World, options: argparse.Namespace, figures: dict[str, float]) -> None:
    rng = random.Random(options.seed)
    count = int(options.minutes * 60 * options.rate)
    load = MessageLoad(START_US, 1_000_000 // options.rate, EVERY)
    scene = Scene(world, load, saves=False, settings=SETTINGS)
    scene.environment["LOAD_INTERVALS"] = str(2 * options.workers)
    workers = [scene.start_worker() for _ in range(options.workers)]
    scene.await_listening()
    for worker in workers:
        worker.await_reached(Failpoint.AFTER_CLAIM, within_s=FLOW_S_MAX)
    publisher = _publisher(world, scene, load, options.rate, count)
    started = time.monotonic()
    moments = sorted(rng.uniform(SETTLE_S, options.minutes * 60 - SETTLE_S) for _ in range(options.kills))
    recoveries: list[Future[float]] = []
    for number, moment in enumerate(moments, 1):
        time.sleep(max(0.0, started + moment - time.monotonic()))
        place = rng.randrange(len(workers))
        recovery = world.kill(workers[place])
        workers[place] = scene.start_worker()
        recoveries.append(recovery.wait_aside())
        if number % 10 == 0:
            known = [r.result() for r in recoveries if r.done() and r.exception() is None]
            print(
                f"{number} kills in {time.monotonic() - started:.0f} s; recovery median {_median(known)} s", flush=True
            )
    out, _ = publisher.communicate(timeout=options.minutes * 60 + 120)
    sent = json.loads(out.splitlines()[-1])
    assert sent["acknowledged"] == sent["published"] == count, sent
    figures.update(
        records=count, minutes=options.minutes, rate=options.rate, behind_s_max=round(sent["behind_s_max"], 2)
    )
    for recovered in recoveries:
        recovered.result()
    scene.finish(np.arange(count))


def _publisher(world: World, scene: Scene, load: MessageLoad, rate: int, count: int) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.crash.steady_publisher",
        "--port",
        scene.broker.port,
        "--rate",
        rate,
        "--count",
        count,
    ]
    command += ["--start-us", load.start_us, "--step-us", load.step_us]
    process = subprocess.Popen([str(word) for word in command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    world.stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def _median(seconds: Sequence[float]) -> float | None:
    return round(statistics.median(seconds), 3) if seconds else None


def _summary(verdict: Verdict, figures: dict[str, float]) -> dict[str, float | None]:
    recoveries = verdict.recoveries_s
    kinds = ("lost", "doubled", "changed")
    return {
        "cases": 1,
        "intervals_recovered": sum(verdict.recovered),
        "kills": verdict.kills,
        "idle_kills": verdict.idle_kills,
        **{kind: verdict.count(kind) for kind in kinds},
        "recovery_median_s": _median(recoveries),
        "recovery_max_s": round(max(recoveries), 3) if recoveries else None,
        "violations": verdict.count("violation"),
        **figures,
        "lease_s": LEASE_S,
    }


if __name__ == "__main__":
    sys.exit(main())

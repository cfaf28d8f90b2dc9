"""The worker processes of one run, in numbered slots: start, kill, freeze, thaw, replace.

Each process is on a leash: it drains when this process ends, however that happens.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from millpy.clock import Clock
from millpy.config.secrets import FILE
from millpy.config.settings import DATABASE_URL

END_S_MAX = 20
LAST_LINES = 3


@dataclass(slots=True)
class ProcessRecord:
    """One process from its start to its end.

    Attributes:
        ended: monotonic seconds; None while it lives.
        how: "killed", "finished", "failed", "stopped", or empty while it lives.
        frozen: the spans (from, to) in which it was frozen, in monotonic seconds.
    """

    slot: int
    pid: int
    started: float
    ended: float | None = None
    how: str = ""
    frozen: list[tuple[float, float]] = field(default_factory=list)


class WorkerProcesses:
    """The workers of one run.

    Args:
        command: the command line of a worker.
        urls: the URL of the database for each slot.
        environment: variables in addition to those of this process.
        logs: the directory of the log files, one a slot.
    """

    def __init__(
        self, command: Sequence[str], urls: Sequence[str], environment: Mapping[str, str], logs: Path, clock: Clock
    ) -> None:
        self._command = [sys.executable, "-m", *command]
        self._urls = urls
        # A worker gets a complete URL; a variable of this process would contradict it.
        ours = {name: value for name, value in os.environ.items() if name != DATABASE_URL + FILE}
        self._environment = {**ours, **environment}
        self._logs = logs
        self._clock = clock
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._frozen: dict[int, float] = {}
        self.records: list[ProcessRecord] = []

    @property
    def slots(self) -> range:
        """The numbers of the workers."""
        return range(len(self._urls))

    def start(self, slot: int) -> None:
        """Start a worker in an empty slot."""
        environment = {**self._environment, DATABASE_URL: self._urls[slot]}
        if slot in self._processes:
            self._drop_leash(slot)
        with self.log_file(slot).open("ab") as log:
            process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self._processes[slot] = process
        self.records.append(ProcessRecord(slot, process.pid, self._clock.monotonic()))

    def log_file(self, slot: int) -> Path:
        """Return the log file of a slot."""
        return self._logs / f"worker-{slot}.log"

    def last_output(self, slot: int) -> str:
        """Return the last lines of a slot's log, joined into one."""
        lines = self.log_file(slot).read_text(errors="replace").strip().splitlines()
        return " | ".join(line.strip() for line in lines[-LAST_LINES:])

    def record(self, slot: int) -> ProcessRecord:
        """Return the present or last process of a slot."""
        return next(record for record in reversed(self.records) if record.slot == slot)

    def alive(self) -> list[int]:
        """Return the slots whose process runs."""
        self._notice()
        return [slot for slot, process in sorted(self._processes.items()) if process.poll() is None]

    def failed(self) -> dict[int, int]:
        """Return slot -> exit status of the processes that ended by themselves with an error."""
        self._notice()
        codes = {slot: process.poll() or 0 for slot, process in sorted(self._processes.items())}
        return {slot: code for slot, code in codes.items() if code > 0}

    def finished(self) -> bool:
        """Tell whether every process that was not killed has ended in good order, and at least one has."""
        self._notice()
        codes = [process.poll() for process in self._processes.values()]
        return None not in codes and 0 in codes

    def kill(self, slot: int) -> None:
        """Kill a worker by SIGKILL."""
        process = self._processes[slot]
        process.kill()
        process.wait()
        self._notice()

    def freeze(self, slot: int) -> None:
        """Freeze a worker by SIGSTOP."""
        self._processes[slot].send_signal(signal.SIGSTOP)
        self._frozen[slot] = self._clock.monotonic()

    def thaw(self, slot: int) -> None:
        """Continue a frozen worker by SIGCONT."""
        since = self._frozen.pop(slot, None)
        if since is not None:
            self._processes[slot].send_signal(signal.SIGCONT)
            self.record(slot).frozen.append((since, self._clock.monotonic()))

    def stop(self) -> None:
        """End all workers: drain them, and kill those that do not end."""
        for slot in list(self._frozen):
            self.thaw(slot)
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        for slot, process in self._processes.items():
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S_MAX)
            if process.poll() is None:
                process.kill()
                process.wait()
            self._drop_leash(slot)
        self._notice()

    def _drop_leash(self, slot: int) -> None:
        leash = self._processes[slot].stdin
        assert leash is not None
        leash.close()

    def _notice(self) -> None:
        now = self._clock.monotonic()
        for slot, process in self._processes.items():
            record, code = self.record(slot), process.poll()
            if code is None or record.ended is not None:
                continue
            record.ended = now
            if code == -signal.SIGKILL:
                record.how = "killed"
            elif code < 0:
                record.how = "stopped"
            else:
                record.how = "finished" if code == 0 else "failed"

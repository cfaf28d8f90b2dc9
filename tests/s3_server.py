"""A real S3 server for tests: moto, as a process that keeps its objects in memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from uuid import uuid4

import pyarrow as pa

from millpy.embedded import free_port
from millpy.store.archive.storage import storage_at

START_S_MAX = 60
KEY, SECRET = "AKIAPLANT", "hunter2-tOp/S3"
PROGRAM = "import sys; from moto.server import main; main(['-H', '127.0.0.1', '-p', sys.argv[1]])"


class S3Server:
    """An S3 server on a free port; a context manager."""

    def __init__(self) -> None:
        self.port = free_port()
        self.environment = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_REGION": "us-east-1",
        }

    def __enter__(self) -> S3Server:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # it logs each request
        command = [sys.executable, "-c", PROGRAM, str(self.port)]
        self._process = subprocess.Popen(command, env=os.environ | self.environment, **quiet)  # type: ignore[call-overload]
        deadline = time.monotonic() + START_S_MAX
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                status = self._process.wait()
                raise AssertionError(f"the S3 server does not answer; is moto installed? exit status {status}")
            time.sleep(0.05)
        return self

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except OSError:
            return False
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def new_bucket(self) -> str:
        """Make a bucket; return its URL."""
        from s3fs import S3FileSystem  # imported here: few tests need it, and all load this module

        name = f"archives-{uuid4().hex[:12]}"
        server = {"endpoint_url": self.environment["AWS_ENDPOINT_URL"], "key": KEY, "secret": SECRET}
        S3FileSystem(**server, skip_instance_cache=True).mkdir(name)
        return f"s3://{name}"

    def upload(self, directory: Path) -> str:
        """Copy a directory into a new bucket; return its URL."""
        storage = storage_at(self.new_bucket())
        for path in storage_at(directory).list_files(""):
            storage.create(path, pa.py_buffer((directory / path).read_bytes()))
        return storage.full_name("")

    def freeze(self) -> None:
        """Let the server answer no more."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let the server answer again, also what was asked meanwhile."""
        self._process.send_signal(signal.SIGCONT)

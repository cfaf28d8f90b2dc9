"""Three Kafka nodes, each broker and controller: what leads can move when a node dies, freezes and comes back.

Topics, transactions and groups have a replica on each node, and writes need two. See `kafka_server.py` for where the
programs come from.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Self

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import CoordinationType
from aiokafka.errors import KafkaError

from millpy.embedded import free_port
from tests.kafka_server import SETTINGS, START_S_MAX, KafkaServer, NoKafkaError, jars
from tests.kafka_topics import admin_of

NODES = (1, 2, 3)
REPLICATED = {
    "offsets.topic.replication.factor": "3",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.num.partitions": "4",
    "transaction.state.log.min.isr": "2",
    "min.insync.replicas": "2",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
    "replica.lag.time.max.ms": "3000",
    "request.timeout.ms": "5000",  # how long a coordinator waits for a frozen leader before it asks the next one
    "controller.quorum.election.timeout.ms": "500",
    "controller.quorum.fetch.timeout.ms": "1000",
}
CLUSTER_ID = "AAAAAAAAQACAAAAAAAAAAQ"
JAVA = ("java", "-XX:TieredStopAtLevel=1", "-Xmx256m")


class KafkaCluster:
    """Three nodes in a directory, whose addresses stay the same.

    Attributes:
        address: those of all nodes.
        addresses: that of each node.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.addresses = {node: f"127.0.0.1:{free_port()}" for node in NODES}
        self.address = ",".join(self.addresses.values())
        self._controllers = {node: f"127.0.0.1:{free_port()}" for node in NODES}

    def __enter__(self) -> Self:
        """Start the nodes. Raises NoKafkaError."""
        if not shutil.which("java"):
            raise NoKafkaError("there is no java")
        try:
            jars()
        except NoKafkaError:
            single = KafkaServer(self._directory / "single", quick=True)  # the tool gets the programs for it
            single.start()
            single.kill()
        try:
            formatting = [self._format(node) for node in NODES]
            for process in formatting:
                if process.wait(START_S_MAX):
                    raise NoKafkaError("the directory of a node cannot be made")
            for node in NODES:
                self.start(node)
            self.await_whole()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _properties(self, node: int) -> Path:
        return self._directory / f"{node}.properties"

    def _format(self, node: int) -> subprocess.Popen[bytes]:
        self._directory.mkdir(parents=True, exist_ok=True)
        settings = SETTINGS | REPLICATED
        settings |= {
            "node.id": str(node),
            "log.dirs": str(self._directory / str(node)),
            "listeners": f"PLAINTEXT://{self.addresses[node]},CONTROLLER://{self._controllers[node]}",
            "advertised.listeners": f"PLAINTEXT://{self.addresses[node]}",
            "controller.quorum.voters": ",".join(f"{other}@{at}" for other, at in self._controllers.items()),
        }
        self._properties(node).write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        words = ["kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", str(self._properties(node))]
        return self._java(node, *words)

    def _java(self, node: int, *words: str) -> subprocess.Popen[bytes]:
        with (self._directory / f"{node}.log").open("ab") as log:
            command = [*JAVA, "-cp", f"{jars()}/*", *words]
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def start(self, node: int) -> None:
        """Start a node, again or for the first time; `await_whole` waits for it."""
        self._processes[node] = self._java(node, "kafka.Kafka", str(self._properties(node)))

    def kill(self, node: int) -> None:
        """SIGKILL: a crash."""
        self._processes[node].kill()
        self._processes[node].wait()

    def freeze(self, node: int) -> None:
        """SIGSTOP: it accepts connections and does not answer."""
        self._processes[node].send_signal(signal.SIGSTOP)

    def thaw(self, node: int) -> None:
        """SIGCONT."""
        self._processes[node].send_signal(signal.SIGCONT)

    def await_whole(self, topics: Sequence[str] = ()) -> None:
        """Wait until each node has registered, and each partition of the topics has a replica in sync on each node."""
        asyncio.run(self._await_whole(topics))

    async def _await_whole(self, topics: Sequence[str]) -> None:
        deadline = time.monotonic() + START_S_MAX
        while True:
            for node, process in self._processes.items():
                if process.poll() is not None:
                    raise NoKafkaError((self._directory / f"{node}.log").read_text()[-500:])
            try:
                async with admin_of(self.address) as admin:
                    nodes = {broker["node_id"] for broker in (await admin.describe_cluster())["brokers"]}
                    found = await admin.describe_topics(list(topics))
                    parts = [part for topic in found for part in topic["partitions"]]
                if nodes == set(NODES) and all(len(part["isr"]) == len(NODES) for part in parts):
                    return
            except (KafkaError, OSError, TimeoutError):
                if time.monotonic() > deadline:
                    raise
            assert time.monotonic() < deadline, f"the cluster is not whole: {nodes}, {parts}"
            await asyncio.sleep(0.1)

    def leader(self, topic: str, partition: int = 0) -> int:
        """Return the node that leads a partition."""

        async def ask(admin: AIOKafkaAdminClient) -> int:
            (found,) = await admin.describe_topics([topic])
            return next(int(part["leader"]) for part in found["partitions"] if part["partition"] == partition)

        return asyncio.run(self._ask(ask))

    def coordinator(self, of: CoordinationType, key: str) -> int:
        """Return the node that coordinates a transactional id or a group."""

        async def ask(admin: AIOKafkaAdminClient) -> int:
            return int(await admin._client.coordinator_lookup(of, key))

        return asyncio.run(self._ask(ask))

    def group(self) -> str:
        """Return one of the groups in which sinks of ours store their positions; its transactional id has the name."""

        async def ask() -> str:
            async with admin_of(self.address) as admin:
                return min(group for group, *_ in await admin.list_consumer_groups() if group.startswith("millpy."))

        return asyncio.run(ask())

    async def _ask(self, ask: Callable[[AIOKafkaAdminClient], Awaitable[int]]) -> int:
        """Ask until there is a node, because one is being elected."""
        async with asyncio.timeout(START_S_MAX):
            while True:
                try:
                    async with admin_of(self.address) as admin:
                        if (node := await ask(admin)) in NODES:
                            return node
                except (KafkaError, OSError):
                    pass
                await asyncio.sleep(0.1)

"""Injectors against a real broker: how tests make them, feed them and wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiomqtt

from millpy.clock import SystemClock
from millpy.embedded import EmbeddedBroker
from millpy.ingest.protocol import SourceBatch, SourceSetup
from millpy.limits import Limits
from millpy.sources.mqtt.injector import MqttInjector
from millpy.sources.mqtt.source import Mqtt


class SettledBroker(EmbeddedBroker):
    """mosquitto with further lines in its configuration."""

    def __init__(self, directory: Path, lines: Sequence[str], *, anonymous: bool = True) -> None:
        super().__init__(directory)
        self._lines = list(lines)
        self._anonymous = anonymous

    def _command(self) -> list[str]:
        command = super()._command()
        configuration = Path(command[-1])
        text = configuration.read_text() + "".join(line + "\n" for line in self._lines)
        if not self._anonymous:
            text = text.replace("allow_anonymous true", "allow_anonymous false")
        configuration.write_text(text)
        return command


def an_injector(
    port: int | None,
    *,
    filter: str = "sensors/#",
    trusted: Callable[[], bool] = lambda: True,
    limits: Limits | None = None,
    host: str | None = "127.0.0.1",
    secret: str = "",
    deduplicated: bool = False,
    notes: Mapping[str, bytes] | None = None,
    **how: Any,
) -> MqttInjector:
    setup = SourceSetup(
        graph="g", stream="s", partition=filter, limits=limits or Limits(), clock=SystemClock(), ready=asyncio.Event(),
        trusted=trusted, secret=secret, deduplicated=deduplicated, notes=notes or {},
    )  # fmt: skip
    return Mqtt(filter, host=host, port=port, **how).connect(setup)


async def publish(
    port: int, payloads: Sequence[bytes], topic: str = "sensors/a", *, client: dict[str, Any] | None = None, **how: Any
) -> None:
    async with aiomqtt.Client("127.0.0.1", port, **(client or {})) as publisher:
        for payload in payloads:
            await publisher.publish(topic, payload, qos=1, **how)


async def take(injector: MqttInjector) -> SourceBatch:
    async with asyncio.timeout(60):
        while (taken := await injector.take()) is None:
            injector._setup.ready.clear()
            await injector._setup.ready.wait()
        return taken


async def take_payloads(injector: MqttInjector, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        found += (await take(injector)).payloads
    return found


async def until(injector: MqttInjector, claim: Callable[[], bool]) -> None:
    """Wait for a claim that changes only when the injector wakes us."""
    async with asyncio.timeout(60):
        while not claim():
            await injector._setup.ready.wait()
            injector._setup.ready.clear()


async def until_quiet(injector: MqttInjector) -> None:
    async with asyncio.timeout(60):
        while not injector.quiet():
            taken = await injector.take()
            assert taken is None, taken.payloads[:3]
            if not injector.quiet():
                await injector._setup.ready.wait()
                injector._setup.ready.clear()

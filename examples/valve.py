"""The actuator of `valves.py`: moves each valve once for each command, however often a command arrives.

MILLPY_MQTT_URL=mqtt://localhost:1883 python examples/valve.py positions.json

For each valve it stores the newest command that it has carried out. The commands of a valve have ascending numbers, so
one that is not newer was carried out before. They are retained: when it comes back, it gets the newest one of each
valve, which is all that matters to a valve.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

import aiomqtt


def is_news(done: dict[str, str], topic: str, identity: str) -> bool:
    """Tell whether a command is newer than the last one of its valve; note it."""
    interval, _, number = identity.rpartition("/")
    known, _, newest = done.get(topic, "").rpartition("/")
    if interval == known and int(number) <= int(newest):
        return False
    done[topic] = identity
    return True


async def obey(host: str, port: int, file: Path) -> None:
    """Carry out commands for ever."""
    done: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    async with aiomqtt.Client(host, port, protocol=aiomqtt.ProtocolVersion.V5) as client:
        await client.subscribe("valves/+", qos=1)
        print("ready", flush=True)
        async for message in client.messages:
            topic, identity = message.topic.value, dict(message.properties.UserProperty)["millpy-id"]
            if is_news(done, topic, identity):
                command = json.loads(message.payload)
                print(topic, "opens" if command["open"] else "closes", flush=True)  # here it moves the valve
                file.with_suffix(".new").write_text(json.dumps(done))
                file.with_suffix(".new").replace(file)


if __name__ == "__main__":
    url = urlsplit(os.environ.get("MILLPY_MQTT_URL", "mqtt://localhost:1883"))
    asyncio.run(obey(url.hostname or "localhost", url.port or 1883, Path(sys.argv[1])))

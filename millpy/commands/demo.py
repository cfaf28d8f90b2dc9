"""`millpy demo`: the demonstration of `examples/`, which the wheel brings along."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from millpy.commands.common import JsonOption, worded
from millpy.embedded import mosquitto_program
from millpy.errors import ConfigError
from millpy.extras import to_install

PLACE = Path(".millpy") / "demo"


@worded
def demo(as_json: JsonOption = False) -> int:
    """Show it all in two minutes: a fleet over MQTT, two workers, one of them killed, every window compared.

    Writes to .millpy/demo. Ends with 0 only when every window equals its recomputation.
    """
    if find_spec("aiomqtt") is None:
        raise ConfigError("the demonstration needs the package aiomqtt", hint=to_install("mqtt", "embedded"))
    if mosquitto_program() is None and find_spec("amqtt") is None:
        raise ConfigError("no MQTT broker to embed", hint=f"install mosquitto, or {to_install('embedded')}")
    PLACE.mkdir(parents=True, exist_ok=True)  # where nothing can be written, that is said in words here
    environment = {**os.environ, "MILLPY_DEMO_PLACE": str(PLACE.absolute())}
    command = [sys.executable, "-m", "examples.demo", *(["--json"] if as_json else [])]
    return subprocess.run(command, cwd=examples().parent, env=environment, check=False).returncode


def examples() -> Path:
    """The folder `examples`, of the wheel or of the source tree."""
    package = Path(__file__).resolve().parents[1]
    return next(folder for root in (package / "_source", package.parent) if (folder := root / "examples").is_dir())

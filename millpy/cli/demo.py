"""`millpy demo`: run the demonstration in `examples/`, which the wheel contains."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from millpy.cli.options import JsonOption, handle_errors
from millpy.config.extras import to_install
from millpy.embedded import mosquitto_program
from millpy.errors import ConfigError

PLACE = Path(".millpy") / "demo"


@handle_errors
def demo(as_json: JsonOption = False) -> int:
    """Run a three-minute demonstration: MQTT devices, two workers of which one is killed, a check of every window.

    Writes to .millpy/demo. Exit status: 0 only if every window equals its recomputation from the records.
    """
    if find_spec("aiomqtt") is None:
        raise ConfigError("the demonstration needs the package aiomqtt", hint=to_install("mqtt", "embedded"))
    if mosquitto_program() is None and find_spec("amqtt") is None:
        raise ConfigError("there is no MQTT broker to start", hint=f"install mosquitto, or {to_install('embedded')}")
    PLACE.mkdir(parents=True, exist_ok=True)  # a directory that cannot be written fails here, with a clear error
    environment = {**os.environ, "MILLPY_DEMO_PLACE": str(PLACE.absolute())}
    command = [sys.executable, "-m", "examples.demo", *(["--json"] if as_json else [])]
    return subprocess.run(command, cwd=examples().parent, env=environment, check=False).returncode


def examples() -> Path:
    """Return the folder `examples` of the wheel or of the source tree."""
    package = Path(__file__).resolve().parents[1]
    return next(folder for root in (package / "_source", package.parent) if (folder := root / "examples").is_dir())

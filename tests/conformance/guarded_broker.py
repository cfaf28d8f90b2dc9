"""mosquitto with the logins and rights of compose/: `millpy` reads, `fleet` (devices) writes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conformance.mqtt_subject import SettledBroker

PASSWORD = "geheim"
START = Path(__file__).resolve().parents[2] / "compose" / "mosquitto" / "start.sh"


def rights() -> str:
    """The ACL that start.sh writes."""
    (text,) = re.findall(r"<<RIGHTS\n(.*?)^RIGHTS$", START.read_text(), re.DOTALL | re.MULTILINE)
    named = text.replace("$(user mqtt_url)", "millpy").replace("$(user fleet_mqtt_url)", "fleet")
    return named.replace("\\$", "$")


class GuardedBroker(SettledBroker):
    """Requires a password, the same for both users."""

    def __init__(self, directory: Path) -> None:
        files = directory.with_name(directory.name + "-files")
        super().__init__(
            directory, [f"password_file {files / 'passwords'}", f"acl_file {files / 'acl'}"], anonymous=False
        )
        tool = shutil.which("mosquitto_passwd")
        if tool is None:
            pytest.skip("mosquitto_passwd is not installed")
        files.mkdir()
        (files / "acl").write_text(rights())
        (files / "passwords").touch()
        for user in ("millpy", "fleet"):
            subprocess.run([tool, "-b", str(files / "passwords"), user, PASSWORD], check=True, capture_output=True)
        for path in (files, *files.iterdir()):
            path.chmod(0o755 if path == files else 0o644)

"""The systemd unit in compose/systemd: no secrets, time to drain, and no restart that does not help."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from millpy.limits import Limits
from millpy.process.exit import EXIT_CORRUPT, EXIT_USAGE
from millpy.process.supervisor import STOP_MARGIN_S

UNIT = Path(__file__).resolve().parents[2] / "compose" / "systemd" / "millpy@.service"


def settings() -> dict[str, dict[str, str]]:
    """Return the sections of the unit, whose settings have each one line."""
    sections: dict[str, dict[str, str]] = {}
    for line in UNIT.read_text().splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            assert equals, line
            assert name not in section, line
            section[name] = value
    return sections


def test_unit_has_time_to_drain_and_restarts_only_what_a_restart_helps() -> None:
    service = settings()["Service"]

    assert float(service["TimeoutStopSec"]) > Limits().drain_grace_s + STOP_MARGIN_S
    assert service["KillMode"] == "mixed"
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"].split() == [str(EXIT_USAGE), str(EXIT_CORRUPT)]
    assert settings()["Unit"]["StartLimitIntervalSec"] == "0"


def test_workers_answer_for_health_and_metrics_where_the_environment_says_so() -> None:
    service = settings()["Service"]

    assert service["ExecStart"].endswith(" --workers ${WORKERS} --http ${HTTP}")
    assert {"WORKERS=2", "HTTP="} <= set(service["Environment"].split())  # no address, which serves nothing


def test_secrets_come_from_a_file() -> None:
    service = settings()["Service"]

    assert service["EnvironmentFile"] == "/etc/millpy/%i.env"
    assert "URL" not in service["Environment"]
    assert "PASSWORD" not in service["Environment"]


def test_unit_is_confined_to_its_state_directory() -> None:
    service = settings()["Service"]

    assert (service["DynamicUser"], service["ProtectSystem"], service["NoNewPrivileges"]) == ("yes", "strict", "yes")
    assert service["WorkingDirectory"] == f"/var/lib/{service['StateDirectory']}"
    assert service["CapabilityBoundingSet"] == ""


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_knows_every_setting(tmp_path: Path) -> None:
    unit = tmp_path / "millpy@plant.service"
    unit.write_text(UNIT.read_text().replace("/opt/millpy/bin/millpy", sys.executable))  # a program that exists

    command = ["systemd-analyze", "verify", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)

    assert (done.returncode, done.stderr) == (0, "")

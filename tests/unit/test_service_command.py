"""`millpy service`: units that systemd accepts, settings that only their owner reads, no file of others replaced."""

from __future__ import annotations

import json
import os
import pwd
import shlex
import shutil
import stat
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from millpy.cli.service_files import FILES, source
from millpy.errors import UsageError
from millpy.limits import Limits
from millpy.process.exit import EXIT_CORRUPT, EXIT_USAGE
from millpy.process.supervisor import STOP_MARGIN_S
from millpy.process.systemd import Service, environment_text, quoted, verify
from tests.commands import millpy, run_millpy

URL = "postgresql://plant:p'a$s%40@db/plant"
AWKWARD = Path('/srv/mill py/50% of $HOME "now"')
PLANT = Service("plant", Path("/srv/plant.py"), [sys.executable, "-m", "millpy"], 3, "127.0.0.1:8080", False, "", 10.0)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MILLPY_DATABASE_URL", URL)
    (tmp_path / "plant.py").write_text("")
    return tmp_path


def settings_of(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))


def test_unit_drains_and_restarts_only_what_a_restart_helps() -> None:
    found = settings_of(PLANT.text())

    assert float(found["TimeoutStopSec"]) > Limits().drain_grace_s + STOP_MARGIN_S
    assert (found["KillMode"], found["Restart"]) == ("mixed", "on-failure")
    assert found["RestartPreventExitStatus"].split() == [str(EXIT_USAGE), str(EXIT_CORRUPT)]
    assert (found["DynamicUser"], found["ProtectSystem"], found["NoNewPrivileges"]) == ("yes", "strict", "yes")
    assert found["ExecStart"].endswith("run /srv/plant.py --workers 3 --http 127.0.0.1:8080")
    assert "User=me" in replace(PLANT, run_as="me").text()
    own = replace(PLANT, user=True).text()
    assert "DynamicUser" not in own
    assert "WantedBy=default.target" in own


def test_an_interpreter_at_home_is_visible_through_a_link(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.symlink_to("/home/vera/.pyenv/versions/3.12.1/bin/python3")

    assert settings_of(replace(PLANT, program=[str(python)]).text())["ProtectHome"] == "read-only"
    assert settings_of(replace(PLANT, program=["/usr/bin/env"]).text())["ProtectHome"] == "yes"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_units_and_finds_what_is_wrong() -> None:
    awkward = replace(PLANT, graph=AWKWARD / "plant.py")

    assert verify(awkward) == ""
    assert "/nowhere/python" in verify(replace(PLANT, program=["/nowhere/python"]))


def test_words_of_a_command_stand_for_themselves() -> None:
    assert quoted("/opt/millpy") == "/opt/millpy"
    assert quoted(str(AWKWARD)) == '"/srv/mill py/50%% of $$HOME \\"now\\""'


def read(environment: Path) -> dict[str, str]:
    """Read a file of settings as a shell does, whose rules for quotes are those of systemd."""
    command = ["sh", "-c", f"set -a; . {shlex.quote(str(environment))}; env -0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={})
    return dict(part.split("=", 1) for part in done.stdout.split("\0") if part.startswith("MILLPY_"))


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    given = {"MILLPY_DATABASE_URL": URL, "MILLPY_LOG_LEVEL": "debug", "MILLPY_X": "a'b\\c`d\"$e  "}
    (tmp_path / "env").write_text(environment_text(given))

    assert read(tmp_path / "env") == given
    with pytest.raises(UsageError, match="several lines"):
        environment_text({"MILLPY_X": "a\nMILLPY_Y=b"})


def test_two_services_cannot_have_one_address(home: Path) -> None:
    install = ["service", "install", str(home / "plant.py"), "--user"]
    millpy(*install)
    millpy(*install, "--workers", "3")

    status, error = run_millpy(*install, "--name", "other")
    assert status == 2
    assert "millpy-plant.service has the address 127.0.0.1:8080, too" in error
    assert "--http" in error
    millpy(*install, "--name", "other", "--http", "127.0.0.1:8081")
    millpy(*install, "--name", "silent", "--http", "")
    millpy(*install, "--name", "mute", "--http", "")


@pytest.mark.parametrize("name", ["", "a b", "../x", "-x", "x" * 65])
def test_name_that_systemd_would_not_take_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a service"):
        replace(PLANT, name=name)


def test_install_writes_unit_and_settings_once_and_uninstall_keeps_the_settings(home: Path) -> None:
    unit = home / "config/systemd/user/millpy-plant.service"
    environment = home / "config/millpy/plant.env"
    install = ["service", "install", str(home / "plant.py"), "--user"]

    assert "ExecStart=" in millpy(*install, "--dry-run")
    assert not (home / "config").exists()
    found = json.loads(millpy(*install, "--json"))
    assert (found["unit"], found["environment"], found["written"]) == (str(unit), str(environment), True)
    assert URL not in unit.read_text()
    assert stat.S_IMODE(environment.stat().st_mode) == 0o600
    assert read(environment)["MILLPY_DATABASE_URL"] == URL

    environment.write_text("MILLPY_LOG_LEVEL=debug\n")
    assert "kept" in millpy(*install, "--workers", "5")
    assert "--workers 5" in unit.read_text()
    assert environment.read_text() == "MILLPY_LOG_LEVEL=debug\n"
    if shutil.which("systemctl") is None:
        assert "deleted" in millpy("service", "uninstall", "plant", "--user")
        assert not unit.exists()
    assert environment.exists()


def test_unit_of_somebody_else_stays(home: Path) -> None:
    unit = home / "config/systemd/user/millpy-plant.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Unit]\n")

    for words in (["install", str(home / "plant.py")], ["uninstall", "plant"]):
        status, output = run_millpy("service", *words, "--user")
        assert (status, "was not written by millpy" in output) == (2, True)
    assert unit.read_text() == "[Unit]\n"


def test_system_service_without_a_database_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILLPY_DATABASE_URL")
    monkeypatch.setattr("millpy.process.systemd.HIDDEN", ())

    status, output = run_millpy("service", "install", str(home / "plant.py"), "--dry-run", "--name", "nobody-has-this")

    assert status == 2
    assert "a system service needs a PostgreSQL of yours" in output


def test_system_service_runs_as_the_owner_of_the_graph_unless_that_is_root(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millpy.process.systemd.HIDDEN", ())
    file = home / "plant.py"
    install = ["service", "install", str(file), "--dry-run", "--name", "nobody-has-this"]
    mine = file.stat().st_uid

    found = settings_of(millpy(*install))
    assert (found.get("User"), found.get("DynamicUser")) == (
        (pwd.getpwuid(mine).pw_name, None) if mine else (None, "yes")
    )
    assert "User=root" in millpy(*install, "--run-as", "root")
    if mine == 0:
        os.chown(file, pwd.getpwnam("nobody").pw_uid, -1)
        assert "User=nobody" in millpy(*install)


def test_files_of_a_service_are_written_and_none_of_somebody_else_is_replaced(tmp_path: Path) -> None:
    place = tmp_path / "kit"

    written = json.loads(millpy("service", "files", str(place), "--json"))["files"]
    assert {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()} == set(written)
    assert "groups:" in (place / "alerts.yaml").read_text()
    assert "wrote" in millpy("service", "files", str(place))  # they are the same
    (place / "kubernetes/worker.yaml").write_text("mine")
    status, output = run_millpy("service", "files", str(place))
    assert (status, "kubernetes/worker.yaml differs" in output) == (2, True)
    assert (place / "kubernetes/worker.yaml").read_text() == "mine"


def test_files_of_a_service_need_a_directory_that_can_be_written(tmp_path: Path) -> None:
    place = tmp_path / "a file"
    place.touch()

    status, output = run_millpy("service", "files", str(place))

    assert status == EXIT_USAGE
    assert f"cannot write to {place}" in output


def test_files_of_a_service_are_all_that_the_wheel_has() -> None:
    root = Path(__file__).resolve().parents[2]
    packed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    ours = {name.removeprefix("compose/") for name in packed["force-include"] if name.startswith("compose/")}
    assert ours == set(FILES)
    assert {p.name for p in (source() / "kubernetes").glob("*.yaml")} <= {Path(name).name for name in FILES}


@pytest.mark.parametrize("there", ["0.0.0.0:8080", "[::]:8080", "localhost:8080"])
def test_an_address_of_all_interfaces_is_that_of_each(home: Path, there: str) -> None:
    install = ["service", "install", str(home / "plant.py"), "--user"]
    millpy(*install, "--http", there)

    status, error = run_millpy(*install, "--name", "other")
    assert status == 2
    assert "millpy-plant.service has the address" in error
    millpy(*install, "--name", "other", "--http", "127.0.0.1:8081")
    assert run_millpy(*install, "--name", "third", "--http", "0.0.0.0:8081")[0] == 2
    status, error = run_millpy(*install, "--name", "third", "--http", "8082")
    assert status != 0
    assert "--http: '8082' is not an address" in error

"""The compose files, as far as they can be judged without an engine; `make compose-test` runs them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from millpy.cli import app

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose"
STACK: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
LONG_RUNNING = ("postgres", "mosquitto", "injector", "worker")
OURS = [name for name, service in SERVICES.items() if "build" in service]
each_service = pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)


@each_service
def test_no_container_is_root_or_may_become_it(service: dict[str, Any]) -> None:
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["read_only"] is True
    assert service.get("user", "root") != "root" or "build" in service


@pytest.mark.parametrize("name", LONG_RUNNING)
def test_what_runs_for_ever_comes_back_and_says_how_it_is(name: str) -> None:
    assert SERVICES[name]["restart"] == "unless-stopped"
    assert SERVICES[name]["healthcheck"]["test"]
    assert SERVICES[name]["init"] is True


@each_service
def test_secrets_are_files(service: dict[str, Any]) -> None:
    environment = service.get("environment", {})
    for name, value in environment.items():
        if re.search("PASSWORD|URL", name):
            assert name.endswith("_FILE")
            assert value.removeprefix("/run/secrets/") in service["secrets"]
    assert set(service.get("secrets", [])) <= STACK["secrets"].keys()


@each_service
def test_ports_are_open_to_this_host_only(service: dict[str, Any]) -> None:
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


@each_service
def test_what_is_mounted_from_here_is_here(service: dict[str, Any]) -> None:
    for mount in service.get("volumes", []):
        source = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", mount).split(":")[0]
        assert source in STACK["volumes"] or (COMPOSE / source).exists(), mount


@pytest.mark.parametrize("name", OURS)
def test_commands_are_of_the_image(name: str) -> None:
    command = SERVICES[name]["command"]
    if command[0] == "millpy":
        assert command[1] in {registered.name for registered in app.registered_commands}
        return
    assert command[:2] == ["python", "-m"]
    assert (ROOT / command[2].replace(".", "/")).with_suffix(".py").is_file()


def test_what_is_beside_the_stack_is_behind_a_profile() -> None:
    assert {name for name in SERVICES if "profiles" not in SERVICES[name]} == {*LONG_RUNNING, "migrate"}


@pytest.mark.parametrize("name", ["postgres", "mosquitto"])
def test_other_registries_can_be_used(name: str) -> None:
    assert re.fullmatch(r"\$\{\w+_IMAGE:-[\w:-]+\}", SERVICES[name]["image"])
    arguments = SERVICES["worker"]["build"]["args"]
    assert arguments.keys() >= {"PYTHON_IMAGE", "PIP_INDEX_URL"}


def test_the_images_end_as_a_user_of_their_own() -> None:
    stages = re.split(r"(?m)^FROM ", (COMPOSE / "Dockerfile").read_text())
    built = {match[1]: stage for stage in stages if (match := re.match(r"\S+ AS (\S+)", stage))}

    for target in {SERVICES[name]["build"]["target"] for name in OURS}:
        assert re.findall(r"(?m)^USER (\S+)$", built[target]) == ["10001:10001"]


def test_all_that_the_wheel_is_made_of_is_in_the_build() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    build, *_ = re.split(r"(?m)^FROM .* AS base$", (COMPOSE / "Dockerfile").read_text())
    copied = set(re.findall(r"(?m)^COPY (\w+) ", build))
    let_in = {line[1:].split("/")[0] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}

    assert {path.lstrip("/").split("/")[0] for path in (*wheel["include"], *wheel["force-include"])} <= copied
    assert copied <= let_in


def test_the_broker_lets_nobody_in_without_a_password_and_keeps_what_it_has() -> None:
    lines = (COMPOSE / "mosquitto" / "mosquitto.conf").read_text().splitlines()
    settings = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))

    assert settings["allow_anonymous"] == "false"
    assert settings["persistence"] == "true"
    assert int(settings["max_queued_messages"]) > 0, "0 would be without a bound"
    assert settings.keys() >= {"password_file", "acl_file", "persistent_client_expiration"}


def test_secrets_are_made_once_and_match(tmp_path: Path) -> None:
    command = [sys.executable, str(COMPOSE / "make_secrets.py"), str(tmp_path / "secrets")]
    subprocess.run(command, check=True, capture_output=True)
    made = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    subprocess.run(command, check=True, capture_output=True)

    assert {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()} == made
    assert made.keys() == STACK["secrets"].keys()
    assert made["postgres_password"] in made["admin_database_url"]
    assert len({text.split("@")[0] for name, text in made.items() if name != "postgres_password"}) == 5
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700

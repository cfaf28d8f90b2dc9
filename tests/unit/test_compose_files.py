"""The compose files, as far as they can be judged without an engine; `make compose-test` runs them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from millpy import Kafka, KafkaTopic
from millpy.cli.app import HEADINGS
from millpy.graph import StageNode
from millpy.graph.loader import load_graph
from millpy.sinks.outbox import OutboxLogic

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose"
STACK: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
LONG_RUNNING = ("postgres", "mosquitto", "injector", "worker", "api", "analytics")
OURS = [name for name, service in SERVICES.items() if "build" in service]
each_service = pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)


@each_service
def test_no_container_runs_as_root_or_can_become_root(service: dict[str, Any]) -> None:
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["read_only"] is True
    assert service.get("user", "root") != "root" or "build" in service


@pytest.mark.parametrize("name", [*LONG_RUNNING, "kafka", "prometheus", "grafana"])
def test_long_running_services_restart_and_have_health_checks(name: str) -> None:
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
def test_mounted_files_exist(service: dict[str, Any]) -> None:
    for mount in service.get("volumes", []):
        source = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", mount).split(":")[0]
        assert source in STACK["volumes"] or (COMPOSE / source).exists(), mount


@pytest.mark.parametrize("name", OURS)
def test_commands_exist_in_the_image(name: str) -> None:
    command = SERVICES[name]["command"]
    if command[0] == "millpy":
        assert command[1] in HEADINGS
        return
    assert command[:2] == ["python", "-m"]
    assert (ROOT / command[2].replace(".", "/")).with_suffix(".py").is_file()


@each_service
def test_memory_and_processes_are_bounded(service: dict[str, Any]) -> None:
    assert re.fullmatch(r"(\$\{\w+_MEMORY:-)?\d+[mg]\}?", service["mem_limit"])
    assert service["pids_limit"] > 0


def test_images_can_be_pinned_by_digest() -> None:
    images = {service["image"] for service in SERVICES.values()} | {SERVICES["worker"]["build"]["args"]["PYTHON_IMAGE"]}
    assert all(re.match(r"\$\{\w+_IMAGE:-", image) for image in images)
    page = (ROOT / "docs" / "operations.md").read_text()
    assert "@sha256:" in page
    names = {re.match(r"\$\{(\w+)", image)[1] for image in images}  # type: ignore[index]
    assert [name for name in sorted(names - {"MILLPY_SPARK_IMAGE"}) if f"`{name}" not in page] == []


def test_kafka_is_reached_by_its_name_and_makes_the_topics_of_the_example() -> None:
    text = (COMPOSE / "kafka" / "server.properties").read_text()
    settings = dict(line.split("=", 1) for line in text.splitlines() if line and not line.startswith("#"))
    address = settings["advertised.listeners"].removeprefix("PLAINTEXT://")
    assert address == "kafka:9092"
    assert SERVICES["worker"]["environment"]["MILLPY_KAFKA_SERVERS"] == f"${{MILLPY_KAFKA_SERVERS:-{address}}}"
    assert f"kafka:{settings['log.dirs']}" in SERVICES["kafka"]["volumes"]
    assert settings["auto.create.topics.enable"] == "false"
    assert "ports" not in SERVICES["kafka"]
    graph = load_graph(str(ROOT / "examples" / "kafka_averages.py"))
    (source,) = (node.source for node in graph.injectors())
    logics = [node.logic for node in graph.nodes if isinstance(node, StageNode)]
    (sink,) = (logic.sink for logic in logics if isinstance(logic, OutboxLogic))
    assert isinstance(source, Kafka) and isinstance(sink, KafkaTopic)
    (command,) = SERVICES["kafka-topics"]["command"]
    assert f"KAFKA_TOPICS:-{source.topic} {sink.topic}}}" in command
    assert f"--partitions {source.count}" in command


PASSWORDS = {"mqtt_url": "geheim-one", "fleet_mqtt_url": "geheim-two", "worker_database_url": "geheim-three",
             "reader_database_url": "geheim-four"}  # fmt: skip
RECORDING = """#!/bin/sh
echo "$0 $*" >> {seen}
exec {program} "$@"
"""


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs a container's script here, and returns the arguments that it passed to programs."""
    secrets, seen, programs = tmp_path / "secrets", tmp_path / "seen", tmp_path / "programs"
    secrets.mkdir()
    programs.mkdir()
    seen.touch()
    for name, password in PASSWORDS.items():
        (secrets / name).write_text(f"mqtt://user-of-{name}:{password}@host:1883")

    def run(script: str, **stubs: str) -> str:
        for name in ("sed", "cat", "mkdir", "grep", *stubs):
            program = stubs.get(name) or shutil.which(name)
            (programs / name).write_text(RECORDING.format(seen=seen, program=program))
            (programs / name).chmod(0o755)
        text = script.replace("/tmp/", f"{tmp_path}/").replace("/run/secrets", str(secrets))
        environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "POSTGRES_USER": "u",
            "POSTGRES_DB": "d",
        }
        subprocess.run(["sh", "-c", text], env=environment, check=True, capture_output=True)
        return seen.read_text()

    return run


def test_start_of_the_broker_passes_no_password_to_a_program(tmp_path: Path, recorded: Callable[..., str]) -> None:
    tool = shutil.which("mosquitto_passwd")
    if tool is None:
        pytest.skip("mosquitto_passwd is not installed")

    seen = recorded((COMPOSE / "mosquitto" / "start.sh").read_text(), mosquitto="true", mosquitto_passwd=tool)

    assert "mosquitto_passwd -U" in seen
    assert not any(password in seen for password in PASSWORDS.values()), seen
    hashed = (tmp_path / "passwords").read_text()
    assert hashed.count("$") > 4 and not any(password in hashed for password in PASSWORDS.values())
    assert re.findall(r"^user (\S+)", (tmp_path / "acl").read_text(), re.M) == [
        "user-of-mqtt_url",
        "user-of-fleet_mqtt_url",
    ]
    options = tmp_path / "health" / "mosquitto_sub"
    assert options.read_text() == f"-u user-of-mqtt_url\n-P {PASSWORDS['mqtt_url']}\n"
    assert options.stat().st_mode & 0o077 == 0


def test_start_of_the_database_passes_no_password_to_a_program(tmp_path: Path, recorded: Callable[..., str]) -> None:
    output = tmp_path / "said"
    (tmp_path / "psql").write_text(f"#!/bin/sh\ncat > {output}\n")
    (tmp_path / "psql").chmod(0o755)

    seen = recorded((COMPOSE / "postgres" / "roles.sh").read_text(), psql=str(tmp_path / "psql"))

    assert not any(password in seen + output.read_text() for password in PASSWORDS.values())


def test_start_of_grafana_gives_it_the_readers_password_and_no_program(
    tmp_path: Path, recorded: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grafana").write_text(f'#!/bin/sh\necho "$READER_PASSWORD" > {tmp_path}/given\n')
    (tmp_path / "grafana").chmod(0o755)
    monkeypatch.setenv("GRAFANA_START", str(tmp_path / "grafana"))

    seen = recorded((COMPOSE / "monitoring" / "start.sh").read_text())

    assert (tmp_path / "given").read_text() == f"{PASSWORDS['reader_database_url']}\n"
    assert not any(password in seen for password in PASSWORDS.values()), seen


def test_no_health_check_has_a_secret_in_its_command() -> None:
    for service in SERVICES.values():
        assert "/run/secrets" not in str(service.get("healthcheck", ""))
        assert "/run/secrets" not in str(service.get("command", ""))


def test_secrets_in_an_existing_directory_are_protected(tmp_path: Path) -> None:
    command = [sys.executable, str(COMPOSE / "make_secrets.py")]
    (tmp_path / "secrets").mkdir(mode=0o755)
    (tmp_path / "other").mkdir(mode=0o755)
    (tmp_path / "other" / "letter.txt").touch()

    subprocess.run([*command, str(tmp_path / "secrets")], check=True, capture_output=True)
    refused = subprocess.run([*command, str(tmp_path / "other")], check=False, capture_output=True, text=True)

    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    assert refused.returncode != 0 and "letter.txt" in refused.stderr
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["letter.txt"]
    (tmp_path / "secrets").chmod(0o755)
    subprocess.run([*command, str(tmp_path / "secrets")], check=True, capture_output=True)
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700


def test_a_secret_that_could_not_be_written_is_made_by_the_next_run(tmp_path: Path) -> None:
    command = [sys.executable, str(COMPOSE / "make_secrets.py"), str(tmp_path)]

    full = subprocess.run(["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *command], check=False, capture_output=True)
    subprocess.run(command, check=True, capture_output=True)

    assert full.returncode != 0
    assert {path.name for path in tmp_path.iterdir() if path.read_text()} == STACK["secrets"].keys()


def test_optional_services_are_behind_a_profile() -> None:
    assert {name for name in SERVICES if "profiles" not in SERVICES[name]} == {*LONG_RUNNING, "migrate"}


@pytest.mark.parametrize("name", ["postgres", "mosquitto"])
def test_other_registries_can_be_used(name: str) -> None:
    assert re.fullmatch(r"\$\{\w+_IMAGE:-[\w:-]+\}", SERVICES[name]["image"])
    arguments = SERVICES["worker"]["build"]["args"]
    assert arguments.keys() >= {"PYTHON_IMAGE", "PIP_INDEX_URL"}


def test_images_run_as_their_own_user() -> None:
    stages = re.split(r"(?m)^FROM ", (COMPOSE / "Dockerfile").read_text())
    built = {match[1]: stage for stage in stages if (match := re.match(r"\S+ AS (\S+)", stage))}

    for target in {SERVICES[name]["build"]["target"] for name in OURS}:
        assert re.findall(r"(?m)^USER (\S+)$", built[target]) == ["10001:10001"]


def test_build_contains_everything_that_the_wheel_needs() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    build, *_ = re.split(r"(?m)^FROM .* AS base$", (COMPOSE / "Dockerfile").read_text())
    copied = set(re.findall(r"(?m)^COPY (\w+) ", build))
    let_in = {line[1:].split("/")[0] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}

    assert {path.lstrip("/").split("/")[0] for path in (*wheel["include"], *wheel["force-include"])} <= copied
    assert copied <= let_in


def test_the_broker_requires_a_password_and_keeps_its_messages() -> None:
    lines = (COMPOSE / "mosquitto" / "mosquitto.conf").read_text().splitlines()
    settings = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))

    assert settings["allow_anonymous"] == "false"
    assert settings["persistence"] == "true"
    assert int(settings["max_queued_messages"]) > 0 < int(settings["max_queued_bytes"]), "0 would be without a bound"
    assert settings.keys() >= {"password_file", "acl_file", "persistent_client_expiration"}


def test_secrets_are_generated_once_and_match(tmp_path: Path) -> None:
    command = [sys.executable, str(COMPOSE / "make_secrets.py"), str(tmp_path / "secrets")]
    subprocess.run(command, check=True, capture_output=True)
    made = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    subprocess.run(command, check=True, capture_output=True)

    assert {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()} == made
    assert made.keys() == STACK["secrets"].keys()
    assert made["postgres_password"] in made["admin_database_url"]
    assert len({text.split("@")[0] for name, text in made.items() if name != "postgres_password"}) == 6
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700

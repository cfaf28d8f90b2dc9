"""The manifests in compose/kubernetes: what refers to what, and what workers and the API need to stop and be probed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from millpy.api.server import STOP_S_MAX
from millpy.limits import Limits
from millpy.observability.http import address_of

PLACE = Path(__file__).resolve().parents[2] / "compose" / "kubernetes"
MIGRATION, WORKER, API = PODS = "Job/millpy-migration", "Deployment/millpy-worker", "Deployment/millpy-api"
SERVICE, BUDGET = "Service/millpy-api", "PodDisruptionBudget/millpy-worker"


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    """Return the objects as KIND/NAME, as kustomize renders them if it is installed, else as they are written."""
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize", str(PLACE)]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    else:
        files = yaml.safe_load((PLACE / "kustomization.yaml").read_text())["resources"]
        text = "\n---\n".join((PLACE / name).read_text() for name in files)
    found = list(yaml.safe_load_all(text))
    named = {f"{one['kind']}/{one['metadata']['name']}": one for one in found}
    assert len(found) == len(named)
    return named


def pod(objects: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = objects[name]["spec"]["template"]["spec"]
    return found


def labels_of(objects: dict[str, Any], name: str) -> set[tuple[str, str]]:
    """Return the labels of the Pods of an object."""
    return set(objects[name]["spec"]["template"]["metadata"]["labels"].items())


def test_every_manifest_is_rendered(objects: dict[str, Any]) -> None:
    listed = yaml.safe_load((PLACE / "kustomization.yaml").read_text())["resources"]

    assert {*listed, "kustomization.yaml"} == {path.name for path in PLACE.glob("*.yaml")}
    assert objects.keys() == {MIGRATION, WORKER, API, SERVICE, BUDGET}


def test_selectors_choose_their_own_pods_only(objects: dict[str, Any]) -> None:
    spread = pod(objects, WORKER)["topologySpreadConstraints"][0]["labelSelector"]
    chosen = [
        (WORKER, objects[WORKER]["spec"]["selector"]["matchLabels"]),
        (WORKER, objects[BUDGET]["spec"]["selector"]["matchLabels"]),
        (WORKER, spread["matchLabels"]),
        (API, objects[API]["spec"]["selector"]["matchLabels"]),
        (API, objects[SERVICE]["spec"]["selector"]),
    ]

    for own, labels in chosen:
        assert {name for name in PODS if set(labels.items()) <= labels_of(objects, name)} == {own}


def test_a_worker_has_time_to_drain(objects: dict[str, Any]) -> None:
    worker = pod(objects, WORKER)
    given = {variable["name"]: variable["value"] for variable in worker["containers"][0]["env"]}

    assert float(given["MILLPY_DRAIN_GRACE_S"]) == Limits().drain_grace_s
    assert worker["terminationGracePeriodSeconds"] >= Limits().drain_grace_s + 5
    assert objects[BUDGET]["spec"]["maxUnavailable"] < objects[WORKER]["spec"]["replicas"]


def test_the_service_leads_to_the_port_of_the_api(objects: dict[str, Any]) -> None:
    (container,) = pod(objects, API)["containers"]
    (port,), (served,) = container["ports"], objects[SERVICE]["spec"]["ports"]
    given = {variable["name"]: variable["value"] for variable in container["env"]}

    assert served["targetPort"] == port["name"]
    assert address_of(given["MILLPY_API"], "MILLPY_API") == ("0.0.0.0", port["containerPort"])
    assert objects[SERVICE]["spec"]["type"] == "ClusterIP"  # what is open to others is a decision of yours


def test_the_api_has_time_to_end_and_stays_while_the_database_is_away(objects: dict[str, Any]) -> None:
    spec = pod(objects, API)
    (container,) = spec["containers"]

    assert spec["terminationGracePeriodSeconds"] >= STOP_S_MAX + 5
    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    assert {container[name]["httpGet"]["path"] for name in probes} == {"/live"}
    assert {container[name]["httpGet"]["port"] for name in probes} == {container["ports"][0]["name"]}


def test_probes_restart_on_live_and_never_on_ready(objects: dict[str, Any]) -> None:
    (container,) = pod(objects, WORKER)["containers"]
    (port,) = container["ports"]

    assert port["containerPort"] == 8080  # MILLPY_HTTP of the image
    paths = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {
        "startupProbe": {"path": "/live", "port": port["name"]},
        "livenessProbe": {"path": "/live", "port": port["name"]},
        "readinessProbe": {"path": "/ready", "port": port["name"]},
    }


@pytest.mark.parametrize("name", PODS)
def test_pods_are_confined_and_read_mounted_secrets(objects: dict[str, Any], name: str) -> None:
    spec = pod(objects, name)
    (container,) = spec["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    secret = volumes["secrets"]["secret"]
    files = {f"{mounts['secrets']}/{item['path']}" for item in secret["items"]}
    read = {variable["value"] for variable in container["env"] if variable["name"].endswith("_FILE")}

    assert mounts.keys() == volumes.keys()
    assert read == files
    assert [variable["name"] for variable in container["env"] if "URL" in variable["name"]] == [
        variable["name"] for variable in container["env"] if variable["name"].endswith("_FILE")
    ]
    assert (secret["secretName"], secret["defaultMode"]) == ("millpy", 0o440)
    assert container["command"][:2] == ["python", "-m"]
    assert (PLACE.parents[1] / container["command"][2].replace(".", "/")).with_suffix(".py").is_file()
    if "graphs" in mounts:
        assert container["command"][-1].startswith(mounts["graphs"] + "/")
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False  # MILLPY_DATABASE_PORT, of a Service, would be refused as misspelled
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
    }  # fmt: skip
    assert {"memory"} <= container["resources"]["limits"].keys()
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()


def test_only_the_migration_reads_the_administrators_url(objects: dict[str, Any]) -> None:
    for name in (WORKER, API):
        assert "admin_database_url" not in yaml.safe_dump(pod(objects, name))
    assert "admin_database_url" in yaml.safe_dump(pod(objects, MIGRATION))

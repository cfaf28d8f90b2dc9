"""The manifests in compose/kubernetes: what refers to what, and what the worker needs to stop and to be probed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from millpy.limits import Limits

PLACE = Path(__file__).resolve().parents[2] / "compose" / "kubernetes"


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    """Return the objects by their kind, as kustomize renders them if it is installed, else as they are written."""
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize", str(PLACE)]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    else:
        files = yaml.safe_load((PLACE / "kustomization.yaml").read_text())["resources"]
        text = "\n---\n".join((PLACE / name).read_text() for name in files)
    found = list(yaml.safe_load_all(text))
    assert len(found) == len({one["kind"] for one in found})
    return {one["kind"]: one for one in found}


def pod(objects: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = objects[kind]["spec"]["template"]["spec"]
    return found


def test_every_manifest_is_rendered(objects: dict[str, Any]) -> None:
    listed = yaml.safe_load((PLACE / "kustomization.yaml").read_text())["resources"]

    assert {*listed, "kustomization.yaml"} == {path.name for path in PLACE.glob("*.yaml")}
    assert objects.keys() == {"Deployment", "Job", "PodDisruptionBudget"}


def test_selectors_choose_the_workers_only(objects: dict[str, Any]) -> None:
    spec = objects["Deployment"]["spec"]
    labels = spec["template"]["metadata"]["labels"].items()
    migration = objects["Job"]["spec"]["template"]["metadata"]["labels"].items()
    spread = spec["template"]["spec"]["topologySpreadConstraints"][0]["labelSelector"]

    for selector in (spec["selector"], objects["PodDisruptionBudget"]["spec"]["selector"], spread):
        assert selector["matchLabels"].items() <= labels
        assert not selector["matchLabels"].items() <= migration


def test_a_worker_has_time_to_drain(objects: dict[str, Any]) -> None:
    worker = pod(objects, "Deployment")
    given = {variable["name"]: variable["value"] for variable in worker["containers"][0]["env"]}

    assert float(given["MILLPY_DRAIN_GRACE_S"]) == Limits().drain_grace_s
    assert worker["terminationGracePeriodSeconds"] >= Limits().drain_grace_s + 5
    assert objects["PodDisruptionBudget"]["spec"]["maxUnavailable"] < objects["Deployment"]["spec"]["replicas"]


def test_probes_restart_on_live_and_never_on_ready(objects: dict[str, Any]) -> None:
    (container,) = pod(objects, "Deployment")["containers"]
    (port,) = container["ports"]

    assert port["containerPort"] == 8080  # MILLPY_HTTP of the image
    paths = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {
        "startupProbe": {"path": "/live", "port": port["name"]},
        "livenessProbe": {"path": "/live", "port": port["name"]},
        "readinessProbe": {"path": "/ready", "port": port["name"]},
    }


@pytest.mark.parametrize("kind", ["Deployment", "Job"])
def test_pods_are_confined_and_read_mounted_secrets(objects: dict[str, Any], kind: str) -> None:
    spec = pod(objects, kind)
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
    assert container["command"][-1].startswith(mounts["graphs"] + "/")
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
    }  # fmt: skip
    assert {"memory"} <= container["resources"]["limits"].keys()
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()


def test_only_the_migration_reads_the_administrators_url(objects: dict[str, Any]) -> None:
    assert "admin_database_url" not in yaml.safe_dump(pod(objects, "Deployment"))
    assert "admin_database_url" in yaml.safe_dump(pod(objects, "Job"))

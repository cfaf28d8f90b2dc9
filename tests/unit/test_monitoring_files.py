"""Prometheus and Grafana of the stack: every metric and label in a dashboard exists, and every mount has its reader."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from millpy.clock import SystemClock
from millpy.observability.audit_metrics import AuditMetrics
from millpy.observability.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "compose" / "monitoring"
DASHBOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted((MONITORING / "dashboards").glob("*.json"))
}
OF_SUPERVISOR = {"millpy_workers", "millpy_worker_restarts_total"}
OF_PROMETHEUS = {"instance", "job", "le", "worker"}
"""Labels of a scrape, of histograms, and that the supervisor of `millpy run --workers` adds."""
each_dashboard = pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)


def exported() -> set[str]:
    """Names of the series of workers, supervisors and auditors."""
    endings = {"counter": "_total", "histogram": "_bucket"}
    registries = (Metrics("world", SystemClock()).registry, AuditMetrics("world").registry)
    families = [family for registry in registries for family in registry.collect()]
    return OF_SUPERVISOR | {f"{family.name}{endings.get(family.type, '')}" for family in families}


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"] if "expr" in target]


def labels_on_the_page() -> dict[str, set[str]]:
    """The labels of each metric, as the operations page lists them."""
    found = {}
    for line in (ROOT / "docs" / "operations.md").read_text().splitlines():
        if line.startswith("| `millpy_"):
            names, labels, _ = line.strip("| ").split(" | ", 2) if line.count(" | ") > 1 else (line, "", "")
            for name in re.findall(r"`(millpy_\w+)`", names):
                found[name] = {"graph", *re.findall(r"`(\w+)`", labels)}
    return found


@each_dashboard
def test_dashboards_use_existing_metrics_and_labels(dashboard: dict[str, Any]) -> None:
    known, labels = exported(), labels_on_the_page()
    for expression in expressions(dashboard):
        names = set(re.findall(r"\b(?:millpy|process|python)_\w+", expression))
        assert names <= known | {"process_resident_memory_bytes", "process_cpu_seconds_total"}, expression
        used = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
        used |= set(re.findall(r"[{ ](\w+)(?:=~|=|!=)\"", expression)) - {"alertname", "alertstate"}
        for name in names & labels.keys():
            assert used <= labels[name] | OF_PROMETHEUS, (expression, name)


def test_every_metric_of_millpy_is_in_a_dashboard() -> None:
    shown = {
        name for one in DASHBOARDS.values() for text in expressions(one) for name in re.findall(r"millpy_\w+", text)
    }

    assert len(shown) > 40
    assert {name for name in exported() if name.startswith("millpy_")} - shown == set()


@each_dashboard
def test_panels_are_whole_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    panels, cells = dashboard["panels"], set()
    sources = {source["uid"] for source in yaml.safe_load((MONITORING / "datasources.yaml").read_text())["datasources"]}
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["title"] and panel["targets"] and panel["datasource"]["uid"] in sources
        assert [target["refId"] for target in panel["targets"]] == [*"ABCDEF"][: len(panel["targets"])]
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & own and max(x for x, _ in own) < 24
        cells |= own
    assert all(variable["datasource"]["uid"] in sources for variable in dashboard["templating"]["list"])
    assert len({one["uid"] for one in DASHBOARDS.values()}) == len(DASHBOARDS)


def test_rates_take_the_interval_of_the_scrape() -> None:
    for expression in (text for one in DASHBOARDS.values() for text in expressions(one)):
        assert not re.search(r"(rate|increase)\([^[]*\[(?!\$__rate_interval|1h)", expression)


def test_prometheus_reads_every_service_that_answers_and_the_alerts() -> None:
    stack = yaml.safe_load((ROOT / "compose" / "compose.yaml").read_text())["services"]
    settings = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    (job,) = settings["scrape_configs"]
    (names,) = job["dns_sd_configs"]

    answering = {name for name, service in stack.items() if "127.0.0.1:8080/ready" in str(service.get("healthcheck"))}
    assert set(names["names"]) == answering
    assert job["job_name"] == "millpy", "alerts.yaml and the dashboards name it"
    assert [f"./alerts.yaml:{path}:ro" for path in settings["rule_files"]] == stack["prometheus"]["volumes"][-1:]


def test_a_graph_whose_processes_are_no_targets_any_more_alerts() -> None:
    """A name that resolves to no container, and a Pod that is gone, leave no `up` and no series behind."""
    (group,) = yaml.safe_load((ROOT / "compose" / "alerts.yaml").read_text())["groups"]
    (rule,) = (rule for rule in group["rules"] if rule["alert"] == "MillpyNobodyWorks")

    gone = rule["expr"].split(" or ")[-1]
    assert gone == (
        "count by (graph) (last_over_time(millpy_lease_trusted[1d])) unless on (graph) millpy_lease_trusted"
    )
    assert "$labels.graph" in rule["annotations"]["summary"]


def test_variables_of_the_stack_are_on_the_page() -> None:
    variables = set(re.findall(r"\$\{([A-Z_]+)", (ROOT / "compose" / "compose.yaml").read_text()))
    page = (ROOT / "docs" / "operations.md").read_text()

    assert len(variables) > 30
    assert [name for name in sorted(variables) if f"`{name}`" not in page] == []


def test_grafana_finds_what_is_mounted() -> None:
    stack = yaml.safe_load((ROOT / "compose" / "compose.yaml").read_text())["services"]
    mounted = {mount.split(":")[1] for mount in stack["grafana"]["volumes"]}
    (provider,) = yaml.safe_load((MONITORING / "dashboards.yaml").read_text())["providers"]
    prometheus, database = yaml.safe_load((MONITORING / "datasources.yaml").read_text())["datasources"]

    assert provider["options"]["path"] in mounted
    assert prometheus["url"] == "http://prometheus:9090"
    assert database["url"] == "postgres:5432" and database["user"] == "millpy_reader"
    assert database["secureJsonData"] == {"password": "${READER_PASSWORD}"}
    assert database["jsonData"]["maxOpenConns"] <= 5, "a dashboard must not take the workers' connections"

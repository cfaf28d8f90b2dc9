"""Metrics of sources to which clients send requests, such as HTTP."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from millpy.ingest.request_traffic import RequestTraffic


def request_metrics(graph: str, traffic: Mapping[str, RequestTraffic]) -> list[Metric]:
    """Return the metrics of the sources of one worker, by name; of no source, without values."""

    def counter(name: str, help_text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"millpy_http_{name}", help_text, labels=("graph", "computation", *labels))

    def gauge(name: str, help_text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"millpy_http_{name}", help_text, labels=("graph", "computation"))

    requests = counter("requests", "Answers to clients, by the first digit of their status.", "status")
    refused = counter("refused", "Requests and connections that were refused.", "reason")
    records = counter("records", "Records in requests that were answered as committed, by their owner.")
    size = counter("bytes", "Bytes of bodies, as sent.")
    waiting = gauge("waiting_requests", "Requests that are being read or wait for their commit.")
    waiting_size = gauge("waiting_bytes", "Bytes of their bodies, after decompression.")
    connections = gauge("connections", "Open connections of clients to the address of the source.")
    for source, of in traffic.items():
        labels = [graph, source]
        for digit, count in of.requests.items():
            requests.add_metric([*labels, f"{digit}xx"], count)
        for reason, count in of.refusals.items():
            refused.add_metric([*labels, reason], count)
        records.add_metric(labels, of.records)
        size.add_metric(labels, of.bytes)
        waiting.add_metric(labels, of.waiting_requests)
        waiting_size.add_metric(labels, of.waiting_bytes)
        connections.add_metric(labels, of.connections)
    return [requests, refused, records, size, waiting, waiting_size, connections]

"""Readings of a topic, whose running sums leave by another topic."""

from tests.crash.kafka_to_kafka import graph_here

graph = graph_here()

"""Embedded PostgreSQL and an embedded MQTT broker, for a first run, the demonstration and tests."""

from millpy.embedded.broker import EmbeddedBroker, end_broker_left_behind, mosquitto_program
from millpy.embedded.parts import EMBEDDED_DIRECTORY, embedded_directory, free_port
from millpy.embedded.postgres import NO_SPACE_HINT, EmbeddedPostgres, binaries

__all__ = [
    "EMBEDDED_DIRECTORY", "NO_SPACE_HINT", "EmbeddedBroker", "EmbeddedPostgres", "binaries", "embedded_directory",
    "end_broker_left_behind", "free_port", "mosquitto_program",
]  # fmt: skip

"""MQTT topics."""

"""The newest revision of the schema; apart, so that a worker need not import what migrates."""

HEAD = "0003"
"""Tests hold it equal to what is in `migrations/`."""

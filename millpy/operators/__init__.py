"""Stages without windows: callbacks with state and timers, and functions of records."""

"""Observability of a running service: health, metrics, traces, progress."""

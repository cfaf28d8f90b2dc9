"""Persistence: the protocol, the in-memory reference, PostgreSQL."""

"""Persistence: the protocol, the in-memory reference implementation, and PostgreSQL."""

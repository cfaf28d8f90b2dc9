"""Queries and requests of operators; never on the hot path."""

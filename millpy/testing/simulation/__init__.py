"""Deterministic simulation: real workers over the in-memory store, one seed deciding everything that can vary."""

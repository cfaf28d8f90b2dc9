"""Windows and aggregates."""

"""Settings, secrets and database URLs."""

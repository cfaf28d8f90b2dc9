"""Transcripts: windows, input and expected panes as YAML, run on the engine. `docs/testing.md` defines the format."""

"""Sinks: what leaves the graph, by a statement inside the commit or by messages after it."""

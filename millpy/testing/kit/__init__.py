"""The test kit: a graph without database or worker, driven by hand. `millpy.testing` has its public names."""

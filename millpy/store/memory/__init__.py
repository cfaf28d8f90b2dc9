"""The store in memory, for tests and the simulator."""

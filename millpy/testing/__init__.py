"""Test kit: crash probes, proxies, clocks."""

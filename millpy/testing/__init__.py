"""Test kit: failpoints, proxies, clocks."""

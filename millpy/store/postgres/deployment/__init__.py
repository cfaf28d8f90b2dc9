"""Deploying a graph, and changing a deployed one."""

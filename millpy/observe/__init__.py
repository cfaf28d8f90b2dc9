"""What can be seen of a running service from outside: health, metrics, traces."""

"""One script per workload; see README.md."""

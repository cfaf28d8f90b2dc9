"""A graph's stages without a store or worker: what the worker, the test kit and Spark share."""

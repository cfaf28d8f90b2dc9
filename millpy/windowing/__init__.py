"""Windows over event time, and their aggregates."""

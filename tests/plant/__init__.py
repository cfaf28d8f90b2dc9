"""A day in the plant: 3,000 devices in 12 dialects through a real broker into real workers, with everything that happens."""

"""A day in the plant: devices in 12 dialects through a real broker into real workers, whatever happens meanwhile."""

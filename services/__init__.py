"""Process entry points for the container image; not installed with the package."""

"""The page: what the API shows, and what operators can request, in a browser."""

"""Records that clients post over HTTP."""

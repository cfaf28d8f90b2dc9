"""Messages to HTTP endpoints, each under an id that never changes, signed after the Standard Webhooks specification."""

"""The API over HTTP: what `millpy.admin` reads and requests, as JSON, with its own users. No part of the engine."""

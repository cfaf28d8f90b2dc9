"""Sources and how their payloads become records."""

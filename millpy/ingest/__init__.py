"""The part that all sources share: from payload bytes to records with event times."""

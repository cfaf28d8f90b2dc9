"""PostgreSQL: the only user of psycopg."""

#!/bin/sh
# Create the logins, with the passwords in the secrets, once, when the database is created. `services.migrate` grants
# their rights. psql reads the passwords itself: every user of the host can see the arguments of programs.
set -eu

psql -v ON_ERROR_STOP=1 --no-psqlrc --quiet --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" <<'SQL'
\set worker `sed 's|^[a-z]*://[^:]*:\([^@]*\)@.*|\1|' /run/secrets/worker_database_url`
\set reader `sed 's|^[a-z]*://[^:]*:\([^@]*\)@.*|\1|' /run/secrets/reader_database_url`
CREATE ROLE millpy_worker LOGIN PASSWORD :'worker';
CREATE ROLE millpy_reader LOGIN PASSWORD :'reader';
SQL

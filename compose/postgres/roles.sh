#!/bin/sh
# Once, when the database is made: logins with the passwords in the secrets. Their rights come by `services.migrate`.
# psql reads the passwords itself: arguments of programs are seen by everybody on the host.
set -eu

psql -v ON_ERROR_STOP=1 --no-psqlrc --quiet --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" <<'SQL'
\set worker `sed 's|^[a-z]*://[^:]*:\([^@]*\)@.*|\1|' /run/secrets/worker_database_url`
\set reader `sed 's|^[a-z]*://[^:]*:\([^@]*\)@.*|\1|' /run/secrets/reader_database_url`
CREATE ROLE millpy_worker LOGIN PASSWORD :'worker';
CREATE ROLE millpy_reader LOGIN PASSWORD :'reader';
SQL

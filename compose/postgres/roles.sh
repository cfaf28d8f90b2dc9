#!/bin/sh
# Once, when the database is made: logins with the passwords in the secrets. Their rights come by `services.migrate`.
set -eu

password() { sed 's|^[a-z]*://[^:]*:\([^@]*\)@.*|\1|' "/run/secrets/$1"; }

psql -v ON_ERROR_STOP=1 --no-psqlrc --quiet --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" \
     -v worker="$(password worker_database_url)" -v reader="$(password reader_database_url)" <<'SQL'
CREATE ROLE millpy_worker LOGIN PASSWORD :'worker';
CREATE ROLE millpy_reader LOGIN PASSWORD :'reader';
SQL

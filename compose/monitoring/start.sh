#!/bin/sh
# Start Grafana with the reader's password, which its data source takes from the environment. The shell reads the
# secret itself: every user of the host can see the arguments of programs.
set -eu

read -r url < /run/secrets/reader_database_url || :  # the file ends without a newline
password=${url#*://*:}
export READER_PASSWORD="${password%%@*}"
exec "${GRAFANA_START:-/run.sh}"

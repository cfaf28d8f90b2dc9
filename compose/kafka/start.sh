#!/bin/sh
# Format the broker's directory if it is new, and become the broker. Logs go to standard output and /tmp.
set -eu
export LOG_DIR=/tmp/logs KAFKA_HEAP_OPTS="${KAFKA_HEAP_OPTS:--Xms256m -Xmx512m}"
properties=/etc/millpy/server.properties
/opt/kafka/bin/kafka-storage.sh format --ignore-formatted --cluster-id bWlsbHB5LWthZmthLTAwMQ --config "$properties"
exec /opt/kafka/bin/kafka-server-start.sh "$properties"

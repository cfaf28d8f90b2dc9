#!/bin/sh
# Makes the broker's password and rights files from the addresses in the secrets, and becomes the broker.
#   mqtt_url         millpy: reads the readings, and a topic of its own by which it sees that it has read all
#   fleet_mqtt_url   devices: write readings
set -eu
umask 077

user() { sed 's|^[a-z]*://\([^:]*\):.*|\1|' "/run/secrets/$1"; }
password() { sed 's|^[a-z]*://[^:]*:\([^@]*\)@.*|\1|' "/run/secrets/$1"; }

: > /tmp/passwords
mosquitto_passwd -b /tmp/passwords "$(user mqtt_url)" "$(password mqtt_url)"
mosquitto_passwd -b /tmp/passwords "$(user fleet_mqtt_url)" "$(password fleet_mqtt_url)"

cat > /tmp/acl <<RIGHTS
user $(user mqtt_url)
topic read sensors/#
topic readwrite millpy/marker/#
topic read \$SYS/#

user $(user fleet_mqtt_url)
topic write sensors/#
RIGHTS

exec mosquitto -c /mosquitto/config/mosquitto.conf

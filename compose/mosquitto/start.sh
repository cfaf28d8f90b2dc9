#!/bin/sh
# Make the broker's password and rights files from the addresses in the secrets, then become the broker. Passwords are
# never arguments of a program, because every user of the host can see those.
#   mqtt_url         millpy: reads the readings, and a marker topic by which it sees that it has read everything
#   fleet_mqtt_url   devices: write readings, and read nothing. Any client with a login can end a session whose client id
#                    it knows; millpy's client ids have a secret part, which this login cannot see
set -eu
umask 077

user() { sed 's|^[a-z]*://\([^:]*\):.*|\1|' "/run/secrets/$1"; }
password() { sed 's|^[a-z]*://[^:]*:\([^@]*\)@.*|\1|' "/run/secrets/$1"; }

for secret in mqtt_url fleet_mqtt_url; do
    echo "$(user $secret):$(password $secret)"  # the shell's built-in echo, not a program
done > /tmp/passwords
mosquitto_passwd -U /tmp/passwords

cat > /tmp/acl <<RIGHTS
user $(user mqtt_url)
topic read sensors/#
topic readwrite millpy/marker/#
topic read \$SYS/#

user $(user fleet_mqtt_url)
topic write sensors/#
RIGHTS

# Options of mosquitto_sub for the health check, which reads them from this file.
mkdir -p /tmp/health
{ echo "-u $(user mqtt_url)"; echo "-P $(password mqtt_url)"; } > /tmp/health/mosquitto_sub

exec mosquitto -c /mosquitto/config/mosquitto.conf

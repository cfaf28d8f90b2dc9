#!/bin/sh
# Makes the broker's password and rights files from the addresses in the secrets, and becomes the broker. No password is
# an argument of a program: everybody on the host sees those.
#   mqtt_url         millpy: reads the readings, and a topic of its own by which it sees that it has read all
#   fleet_mqtt_url   devices: write readings, and read nothing. Whoever may log in can end a session whose client id is
#                    known; millpy's have a secret part, which is shown to nobody who has this login
set -eu
umask 077

user() { sed 's|^[a-z]*://\([^:]*\):.*|\1|' "/run/secrets/$1"; }
password() { sed 's|^[a-z]*://[^:]*:\([^@]*\)@.*|\1|' "/run/secrets/$1"; }

for secret in mqtt_url fleet_mqtt_url; do
    echo "$(user $secret):$(password $secret)"  # the shell's own echo: no program
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

# For the health check: options of mosquitto_sub, which reads them from here.
mkdir -p /tmp/health
{ echo "-u $(user mqtt_url)"; echo "-P $(password mqtt_url)"; } > /tmp/health/mosquitto_sub

exec mosquitto -c /mosquitto/config/mosquitto.conf

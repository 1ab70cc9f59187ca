#!/bin/bash
# Process 1 of the namespaces that systemd_test.sh makes: gives the inner system its own /run, /tmp, /dev/shm, /etc and /var, then becomes systemd.
set -euo pipefail
mount --make-rprivate /
mount --bind "$1" /mnt
mkdir /mnt/etc && cp -a /etc/. /mnt/etc/
mount --bind /mnt/etc /etc
for folder in /run /tmp /var/lib /var/log /dev/shm; do mount -t tmpfs -o mode=0755 tmpfs "$folder"; done
chmod 1777 /tmp /dev/shm
umount /sys/fs/cgroup 2>/dev/null || true
mount -t cgroup2 cgroup2 /sys/fs/cgroup
ip link set lo up 2>/dev/null || true
rm -rf /etc/systemd/system
mkdir -p /etc/systemd/system /etc/hearth
cp /mnt/units/* /etc/systemd/system/
cat >/etc/hearth/node.toml <<'T'
[model]
path = "/mnt/model/fable-moe"
[router]
http_listen = ["127.0.0.1:8080"]
grpc_listen = ["127.0.0.1:8081"]
T
chmod 0644 /etc/hearth/node.toml
systemd-sysusers /mnt/hearth.sysusers
systemd-tmpfiles --create /mnt/hearth.tmpfiles
# The other place for shared memory that docs/operations.md names.
mkdir /var/lib/hearth/shm
mount -t tmpfs -o size=1G,mode=0770,uid=hearth,gid=hearth tmpfs /var/lib/hearth/shm
cat >/etc/systemd/system/checks.service <<'T'
[Unit]
DefaultDependencies=no
After=systemd-journald.service
Wants=systemd-journald.service
[Service]
Type=oneshot
ExecStart=/bin/bash /mnt/systemd_checks.sh
StandardOutput=file:/mnt/result/out
StandardError=file:/mnt/result/out
ExecStopPost=/bin/bash -c 'journalctl --no-pager -o short-monotonic > /mnt/result/journal; echo "$SERVICE_RESULT" > /mnt/result/code; systemctl --no-block exit'
T
printf '[Unit]\nDefaultDependencies=no\nWants=checks.service\n' >/etc/systemd/system/checks.target
export container=namespace
exec /lib/systemd/systemd --unit=checks.target --log-level=notice --log-target=console --show-status=no

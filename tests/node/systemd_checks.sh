#!/bin/bash
# What the inner system is asked: start, answer, restart of one worker, death of each process, a refused configuration, stop. Any failure ends it.
set -euo pipefail
export PATH=/mnt/bin:$PATH
say() { echo "ok   $*"; }
health() { curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:8080/health || true; }
until_ready() { for _ in $(seq 1 300); do [ "$(health)" = 200 ] && return 0; sleep 0.1; done; echo "FAIL not ready: $(curl -s http://127.0.0.1:8080/health)"; systemctl --no-pager status 'hearth-*'; return 1; }
answer() { curl -s http://127.0.0.1:8080/v1/completions -H 'Content-Type: application/json' -d '{"model":"fable-moe","prompt":"Once upon a time","max_tokens":20,"temperature":0}' | python3 -c 'import json,sys; print(json.load(sys.stdin)["choices"][0]["text"])'; }
main_pid() { systemctl show -P MainPID "$1"; }

systemctl start hearth.target
until_ready
first=$(answer)
[ -n "$first" ]
say "started: $first"
for unit in hearth-weightstore hearth-prefill@0 hearth-decode@0 hearth-router; do
  [ "$(systemctl is-active $unit)" = active ]
done
[ "$(stat -c %U:%a /dev/shm/hearth.main.manifest.*)" = hearth:600 ]
[ "$(ps -o user= -p "$(main_pid hearth-router)")" = hearth-router ] || [ "$(stat -c %U /proc/"$(main_pid hearth-router)")" = hearth-router ]
say "users and modes"

before=$(main_pid hearth-decode@0)
systemctl restart hearth-decode@0
until_ready
[ "$(main_pid hearth-decode@0)" != "$before" ]
[ "$(answer)" = "$first" ]
say "one worker restarted"

for unit in hearth-decode@0 hearth-prefill@0 hearth-weightstore hearth-router; do
  before=$(main_pid $unit)
  kill -9 "$before"
  for _ in $(seq 1 100); do
    now=$(main_pid $unit)
    [ "$now" != 0 ] && [ "$now" != "$before" ] && break
    sleep 0.1
  done
  until_ready
  [ "$(answer)" = "$first" ]
done
journalctl --no-pager -u hearth-weightstore | grep -q -i adopt
say "each process killed once; the image was adopted"

systemctl stop hearth-decode@0
sed -i 's/^\[router\]/[decode]\nbatch = 3\n[router]/' /etc/hearth/node.toml
! systemctl start hearth-decode@0 2>/dev/null
sleep 1
[ "$(systemctl show -P ExecMainStatus hearth-decode@0)" = 78 ]
[ "$(systemctl show -P NRestarts hearth-decode@0)" = 0 ]
sed -i '/^\[decode\]/,/^batch/d' /etc/hearth/node.toml
say "a wrong key ends with code 78 and is not restarted"
systemctl reset-failed hearth-decode@0
systemctl start hearth-decode@0
until_ready

# The stop comes while a stream runs, and the router's own limit is shorter than the stream: it drains to its end all the same.
mkdir -p /etc/systemd/system/hearth-router.service.d
printf '[Service]\nTimeoutStopSec=1s\n' >/etc/systemd/system/hearth-router.service.d/short.conf
systemctl daemon-reload
curl -sN http://127.0.0.1:8080/v1/completions -H 'Content-Type: application/json' \
  -d '{"prompt":"Once upon a time","max_tokens":4000,"ignore_eos":true,"temperature":0,"stream":true}' >/tmp/stream &
client=$!
for _ in $(seq 1 100); do grep -q data: /tmp/stream && break; sleep 0.02; done
! grep -q DONE /tmp/stream
begin=$(date +%s%N)
systemctl stop hearth.target
wait $client
grep -q '"finish_reason":"length"' /tmp/stream
tail -c 20 /tmp/stream | grep -q DONE
! grep -q '"error"' /tmp/stream
say "a stop lets the running stream end: $(( ($(date +%s%N) - begin) / 1000000 )) ms"
rm -r /etc/systemd/system/hearth-router.service.d
systemctl daemon-reload
for unit in hearth-router hearth-decode@0 hearth-prefill@0 hearth-weightstore; do
  for _ in $(seq 1 100); do [ "$(systemctl is-active $unit || true)" = inactive ] && break; sleep 0.1; done
  [ "$(systemctl is-active $unit || true)" = inactive ]
  [ "$(systemctl show -P Result $unit)" = success ]
done
ls /dev/shm/hearth.main.manifest.* >/dev/null
say "stopped cleanly; the image stays"
systemctl start hearth.target
until_ready
[ "$(answer)" = "$first" ]
say "started again on the adopted image"

systemctl stop hearth.target
for unit in hearth-router hearth-decode@0 hearth-prefill@0 hearth-weightstore; do
  for _ in $(seq 1 100); do [ "$(systemctl is-active $unit || true)" = inactive ] && break; sleep 0.1; done
done
printf '[node]\nshm_dir = "/var/lib/hearth/shm"\n' >>/etc/hearth/node.toml
systemctl start hearth.target
until_ready
ls /var/lib/hearth/shm/hearth.main.manifest.* >/dev/null
[ "$(answer)" = "$first" ]
say "shared memory in /var/lib/hearth/shm"

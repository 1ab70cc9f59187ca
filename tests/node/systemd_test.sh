#!/bin/bash
# The units under a real systemd, in PID, mount, cgroup and network namespaces of their own: verified, started, one worker restarted and killed,
# stopped. Exit 77 (skipped) where such a namespace cannot be made.
set -uo pipefail
source_dir=${HEARTH_SOURCE_DIR:?}
bin_dir=${HEARTH_BIN_DIR:?}
here=$source_dir/tests/node
skip() { echo "SKIPPED: $*"; exit 77; }
[ "$(id -u)" -eq 0 ] || skip "needs root to make namespaces"
[ -x /lib/systemd/systemd ] || skip "systemd is not installed"
unshare --pid --mount --cgroup --net --fork true 2>/dev/null || skip "namespaces are not permitted here"

work=$(mktemp -d "${TMPDIR:-/tmp}/hearth-systemd.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{bin,units,model,result}
cp "$bin_dir"/hearth "$bin_dir"/hearth-* "$work/bin/"
cp -r "$source_dir/deploy/models/fable-moe" "$work/model/"
cp "$source_dir"/deploy/systemd/hearth.sysusers "$source_dir"/deploy/systemd/hearth.tmpfiles "$here/systemd_checks.sh" "$here/systemd_inside.sh" "$work/"

# 1. The units as they are installed; only the programs' folder differs.
cp "$source_dir"/deploy/systemd/*.service "$source_dir"/deploy/systemd/*.target "$work/units/"
sed -i "s#/usr/bin/hearth-#$work/bin/hearth-#" "$work"/units/*.service
complaints=$(cd "$work/units" && systemd-analyze verify --man=no ./hearth-weightstore.service ./hearth-prefill@0.service ./hearth-decode@0.service \
  ./hearth-router.service ./hearth.target 2>&1 | grep -i hearth)
if [ -n "$complaints" ]; then
  echo "FAIL systemd-analyze verify:"; echo "$complaints"; exit 1
fi
echo "ok   systemd-analyze verify"

# 2. A machine of its own: $work becomes its /mnt.
sed -i "s#$work/bin/hearth-#/mnt/bin/hearth-#" "$work"/units/*.service
chmod -R a+rX "$work"
timeout 150 unshare --pid --mount --cgroup --net --ipc --uts --fork --kill-child --mount-proc /bin/bash "$work/systemd_inside.sh" "$work" >"$work/result/console" 2>&1
cat "$work/result/out" 2>/dev/null
if [ "$(cat "$work/result/code" 2>/dev/null)" = success ]; then exit 0; fi
if [ ! -e "$work/result/out" ] && grep -qiE "cgroup|permitted|permission" "$work/result/console"; then
  tail -5 "$work/result/console"
  skip "systemd cannot run in a namespace here"
fi
echo "FAIL: console and journal of the inner system, last lines"
tail -30 "$work/result/console"
tail -60 "$work/result/journal" 2>/dev/null
exit 1

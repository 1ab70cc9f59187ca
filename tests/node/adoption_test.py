#!/usr/bin/env python3
"""What lies in shared memory is taken over, left alone or removed for a reason that its files give: never by a passing shortage, never while somebody
uses it, and never what is somebody else's."""
import os
import pathlib
import resource
import signal
import subprocess
import time

from harness import BIN, Node, run_tests, wait_for


def files(node):
    return sorted((p.name, p.stat().st_ino) for p in node.shm.glob(f"hearth.{node.name}.*") if p.is_file())


def store_under(node, limit, value):
    """The store alone, with a resource limit: (exit code, or None where it became READY, and what it said)."""
    log = node.dir / "limited.log"
    with open(log, "w") as out:
        process = subprocess.Popen([str(BIN / "hearth-weightstore"), "--config", str(node.config)], stdout=out, stderr=out,
                                   preexec_fn=lambda: resource.setrlimit(limit, (value, value)))
    wait_for("the store's end, or READY", lambda: process.poll() is not None or "READY" in log.read_text(), 20)
    if process.poll() is not None:
        return process.returncode, log.read_text()
    process.terminate()
    assert process.wait(10) == 0, (limit, value, log.read_text())
    return None, log.read_text()


def test_a_shortage_costs_no_image():
    with Node() as node:
        text = node.completion("Once", max_tokens=5, temperature=0)["choices"][0]["text"]
        for name in ("router", "decode.0", "prefill.0", "weightstore"):
            node.terminate(name)
        before = files(node)
        assert len(before) >= 4, before
        shortages = [(resource.RLIMIT_NOFILE, n) for n in range(4, 14)] + [(resource.RLIMIT_AS, n << 20) for n in range(40, 200, 12)]
        ended = 0
        for limit, value in shortages:
            code, out = store_under(node, limit, value)
            ended += code is not None
            assert files(node) == before, (limit, value, code, out)
        assert ended >= 5, "none of these limits was too low"
        for name in ("weightstore", "prefill.0", "decode.0", "router"):
            node.start(name)
        node.wait_ready()
        assert files(node) == before
        assert node.completion("Once", max_tokens=5, temperature=0)["choices"][0]["text"] == text
        # A wrong configuration is no reason either.
        node.terminate("weightstore")
        right = node.config.read_text()
        node.config.write_text(right + "[weightstore]\nkv_pool_bytes = 1000\n")
        code, out = store_under(node, resource.RLIMIT_NOFILE, 1000)
        assert code == 78 and "kv_pool_bytes" in out, (code, out)
        assert files(node) == before
        node.config.write_text(right)


def test_what_is_no_region_is_left_alone():
    with Node(start=False) as node:
        generation = "0123456789abcdef" * 2
        fifo = node.shm / f"hearth.{node.name}.manifest.{generation}"
        folder = node.shm / f"hearth.{node.name}.segment0.{generation}"
        link = node.shm / f"hearth.{node.name}.kv.{generation}"
        os.mkfifo(fifo)
        folder.mkdir()
        link.symlink_to("/etc/hostname")
        try:
            node.start("weightstore")
            wait_for("READY", lambda: "READY" in node.log("weightstore"), 20)
            notes = " ".join(node.status()["weightstore"]["notes"])
            assert notes.count("left alone") == 3, notes
            assert node.terminate("weightstore") == 0
            code, out, err = node.command("drop")
            assert code == 0 and "removed 5 regions" in out and err.count("left alone") == 3, (code, out, err)
            assert fifo.is_fifo() and folder.is_dir() and link.is_symlink()
        finally:
            fifo.unlink()
            folder.rmdir()
            link.unlink()


def test_other_users_files_are_left_alone():
    if os.geteuid() != 0:
        print("     skipped: needs root to become another user")
        return
    with Node(start=False) as node:
        foreign = node.shm / f"hearth.{node.name}.manifest.{'ab' * 16}"
        foreign.write_bytes(b"x" * 5000)
        os.chown(foreign, 12001, 12001)
        os.chown(node.dir, 12002, 12002)
        os.chmod(node.dir, 0o755)
        command = [str(BIN / "hearth-weightstore"), "--config", str(node.config)]
        log = node.dir / "foreign.log"
        with open(log, "w") as out:
            try:
                store = subprocess.Popen(command, stdout=out, stderr=out, user=12002, group=12002, extra_groups=[])
            except PermissionError:
                print("     skipped: this place lets nobody become another user")
                return
        try:
            wait_for("READY", lambda: "READY" in log.read_text() or store.poll() is not None, 20)
            text = log.read_text()
            if "can't be entered" in text or "Permission denied" in text:
                print("     skipped: another user can't reach the programs or the model here")
                return
            assert "READY" in text and "belongs to user 12001" in text and foreign.exists(), text
        finally:
            store.terminate()
            store.wait()


def test_drop_refuses_what_is_in_use():
    with Node() as node:
        before = files(node)

        def refused(config=node.config):
            done = subprocess.run([str(BIN / "hearth"), "drop", "--config", str(config)], capture_output=True, text=True, timeout=60)
            code, out, err = done.returncode, done.stdout, done.stderr
            assert code != 0 and "stop" in err, (code, out, err)
            assert files(node) == before
            return err
        refused()
        # By another way in: same node and directory, other sockets.
        other = node.dir / "other.toml"
        (node.dir / "elsewhere").mkdir()
        other.write_text(node.config.read_text().replace(f'runtime_dir = "{node.dir}"', f'runtime_dir = "{node.dir}/elsewhere"'))
        for name in ("weightstore", "decode.0", "prefill.0"):
            assert name.split(".")[0] in refused(other), name
        for name in ("router", "prefill.0"):
            node.terminate(name)
        node.signal("weightstore", signal.SIGSTOP)
        assert "weightstore" in refused(other)
        node.signal("weightstore", signal.SIGCONT)
        node.terminate("weightstore")
        node.signal("decode.0", signal.SIGSTOP)
        assert "decode.0" in refused(other)
        node.signal("decode.0", signal.SIGCONT)
        node.terminate("decode.0")
        assert node.command("drop")[0] == 0
        assert files(node) == []


def test_a_second_store_in_another_pid_namespace_is_refused():
    """Pids say nothing there; the kernel's lock on the manifest does."""
    with Node() as node:
        before = files(node)
        elsewhere = node.dir / "elsewhere"
        elsewhere.mkdir()
        other = node.dir / "other.toml"
        other.write_text(node.config.read_text().replace(f'runtime_dir = "{node.dir}"', f'runtime_dir = "{elsewhere}"'))
        command = ["unshare", "--pid", "--fork", "--mount-proc", str(BIN / "hearth-weightstore"), "--config", str(other)]
        try:
            store = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except FileNotFoundError:
            print("     skipped: no unshare")
            return
        if "unshare" in store.stderr:
            print(f"     skipped: {store.stderr.strip()}")
            return
        assert store.returncode == 1 and "another weight store" in store.stdout + store.stderr, (store.returncode, store.stdout, store.stderr)
        assert files(node) == before
        assert node.completion("Once", max_tokens=3)["choices"]


if __name__ == "__main__":
    run_tests(globals())

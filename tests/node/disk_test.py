#!/usr/bin/env python3
"""A model larger than the shared memory it may have: a part of its experts on disk, answers those of a node that has all in memory, whoever is killed."""
import contextlib
import pathlib
import signal
import tempfile
import threading
import time

from harness import Node, run_tests, wait_for

PROMPT = "Once upon a time there was a king who had three sons, and the youngest was called"
SLP = '\nrouter.chunked_prefill_max_tokens = 0\nprefill.path = "slp"\nprefill.chunk_tokens = 64\nprefill.device_memory_bytes = 24000000'
RINGS = SLP + '\nprefill.expert_source = "ring"\nprefill.ring_slots = 3\nweightstore.numa_shards = 2'


@contextlib.contextmanager
def disk_node(more="", limit=16_000_000, **kw):
    with tempfile.TemporaryDirectory(prefix="hearth-disk-") as disk:
        with Node(config=f'weightstore.image_bytes_max = {limit}\nweightstore.disk_dir = "{disk}"{more}', **kw) as node:
            node.disk = pathlib.Path(disk)
            yield node


def answers(node):
    """A short prompt, which decode computes, and a long one, which prefill does where the configuration says so; greedy and drawn."""
    return [node.completion(p, max_tokens=40, ignore_eos=True, **o)["choices"][0]["text"]
            for p in (PROMPT, PROMPT * 20) for o in ({}, {"temperature": 0.9, "seed": 5})]


def image(node):
    generations = (node.status()["weightstore"] or {}).get("generations", [])
    assert len(generations) == 1, generations
    return generations[0]


def whole_answers(more=""):
    with Node(config=more) as node:
        return answers(node), int(image(node)["bytes"])


def test_answers_are_those_of_a_model_in_memory():
    for more in ("", SLP, RINGS):
        expected, size = whole_answers(more)
        assert size > 25_000_000, size
        with disk_node(more) as node:
            assert answers(node) == expected, more
            on_disk = int(image(node)["disk_bytes"])
            assert size - 16_000_000 <= on_disk < size, (size, on_disk)
            files = sorted(node.disk.iterdir())
            assert files and all(f.name.startswith(f"hearth.{node.name}.disk") for f in files), files
            in_memory = sum(p.stat().st_size for p in node.shm.glob(f"hearth.{node.name}.segment*"))
            assert in_memory < 16_000_000 + 3 * 2**21, in_memory
            screen = node.command("status")[1]
            assert f"in {node.disk}" in screen, screen
            if more == SLP:
                reads = node.status()["workers"]["prefill.0"]["disk"]
                assert int(reads["records"]) > 0 and reads["kind"] in ("io_uring", "threads"), reads
                assert int(reads.get("through_mapping", 0)) == 0 and int(reads.get("errors", 0)) == 0, reads
                assert "\nDisk\n" in screen and reads["kind"] in screen, screen
            if more == RINGS:
                rings = [r for r in node.status()["weightstore"]["rings"] if "disk" in r]
                assert rings and sum(int(r["disk"]["records"]) for r in rings) > 0, rings
            assert "agree with the manifest" in node.command("verify")[1]


def test_all_four_killed_and_the_disk_part_adopted():
    expected, _ = whole_answers(SLP)
    with disk_node(SLP) as node:
        assert answers(node) == expected
        before, inodes = image(node)["id"], [f.stat().st_ino for f in sorted(node.disk.iterdir())]
        for name in ("weightstore", "prefill.0", "decode.0"):
            got = []
            thread = threading.Thread(target=lambda: got.append(node.completion(PROMPT * 40, max_tokens=40, ignore_eos=True)["choices"][0]["text"]))
            thread.start()
            time.sleep(0.1)
            node.kill(name)
            node.start(name)
            thread.join()
            assert len(got) == 1, name
            wait_for("readiness", lambda: node.get("/health").status == 200, 20)
            assert answers(node) == expected, name
            if name == "weightstore":
                again = wait_for("an adopted image", lambda: image(node), 10)
                assert again["adopted"] and again["id"] == before, again
        assert [f.stat().st_ino for f in sorted(node.disk.iterdir())] == inodes
        wait_for("idle node", node.idle, 10)
        for name in ("router", "decode.0", "prefill.0", "weightstore"):
            assert node.terminate(name) == 0, name
        assert node.command("drop")[0] == 0
        assert not list(node.disk.iterdir()) and not node.regions()


def test_another_limit_loads_anew_and_the_old_part_goes():
    with disk_node(start=False) as node:
        node.start("weightstore")
        first = wait_for("an image", lambda: image(node), 30)
        node.terminate("weightstore")
        text = node.config.read_text()
        node.config.write_text(text.replace("image_bytes_max = 16000000", "image_bytes_max = 14000000"))
        node.start("weightstore")
        second = wait_for("another image", lambda: image(node) if image(node)["id"] != first["id"] else None, 30)
        assert int(second["disk_bytes"]) > int(first["disk_bytes"])
        assert len({f.name.split(".")[-1] for f in node.disk.iterdir()}) == 1, list(node.disk.iterdir())


def test_a_store_killed_while_it_loads_leaves_nothing_that_the_next_does_not_remove():
    for delay in (0.03, 0.06, 0.1, 0.15):
        with disk_node(start=False) as node:
            store = node.start("weightstore")
            time.sleep(delay)
            store.send_signal(signal.SIGKILL)
            store.wait()
            node.start("weightstore")
            wait_for("an image", lambda: image(node), 30)
            assert len({f.name.split(".")[-1] for f in node.disk.iterdir()}) == 1, list(node.disk.iterdir())


def test_what_does_not_fit_is_refused_with_both_numbers():
    for limit, words in ((1_000_000, "holds less than what must be in memory"),):
        with disk_node(limit=limit, start=False) as node:
            code = node.start("weightstore").wait(30)
            assert code != 0 and words in node.log("weightstore"), (code, node.log("weightstore"))
            assert not list(node.disk.iterdir())
    with Node(config="weightstore.image_bytes_max = 1", start=False) as node:
        assert node.start("weightstore").wait(30) == 78
        assert "needs weightstore.disk_dir" in node.log("weightstore")


def test_a_disk_that_loses_experts_under_running_workers_fails_requests_and_no_process():
    for more in ("", SLP, SLP.replace("prefill.path", 'prefill.expert_source = "image"\nprefill.path'), RINGS):
        with disk_node(more) as node:
            expected = answers(node)
            pids = {name: node.pid(name) for name in ("decode.0", "prefill.0", "weightstore")}
            whole = {f: f.read_bytes() for f in node.disk.iterdir()}
            for file in whole:
                with open(file, "r+b") as f:
                    f.truncate(8192)
            for prompt in ("A" + PROMPT, "A" + PROMPT * 20):  # none that has pages already
                answer = node.post("/v1/completions", {"prompt": prompt, "max_tokens": 4})
                assert answer.status == 500 and b"truncated" in answer.body and node.disk.name.encode() in answer.body, (more, answer.status, answer.body)
            assert node.get("/health").status == 200
            for file, text in whole.items():
                with open(file, "r+b") as f:
                    f.write(text)
            assert answers(node) == expected, more
            assert {name: node.pid(name) for name in pids} == pids


def test_a_disk_part_that_was_cut_is_not_adopted():
    with disk_node(start=False) as node:
        node.start("weightstore")
        first = wait_for("an image", lambda: image(node), 30)
        node.terminate("weightstore")
        for file in node.disk.iterdir():
            with open(file, "r+b") as f:
                f.truncate(file.stat().st_size - 4096)
        node.start("weightstore")
        second = wait_for("another image", lambda: image(node), 30)
        assert second["id"] != first["id"]
        assert "hearth." in node.log("weightstore") and "removing what is left of generation" in node.log("weightstore")


if __name__ == "__main__":
    run_tests(globals())

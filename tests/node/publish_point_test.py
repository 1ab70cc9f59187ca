#!/usr/bin/env python3
"""Each process killed (-9) and stopped (SIGSTOP, SIGCONT) at its publish points, under work: nothing is reclaimed while its writer lives,
nothing is lost after it dies. docs/shared-memory.md lists the points."""
import os
import signal
import threading
import time

from harness import Node, run_tests, wait_for

PROMPT = "Once upon a time there was a king who had three sons, and the youngest was called"
OPTIONS = {"max_tokens": 80, "ignore_eos": True, "return_token_ids": True, "logprobs": 1, "temperature": 0.8, "seed": 4}

WORKER_POINTS = ["kv.rows", "kv.token_ids", "kv.prefill_tokens", "kv.tokens_valid"]


def ask(node, results, **more):
    results.append(node.completion(PROMPT, **{**OPTIONS, **more})["choices"])


def expected():
    with Node() as node:
        results = []
        ask(node, results)
        return results[0]


def start_with_trap(node, trapped, point):
    for kind in ("weightstore", "prefill.0", "decode.0", "router"):
        node.start(kind, {"HEARTH_PUBLISH_POINT": point} if kind == trapped else None)


def stopped(pid):
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rsplit(")", 1)[1].split()[0] in "Tt"


def answered_in_spite_of(trapped, point, whole, config="", pause=0, **more):
    """The worker `trapped` is killed or stopped at `point` ("name:nth:action") in the middle of an answer; started or woken again, the answer is `whole`."""
    with Node(config=config, start=False) as node:
        start_with_trap(node, trapped, point)
        node.wait_ready()
        wait_for(f"{trapped} is ready", lambda: node.status()["workers"][trapped]["state"] == "ready")
        results = []
        thread = threading.Thread(target=ask, args=(node, results), kwargs=more)
        thread.start()
        if point.endswith(":kill"):
            wait_for("death", lambda: node.processes[trapped].poll() is not None)
            node.start(trapped)
        else:
            wait_for("stop", lambda: stopped(node.pid(trapped)))
            rows = int(node.status()["weightstore"]["pool"]["rows"])
            time.sleep(pause)
            assert int(node.status()["weightstore"]["pool"]["rows"]) == rows > 0
            node.signal(trapped, signal.SIGCONT)
        thread.join(60)
        assert results == [whole], (point, results and results[0][0]["text"][:200])
        wait_for("idle node", node.idle, 15)


def test_decode_at_every_point():
    whole = expected()
    for action in ("kill", "stop"):
        for point in WORKER_POINTS:
            for nth in (1, 2, 30):
                # Longer than the beat's patience: a suspect keeps its rows.
                answered_in_spite_of("decode.0", f"{point}:{nth}:{action}", whole, pause=3)


def test_prefill_at_every_point():
    through_prefill = "router.chunked_prefill_max_tokens = 0\nprefill.chunk_tokens = 7"
    whole = expected()
    for action, nths in (("kill", (1, 2)), ("stop", (2,))):
        for point in WORKER_POINTS:
            for nth in nths:
                # Shorter than the router's patience: the stream stays with it, and its rows stay its own.
                answered_in_spite_of("prefill.0", f"{point}:{nth}:{action}", whole, config=through_prefill, pause=1)


def test_decode_dies_between_a_full_page_and_its_seal():
    """The next worker inherits a full page that nobody asked to publish; it must not stand in the way of the pages behind it."""
    long = {"max_tokens": 400}
    with Node() as node:
        whole = []
        ask(node, whole, **long)
        prompt_tokens = len(node.post("/tokenize", {"content": PROMPT, "add_special": True}).json()["tokens"])
    # The first publication is the prompt's, all but its last token; then one a token: this one fills page 0.
    fills = 64 - (prompt_tokens - 1) + 1
    for nth in (fills - 1, fills, fills + 1):
        answered_in_spite_of("decode.0", f"kv.tokens_valid:{nth}:kill", whole[0], **long)


def test_store_at_every_point():
    """The store killed or stopped after each single store into its table, from the first to far into the work."""
    whole = expected()
    for action in ("kill", "stop"):
        for nth in (1, 5, 12, 20, 33, 47, 60):
            with Node(start=False) as node:
                start_with_trap(node, "weightstore", f"table_store:{nth}:{action}")
                results = []

                def until_ready_then_ask():
                    node.wait_ready()
                    ask(node, results)
                thread = threading.Thread(target=until_ready_then_ask)
                thread.start()
                if action == "kill":
                    wait_for("death", lambda: node.processes["weightstore"].poll() is not None or not thread.is_alive(), 30)
                    if node.processes["weightstore"].poll() is not None:
                        node.start("weightstore")
                else:
                    wait_for("stop", lambda: stopped(node.pid("weightstore")) or not thread.is_alive(), 30)
                    time.sleep(1)
                    os.kill(node.pid("weightstore"), signal.SIGCONT)
                thread.join(90)
                assert results == [whole], (action, nth, results)
                wait_for("idle node", node.idle, 20)


def test_store_killed_while_publishing_an_image():
    for point, nth in (("region.allocated", 1), ("region.loading", 1), ("region.loading", 2), ("image.weights", 1), ("image.rows", 1), ("image.segment_ready", 1), ("region.loading", 3), ("image.ready", 1)):
        with Node(start=False) as node:
            node.start("weightstore", {"HEARTH_PUBLISH_POINT": f"{point}:{nth}:kill"})
            node.processes["weightstore"].wait(30)
            left = node.regions()
            assert left, point
            node.start("weightstore")
            for kind in ("decode.0", "prefill.0", "router"):
                node.start(kind)
            node.wait_ready()
            adopted = node.status()["weightstore"]["generations"][-1]["adopted"]
            assert adopted == (point == "image.ready"), (point, adopted)
            generations = {r.rsplit(".", 1)[1] for r in node.regions() if len(r.rsplit(".", 1)[1]) == 32}
            assert len(generations) == 1, ("leftovers", point, node.regions())
            assert node.completion("Once", max_tokens=3)["choices"][0]["text"]


if __name__ == "__main__":
    run_tests(globals())

#!/usr/bin/env python3
"""Prompts and running streams on the same cores: they take turns (docs/shared-memory.md, "Turn board"), no answer depends on it, and neither waits for a
process that is gone. And the path that the router chooses by what it has measured. How much it spares a stream: tests/bench/turns_bench.py."""
import threading

from harness import Node, run_tests, wait_for

STREAM = {"prompt": "Once upon a time there was a king", "max_tokens": 600, "ignore_eos": True, "return_token_ids": True, "temperature": 0.7, "seed": 3}
LONG = [10 + i * 7919 % 1000 for i in range(2400)]
AFTER_LONG = {"max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
BY_PREFILL = "router.chunked_prefill_max_tokens = 64\nweightstore.reuse_decoded_pages = false"
SLP = BY_PREFILL + '\nprefill.path = "slp"\nprefill.device_memory_bytes = 64000000\nprefill.chunk_tokens = 256'


def stream(node):
    return node.completion(STREAM["prompt"], **{k: v for k, v in STREAM.items() if k != "prompt"})["choices"]


def long(node):
    return node.completion(LONG, **AFTER_LONG)["choices"]


def prompts(node, worker):
    return node.status()["workers"][worker]["prompts"]


class Together:
    """A stream that runs, and behind its first tokens a long prompt."""

    def __init__(self, node):
        self.answers = {}
        self.threads = [threading.Thread(target=self._run, args=(name, ask, node)) for name, ask in (("stream", stream), ("long", long))]
        self.threads[0].start()
        wait_for("a running stream", lambda: int(node.status()["workers"]["decode.0"]["tokens_total"]) > 5)
        self.threads[1].start()

    def _run(self, name, ask, node):
        self.answers[name] = ask(node)

    def join(self):
        for thread in self.threads:
            thread.join(120)
        return self.answers


def alone(config=BY_PREFILL):
    with Node(config=config) as node:
        return {"stream": stream(node), "long": long(node)}


def test_they_take_turns_and_answer_as_alone():
    whole = alone()
    for config in (BY_PREFILL, SLP, BY_PREFILL + "\ndecode.tpot_target_ms = 20"):
        with Node(config=config) as node:
            assert Together(node).join() == whole, config
            by_prefill, by_decode = prompts(node, "prefill.0"), prompts(node, "decode.0")
            assert by_prefill["shares_cores"], by_prefill
            assert int(by_prefill["ops_held_back"]) > 0, by_prefill
            assert int(by_decode["windows"]) > 0 and by_decode["share"] > 0, by_decode
            wait_for("the router's look at its workers", lambda: node.get("/metrics").body.decode().count("hearth_prefill_ops_held_back{") == 1, 5)
            assert "turns: prompts get" in node.command("status")[1]
            wait_for("idle node", node.idle)


def test_a_chunk_in_decode_is_paid_from_slack():
    config = "router.chunked_prefill_max_tokens = 100000\nweightstore.reuse_decoded_pages = false"
    whole = alone(config)
    with Node(config=config + "\ndecode.chunk_tokens = 512") as node:
        assert Together(node).join() == whole
        passes = prompts(node, "decode.0")["passes"]
        assert passes and max(p["tokens"] for p in passes) <= 512, passes


def test_decode_killed_in_mid_prefill_holds_nobody():
    """Killed in a window (its word says: go on), between two of them (it says: wait), and inside a publication (it says nothing)."""
    whole = alone()
    for point in ("turn.window:3", "turn.value:400", "turn.value:401"):
        with Node(config=BY_PREFILL, start=False) as node:
            for kind in ("weightstore", "prefill.0", "decode.0", "router"):
                node.start(kind, {"HEARTH_PUBLISH_POINT": point + ":kill"} if kind == "decode.0" else None)
            node.wait_ready()
            node.wait_worker("prefill.0")
            both = Together(node)
            wait_for("death", lambda: node.processes["decode.0"].poll() is not None)
            # The prompt is computed to its end though nobody decodes.
            wait_for("the pass's end", lambda: int(node.status()["workers"]["prefill.0"]["prefill_tokens_total"]) >= len(LONG) - 1)
            node.start("decode.0")
            assert both.join() == whole, point
            wait_for("idle node", node.idle)


def test_prefill_killed_in_mid_pass_leaves_decode_no_window():
    whole = alone()
    with Node(config=BY_PREFILL, start=False) as node:
        for kind in ("weightstore", "prefill.0", "decode.0", "router"):
            node.start(kind, {"HEARTH_PUBLISH_POINT": "turn.value:300:kill"} if kind == "prefill.0" else None)
        node.wait_ready()
        node.wait_worker("prefill.0")
        both = Together(node)
        wait_for("death", lambda: node.processes["prefill.0"].poll() is not None)
        node.start("prefill.0")
        assert both.join() == whole
        wait_for("idle node", node.idle)


def test_without_the_board_all_goes_on():
    with Node(config=BY_PREFILL, start=False) as node:
        node.start("weightstore")
        board = wait_for("the board", lambda: list(node.shm.glob(f"hearth.{node.name}.turns.*")))
        wait_for("an image", lambda: node.status()["weightstore"]["generations"])
        board[0].unlink()
        for kind in ("prefill.0", "decode.0", "router"):
            node.start(kind)
        node.wait_ready()
        node.wait_worker("prefill.0")
        assert set(Together(node).join()) == {"stream", "long"}
        assert "will slow each other down" in node.log("prefill.0"), node.log("prefill.0")
        # The next store makes it anew, the next workers find it.
        for name in ("weightstore", "prefill.0", "decode.0"):
            node.restart(name)
        wait_for("the board", lambda: list(node.shm.glob(f"hearth.{node.name}.turns.*")))


def test_a_restarted_store_adopts_the_board_in_use():
    with Node(config=BY_PREFILL) as node:
        def board():
            return [(path.name, path.stat().st_ino) for path in node.shm.glob(f"hearth.{node.name}.turns.*")]
        before = board()
        node.restart("weightstore")
        wait_for("adoption", lambda: node.log("weightstore").count("READY") == 2)
        assert len(before) == 1 and board() == before, (before, board())
        wait_for("the workers' return", lambda: node.get("/health").status == 200 and all(w["state"] == "ready" for w in node.status()["workers"].values()))
        Together(node).join()
        assert int(prompts(node, "prefill.0")["ops_held_back"]) > 0 and int(prompts(node, "decode.0")["windows"]) > 0, node.status()["workers"]
        for name in ("router", "decode.0", "prefill.0", "weightstore"):
            node.terminate(name)
        assert "removed 5 regions" in node.command("drop")[1] and board() == []


def test_the_path_follows_what_was_measured():
    with Node(config='router.path_choice = "auto"\nweightstore.reuse_decoded_pages = false\nrouter.chunked_prefill_max_tokens = 300') as node:
        def paths():
            return node.status()["router"]["paths"]
        assert not paths().get("by_time", False) and int(paths()["prefill_from_tokens"]) == 301, paths()
        answers = []
        for i in range(4):
            for size in (120, 280, 900, 2000):
                answers.append(node.completion([11 + i] + LONG[:size], max_tokens=4))
        wait_for("both ways measured", lambda: paths().get("by_time"))
        costs = {c["way"]: c for c in paths()["costs"]}
        assert set(costs) == {"decode chunked", "prefill chunked"} and all(int(c["passes"]) > 0 for c in costs.values()), costs
        for i in range(4):
            for size in (100, 200, 1000, 2000):
                answers.append(node.completion([21 + i] + LONG[:size], max_tokens=4))
        trust = {p["way"]: p for p in paths()["predictions"]}
        assert sum(int(p["count"]) for p in trust.values()) >= 8, trust
        out = node.command("status")[1]
        assert "by predicted time on an idle node" in out and "real / predicted" in out, out
        print(out[out.index("Prompts:"):])


def test_a_promise_that_would_be_broken_is_refused():
    with Node(config="router.ttft_slo_ms = 1\nweightstore.reuse_decoded_pages = false") as node:
        for _ in range(3):
            node.completion(LONG, max_tokens=2, wait_in_queue=True)
        wait_for("costs", lambda: node.status()["router"]["paths"].get("costs"))
        refused = node.post("/v1/completions", {"model": "m", "prompt": LONG, "max_tokens": 2})
        assert refused.status == 429 and refused.json()["error"]["code"] == "ttft_slo" and int(refused.headers["Retry-After"]) >= 1, refused.body
        node.completion(LONG, max_tokens=2, wait_in_queue=True)


if __name__ == "__main__":
    run_tests(globals())

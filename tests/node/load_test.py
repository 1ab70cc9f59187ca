#!/usr/bin/env python3
"""64 concurrent streams of mixed lengths (HEARTH_LOAD_SECONDS, default 60): no error, no cross-talk (each greedy answer equals its solo answer, with
reuse_decoded_pages = false), memory flat, nothing left behind."""
import os
import random
import threading
import time

from harness import Node, run_tests, wait_for

SECONDS = float(os.environ.get("HEARTH_LOAD_SECONDS", "60"))
STREAMS = 64
WORDS = "king queen wolf forest apple gold river stone bread night ship tower star fox bird crown".split()


def prompts(count, seed):
    rng = random.Random(seed)
    return [f"Once upon a time there was a {rng.choice(WORDS)} and a {rng.choice(WORDS)} " + " ".join(rng.choice(WORDS) for _ in range(rng.choice([0, 3, 20, 90, 200]))) for _ in range(count)]


def private_bytes(node):
    return {name: int(w["resident_private_bytes"]) for name, w in node.status()["workers"].items()}


def router_rss(node):
    with open(f"/proc/{node.pid('router')}/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmRSS"))


def test_64_streams():
    jobs = [(p, 8 + 7 * (i % 9)) for i, p in enumerate(prompts(48, 5))]
    with Node(config="weightstore.reuse_decoded_pages = false\nrouter.chunked_prefill_max_tokens = 100") as node:
        solo = [node.completion(p, max_tokens=n, return_token_ids=True, ignore_eos=True)["choices"][0] for p, n in jobs]
        end = time.monotonic() + SECONDS
        done, errors, lock = [0], [], threading.Lock()

        def client(number):
            rng = random.Random(number)
            while time.monotonic() < end and not errors:
                index = rng.randrange(len(jobs))
                prompt, tokens = jobs[index]
                text, ids = "", []
                try:
                    with node.stream("/v1/completions", {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}) as events:
                        for event in events:
                            for choice in event["choices"]:
                                text += choice["text"]
                                ids += choice.get("token_ids") or []
                    if (text, ids) != (solo[index]["text"], solo[index]["token_ids"]):
                        raise AssertionError(f"prompt {index}: {ids} instead of {solo[index]['token_ids']}")
                except Exception as e:  # noqa: BLE001
                    with lock:
                        errors.append(f"client {number}: {e!r}")
                    return
                with lock:
                    done[0] += 1
        threads = [threading.Thread(target=client, args=(i,)) for i in range(STREAMS)]
        for t in threads:
            t.start()
        time.sleep(SECONDS / 3)
        middle = private_bytes(node), router_rss(node)
        for t in threads:
            t.join(SECONDS + 120)
        assert not errors, errors[:3]
        assert done[0] >= STREAMS, done[0]
        late = private_bytes(node), router_rss(node)
        for name in late[0]:
            assert late[0][name] <= middle[0][name] * 1.1 + (8 << 20), (name, middle, late)
        assert late[1] <= middle[1] * 1.2 + (16 << 20), (middle, late)
        wait_for("idle node", node.idle, 15)
        router = node.status()["router"]
        print(f"     {done[0]} answers from {STREAMS} streams in {SECONDS:.0f} s, TTFT p50 {router['ttft']['p50_ms']:.0f} ms p99 {router['ttft']['p99_ms']:.0f} ms, "
              f"TPOT p50 {router['tpot']['p50_ms']:.1f} ms; private MB {[round(v / 1e6) for v in late[0].values()]}, router RSS {late[1] / 1e6:.0f} MB")


if __name__ == "__main__":
    run_tests(globals())

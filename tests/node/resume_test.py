#!/usr/bin/env python3
"""A decode worker killed after every k-th token of a 200-token answer: text, token ids and logprobs equal an undisturbed run's, greedy and
sampled, with penalties, stop strings and logprobs. The client sees a pause and no repeated, missing or different token."""
import ctypes
import os
import re
import contextlib
import http.client
import json
import random
import signal
import sys
import tempfile
import threading
import time
import traceback

from harness import Node, run_tests, wait_for

PROMPT = "Once upon a time there was a king who had three sons, and the youngest was called"
CASES = {
    "greedy": {"temperature": 0, "logprobs": 4},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 11, "logprobs": 2},
    "penalties": {"temperature": 0.7, "seed": 3, "presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": 1.1, "logprobs": 1},
    "min_p and bias": {"temperature": 1.1, "seed": 8, "min_p": 0.05, "logit_bias": {"14": -2, "16": 1.5}, "logprobs": 1},
}
TOKENS = 200


def answer(node, options, kill_every=0):
    """Streams an answer; kills the decode worker after every kill_every-th token that arrives."""
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True, **options}
    text, ids, logprobs, kills, since = "", [], [], 0, 0
    with node.stream("/v1/completions", body) as events:
        for event in events:
            for choice in event["choices"]:
                text += choice["text"]
                new = choice.get("token_ids") or []
                ids += new
                since += len(new)
                if choice.get("logprobs"):
                    logprobs += list(zip(choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"],
                                         [sorted(t.items()) for t in choice["logprobs"]["top_logprobs"] or []]))
            if kill_every and since >= kill_every and len(ids) < TOKENS:
                since = 0
                kills += 1
                node.kill("decode.0")
                node.start("decode.0")
    return text, ids, logprobs, kills


def test_killed_after_every_kth_token():
    with Node() as node:
        for name, options in CASES.items():
            whole = answer(node, options)
            assert len(whole[1]) == TOKENS and len(whole[2]) == TOKENS, (name, len(whole[1]), len(whole[2]))
            for every in (67, 29):
                disturbed = answer(node, options, every)
                assert disturbed[3] >= TOKENS // every - 1, disturbed[3]
                assert disturbed[1] == whole[1], (name, every, next(i for i, (a, b) in enumerate(zip(disturbed[1], whole[1])) if a != b))
                assert disturbed[2] == whole[2], (name, every)
                assert disturbed[0] == whole[0], (name, every)
                print(f"     {name}: killed {disturbed[3]} times, every {every} tokens: equal", flush=True)
        wait_for("idle node", node.idle, 10)


def test_killed_in_mid_speculation():
    """Without drafts, with three a step, and with as many as pay, the decode worker killed on the way: the same ids, logprobs and text."""
    with Node(config="decode.speculation = 0") as node:
        plain = {name: answer(node, options)[:3] for name, options in CASES.items()}
    for depth, every in (("3", 0), ("3", 31), ('"auto"', 47)):
        with Node(config=f"decode.speculation = {depth}") as node:
            for name, options in CASES.items():
                disturbed = answer(node, options, every)
                assert disturbed[:3] == plain[name], (depth, every, name)
            worker = node.status()["workers"]["decode.0"]
            assert worker["speculation"] == depth.strip('"'), worker
            if not every:
                assert int(worker["drafts_accepted_total"]) > 50, worker
                assert int(worker["tokens_total"]) == int(worker["stream_steps_total"]) + int(worker["drafts_accepted_total"]), worker
                metrics = node.get("/metrics").body.decode()
                assert 'hearth_drafts_accepted_total{worker="decode.0"}' in metrics, metrics[-2000:]
            wait_for("idle node", node.idle, 10)


def test_killed_with_an_fp8_cache():
    """Pages of FP8 are handed over as those of BF16 are, with drafts on the way."""
    plain = {}
    for depth in (0, 3):
        with Node(config=f'node.kv_dtype = "fp8"\ndecode.speculation = {depth}') as node:
            for name, options in CASES.items():
                whole = answer(node, options)[:3]
                assert answer(node, options, 41)[:3] == whole, (depth, name)
                assert plain.setdefault(name, whole) == whole, (depth, name)
            wait_for("idle node", node.idle, 10)


def test_killed_with_stop_strings():
    with Node() as node:
        # A stop string that really occurs: taken from the undisturbed answer, across token borders.
        whole = answer(node, {"temperature": 0})
        middle = len(whole[0]) // 2
        stop = whole[0][middle:middle + 9]
        expected = whole[0][:whole[0].index(stop)]
        options = {"temperature": 0, "stop": [stop, "never to be found"]}
        assert answer(node, options)[0] == expected
        assert answer(node, options, 25)[0] == expected
        wait_for("idle node", node.idle, 10)


def test_sampled_streams_in_a_batch_resume_each_for_itself():
    with Node() as node:
        names = list(CASES)
        solo = {n: answer(node, CASES[n])[:3] for n in names}
        results = {}

        def run(n):
            results[n] = answer(node, CASES[n])[:3]
        threads = [threading.Thread(target=run, args=(n,)) for n in names]
        for t in threads:
            t.start()
        for _ in range(3):
            wait_for("tokens", lambda: int(node.status()["workers"]["decode.0"]["tokens_total"]) > 40)
            node.restart("decode.0")
            node.wait_ready()
        for t in threads:
            t.join()
        for n in names:
            assert results[n] == solo[n], n
        assert int(node.status()["router"]["resumes_total"]) >= 4


def test_busy_decode_worker_is_asked_to_stop():
    """SIGTERM while a stream runs: exit code 0, and the stream goes on in the next worker with the same tokens."""
    with Node() as node:
        options = {"prompt": PROMPT, "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
        whole = node.completion(**options)["choices"][0]["text"]
        for attempt in range(6):
            with node.stream("/v1/completions", options) as events:
                text = "".join(next(events)["choices"][0]["text"] for _ in range(5 + 40 * attempt))
                assert node.terminate("decode.0") == 0, node.log("decode.0")[-600:]
                node.start("decode.0")
                text += "".join(c["text"] for e in events for c in e["choices"])
            assert text == whole, attempt


# A prompt and its answer, by which passes that were disturbed are judged.
PASS_OPTIONS = {"max_tokens": 20, "logprobs": 2, "return_token_ids": True}


def long_prompt():
    from basics_test import GOLDEN
    return next(p for p in GOLDEN["prompts"] if p["n_tokens"] >= 300)["ids"]


def undisturbed(prompt, config):
    with Node(config=config) as node:
        return node.completion(prompt, **PASS_OPTIONS)["choices"]


@contextlib.contextmanager
def node_with_a_trap(config, trapped, point):
    """A ready node, one of whose processes kills itself at the publish point."""
    with Node(config=config, start=False) as node:
        for kind in ("weightstore", "prefill.0", "decode.0", "router"):
            node.start(kind, {"HEARTH_PUBLISH_POINT": point + ":kill"} if kind == trapped else None)
        node.wait_ready()
        node.wait_worker("prefill.0")
        yield node


def answer_across_its_death(node, trapped, prompt, when_dead=lambda: None):
    """The answer to a prompt during which `trapped` dies and is started again."""
    results = []
    thread = threading.Thread(target=lambda: results.append(node.completion(prompt, **PASS_OPTIONS)["choices"]))
    thread.start()
    wait_for(f"{trapped}'s death", lambda: node.processes[trapped].poll() is not None)
    when_dead()
    node.start(trapped)
    thread.join()
    assert len(results) == 1, "no answer"
    return results[0]


def test_prefill_worker_killed_in_mid_pass():
    prompt, config = long_prompt(), "router.chunked_prefill_max_tokens = 0\nprefill.chunk_tokens = 16"
    whole = undisturbed(prompt, config)
    for nth in (1, 7, 20):
        with node_with_a_trap(config, "prefill.0", f"kv.token_ids:{nth}") as node:
            assert answer_across_its_death(node, "prefill.0", prompt) == whole, nth
            wait_for("idle node", node.idle, 10)


SLP = 'router.chunked_prefill_max_tokens = 0\nprefill.path = "slp"\nprefill.chunk_tokens = 16\nprefill.device_memory_bytes = 24000000'


def test_streaming_prefill_worker_killed_in_mid_pass():
    """Weights streamed through a device that holds a part of a layer, the worker killed in the first, a middle and the last layer of the pass: what the
    chunked path answers."""
    prompt = long_prompt()
    whole = undisturbed(prompt, "router.chunked_prefill_max_tokens = 0")
    pages = -(-(len(prompt) - 1) // 64)
    for layer in (0, 3, 6):
        with node_with_a_trap(SLP, "prefill.0", f"kv.progress:{layer * pages + 1}") as node:
            assert answer_across_its_death(node, "prefill.0", prompt) == whole, layer
            assert "weights are streamed" in node.log("prefill.0"), node.log("prefill.0")
            wait_for("idle node", node.idle, 10)


RINGS = SLP + '\nprefill.expert_source = "ring"\nprefill.ring_slots = 3\nweightstore.numa_shards = 2'


def ring_files(node):
    return sorted(p.name for p in node.shm.glob(f"hearth.{node.name}.ring*"))


def test_rings_go_with_their_worker_and_come_back_with_the_store():
    """Experts through the store's rings: the answers of the image. The worker killed in mid-pass, at each of its stores into a ring: the store gives the rings
    back without a restart. The store killed in mid-pass, at each of its: the worker goes on, and the next store fills the same rings."""
    prompt = long_prompt()
    whole = undisturbed(prompt, "router.chunked_prefill_max_tokens = 0\nweightstore.numa_shards = 2")
    for trapped, points in (("prefill.0", ("ring.request:40", "ring.posted:101", "ring.posted_bell:9", "ring.unwanted:30")),
                            ("weightstore", ("ring.record:60", "ring.outcome:13", "ring.filled:88", "ring.filled_bell:31"))):
        for point in points:
            with node_with_a_trap(RINGS, trapped, point) as node:
                store, before = node.pid("weightstore"), ring_files(node)
                assert len(before) == 2, before

                def reclaimed():
                    if trapped == "prefill.0":
                        wait_for("rings reclaimed", lambda: not ring_files(node), 5)
                assert answer_across_its_death(node, trapped, prompt, reclaimed) == whole, point
                wait_for("idle node", node.idle, 10)
                assert (node.pid("weightstore") == store) == (trapped == "prefill.0")
                rings = node.status()["weightstore"]["rings"]
                assert [(r["worker"], r.get("shard", 0), r["slots"]) for r in rings] == [("prefill.0", 0, 3), ("prefill.0", 1, 3)], rings
                assert (ring_files(node) == before) == (trapped == "weightstore"), point
                # Whoever was killed: the next prompt comes through the rings, once the router has met their worker.
                node.wait_worker("prefill.0")
                filled = [int(r.get("records", 0)) for r in rings]
                node.completion(prompt[7:], **PASS_OPTIONS)
                rings = node.status()["weightstore"]["rings"]
                assert all(int(r["records"]) > f + 20 for r, f in zip(rings, filled)), (point, filled, rings)
                assert node.terminate("prefill.0", timeout=6) == 0
                wait_for("rings gone", lambda: not ring_files(node), 5)


def test_a_stopped_store_holds_up_no_pass():
    """SIGSTOP of the store while experts come through its rings: the pass goes on from the image."""
    with Node(config=RINGS) as node:
        whole = node.completion(PROMPT * 3, max_tokens=1, temperature=0)["choices"]
        results = []
        threads = [threading.Thread(target=lambda i=i: results.append(node.completion(f"{i} " + PROMPT * 12, max_tokens=1, temperature=0))) for i in range(4)]
        for t in threads:
            t.start()
        time.sleep(0.05)
        node.signal("weightstore", signal.SIGSTOP)
        time.sleep(4)
        node.signal("weightstore", signal.SIGCONT)
        for t in threads:
            t.join()
        assert len(results) == 4
        assert node.completion(PROMPT * 3, max_tokens=1, temperature=0)["choices"] == whole
        wait_for("idle node", node.idle, 15)


def test_rings_that_do_not_fit_are_refused_with_numbers():
    """In a mount namespace of its own, with a tmpfs that holds the model and no ring of 4096 slots."""
    child = os.fork()
    if child == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        code = 1
        try:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as shm:
                private, recursive, namespace = 1 << 18, 1 << 14, 0x20000
                if (libc.unshare(namespace) or libc.mount(None, b"/", None, private | recursive, None)
                        or libc.mount(b"t", shm.encode(), b"tmpfs", 0, b"size=100m")):
                    sys.exit(77)
                config = RINGS.replace("ring_slots = 3", "ring_slots = 4096") + f'\nnode.shm_dir = "{shm}"\nweightstore.kv_pool_tokens = 1024'
                with Node(config=config, start=False) as node:
                    node.start("weightstore")
                    node.start("prefill.0")
                    exit_code, log = node.processes["prefill.0"].wait(30), node.log("prefill.0")
                    assert exit_code == 78, (exit_code, log)
                    assert re.search(r"expert rings of 4096 slots for prefill.0 need .* in .*, which has .* left: lower prefill.ring_slots", log), log
                    assert not [p for p in os.listdir(shm) if ".ring" in p]
                libc.umount(shm.encode())
                code = 0
        except SystemExit as e:
            code = e.code
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 77:
        print("a mount of its own is not permitted here: not tried")
    else:
        assert code == 0, code


def test_streaming_prefill_is_killed_stopped_and_cancelled_under_load():
    """Prompts that share passes, while the worker is killed and asked to stop at any moment and clients leave: whoever stays gets the chunked path's answer."""
    prompts = [PROMPT * (3 + 2 * i) for i in range(5)]
    with Node(config="router.chunked_prefill_max_tokens = 0") as node:
        whole = [node.completion(p, max_tokens=3, temperature=0)["choices"] for p in prompts]
    # A client that leaves while its worker offers or dies may leave rows that only the orphans' grace reclaims.
    with Node(config=SLP + "\nweightstore.orphan_grace_ms = 2000") as node:
        stop, wrong, answers = threading.Event(), [], [0] * len(prompts)

        def client(i):
            while not stop.is_set():
                if node.completion(prompts[i], max_tokens=3, temperature=0, user="x")["choices"] != whole[i]:
                    wrong.append(i)
                answers[i] += 1

        def leaver():
            while not stop.is_set():
                with node.stream("/v1/completions", {"prompt": PROMPT * 30, "max_tokens": 3}):
                    time.sleep(0.03)
        threads = [threading.Thread(target=client, args=(i,)) for i in range(len(prompts))] + [threading.Thread(target=leaver)]
        for t in threads:
            t.start()
        for attempt in range(12):
            time.sleep(0.1 + 0.017 * (attempt % 7))
            if attempt % 2:
                node.kill("prefill.0")
            else:
                assert node.terminate("prefill.0", timeout=6) == 0, (attempt, node.log("prefill.0")[-600:])
            node.start("prefill.0")
            wait_for("prefill", lambda: (node.status()["workers"]["prefill.0"] or {}).get("state") == "ready")
        stop.set()
        for t in threads:
            t.join()
        assert not wrong and all(answers), (wrong, answers)
        wait_for("idle node", node.idle, 15)


def test_busy_prefill_worker_is_asked_to_stop():
    """SIGTERM at any moment of its work, also between the last chunk and the store's answer to its Offer: it ends, and the prompts go on."""
    prompts = [PROMPT * (3 + i) for i in range(4)]
    with Node(config="router.chunked_prefill_max_tokens = 0\nprefill.chunk_tokens = 16") as node:
        whole = [node.completion(p, max_tokens=3, temperature=0)["choices"] for p in prompts]
        stop, wrong = threading.Event(), []

        def client(i):
            while not stop.is_set():
                if node.completion(prompts[i], max_tokens=3, temperature=0, user="x")["choices"] != whole[i]:
                    wrong.append(i)
        threads = [threading.Thread(target=client, args=(i,)) for i in range(len(prompts))]
        for t in threads:
            t.start()
        for attempt in range(24):
            time.sleep(0.05 + 0.013 * (attempt % 7))
            assert node.terminate("prefill.0", timeout=6) == 0, (attempt, node.log("prefill.0")[-600:])
            node.start("prefill.0")
            wait_for("prefill", lambda: (node.status()["workers"]["prefill.0"] or {}).get("state") == "ready")
        stop.set()
        for t in threads:
            t.join()
        assert not wrong


def test_worker_dies_before_it_has_freed_what_ended():
    """The store hears of no Free between the answer's end and its worker's death: the router sees to it, long before the pages' grace (60 s) ends."""
    ways = {"ends by length": {"max_tokens": 40}, "ends by a stop string": {"max_tokens": 2000, "stop": ["e"]}, "is dropped by its client": {"max_tokens": 2000}}
    for store_is in ("stopped", "killed"):
        for way, options in ways.items():
            with Node() as node:
                with node.stream("/v1/completions", {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, **options}) as events:
                    next(events)
                    if store_is == "stopped":
                        node.signal("weightstore", signal.SIGSTOP)
                    else:
                        node.kill("weightstore")
                    for event in events:
                        if way == "is dropped by its client":
                            break
                node.kill("decode.0")
                node.start("decode.0")
                if store_is == "stopped":
                    node.signal("weightstore", signal.SIGCONT)
                else:
                    node.start("weightstore")
                node.wait_ready()
                wait_for(f"idle node: the store was {store_is}, the answer {way}", node.idle, 8)
                assert node.completion(PROMPT, max_tokens=5)["choices"][0]["text"]


def test_clients_that_leave_around_the_hand_off_leave_nothing():
    """Prefill has offered a prompt's pages just before it hears that the client is gone: nobody takes them, and nobody but the router knows that nobody will."""
    with Node(config="router.chunked_prefill_max_tokens = 0") as node:
        end = time.monotonic() + 8

        def client(seed):
            draw = random.Random(seed)
            while time.monotonic() < end:
                connection = http.client.HTTPConnection("127.0.0.1", node.http_port, timeout=5)
                body = {"model": "m", "prompt": [draw.randrange(300, 4000) for _ in range(draw.choice((65, 129, 300)))], "max_tokens": 3, "stream": True}
                with contextlib.suppress(OSError, http.client.HTTPException):
                    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                    time.sleep(draw.random() * 0.03)
                connection.close()
        threads = [threading.Thread(target=client, args=(i,)) for i in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        wait_for("idle node", node.idle, 8)
        assert node.completion(PROMPT, max_tokens=5)["choices"][0]["text"]


if __name__ == "__main__":
    run_tests(globals())

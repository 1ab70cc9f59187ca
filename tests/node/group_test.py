#!/usr/bin/env python3
"""Prefill workers that share long prompts: two and four ranks give the answers of one worker, and whoever of them is killed or stopped at whatever point of a
shared pass, every request ends with the same tokens, every page comes back, and the store is not restarted."""
import contextlib
import os
import threading
import time

from harness import Node, run_tests, wait_for
from resume_test import PASS_OPTIONS, long_prompt

MORE = bool(os.environ.get("HEARTH_TEST_MORE"))  # more points at which a rank is killed
OPTIONS = {**PASS_OPTIONS, "max_tokens": 12}
BASE = "router.chunked_prefill_max_tokens = 0\nprefill.threads = 1\nprefill.chunk_tokens = 64"


def config(ranks, more=""):
    return f'{BASE}\nprefill.path = "slp"\nprefill.instances = {ranks}\nrouter.group_prefill_min_tokens = 100\n{more}'


def prompts(n, length=290):
    ids = long_prompt()
    return [(ids[11 * i:] + ids)[:length + 17 * i] for i in range(n)]


def workers(ranks):
    return [f"prefill.{i}" for i in range(ranks)]


def group_of(node, worker):
    return ((node.status()["workers"] or {}).get(worker) or {}).get("group") or {}


def wait_group(node, ranks, timeout=30):
    """Until all ranks are in one group, and the router may know of it: it asks its workers once a second."""
    def whole():
        ids = {int(group_of(node, w).get("id", 0)) for w in workers(ranks)}
        return len(ids) == 1 and 0 not in ids and ids.pop()
    found = wait_for("a whole group", whole, timeout)
    for w in workers(ranks):
        node.wait_worker(w)
    time.sleep(1.5)
    return found


@contextlib.contextmanager
def group_node(ranks, more="", trapped=None, point=None):
    """A node with a whole group; `trapped` sends itself a signal at the publish point."""
    with Node(config=config(ranks, more), start=False) as node:
        for name in ["weightstore", *workers(ranks), "decode.0", "router"]:
            node.start(name, {"HEARTH_PUBLISH_POINT": point} if name == trapped else None)
        node.wait_ready()
        node.group = wait_group(node, ranks)
        yield node


def ask_all(node, asked):
    """All at once; the answers in order."""
    answers = [None] * len(asked)

    def ask(i):
        answers[i] = node.completion(asked[i], **OPTIONS)["choices"]
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(asked))]
    for t in threads:
        t.start()
    return threads, answers


def answers_of(node, asked):
    threads, answers = ask_all(node, asked)
    for t in threads:
        t.join()
    return answers


EXPECTED = {}


def expected(n):
    """What one chunked prefill worker answers, once a run of this file."""
    if n not in EXPECTED:
        with Node(config=BASE) as node:
            EXPECTED[n] = answers_of(node, prompts(n))
    return EXPECTED[n]


def shared_passes(node, ranks):
    return [(int(group_of(node, w).get("passes_total", 0)), int(group_of(node, w).get("passes_failed_total", 0))) for w in workers(ranks)]


def group_files(node):
    return sorted(p.name for p in node.shm.glob(f"hearth.{node.name}.group-*"))


def test_two_and_four_ranks_answer_as_one():
    """Text, ids and logprobs; prompts one by one and several in a pass; the bytes that crossed are told."""
    whole = expected(5)
    for ranks in (2, 4):
        with group_node(ranks) as node:
            asked = prompts(5)
            assert [node.completion(p, **OPTIONS)["choices"] for p in asked[:2]] == whole[:2], ranks
            alone = shared_passes(node, ranks)
            assert all(passes == 2 and failed == 0 for passes, failed in alone), alone
            assert answers_of(node, asked[2:]) == whole[2:], ranks
            passes = shared_passes(node, ranks)
            assert len(set(passes)) == 1 and passes[0][0] > 2 and passes[0][1] == 0, passes
            for w in workers(ranks):
                sent = {t["name"]: int(t["bytes"]) for t in group_of(node, w)["sent"]}
                # Four choices a row: two ranks exchange sums, four send copies of rows (SmallEP and dispatch, by their bytes).
                assert all(sent[name] > 0 for name in ("kv", "rows", *(("gate", "sums") if ranks == 2 else ("counts", "outputs")))), sent
                assert (sent["call"] > 0) == (w == workers(ranks)[0]), f"the leader alone tells what the pass is: {w} {sent}"
            text = node.command("status", check=False)[1]
            assert f"prefill.0 rank 0 of {ranks}: {passes[0][0]} shared passes (0 failed); sent call" in text, text
            assert "Prefill group: ranks 0 prefill.0, 1 prefill.1" in text and "all there" in text, text
            def told():  # as of the router's last look at its workers, a second ago at most
                metrics = node.get("/metrics").body.decode()
                return 'hearth_prefill_group_whole{worker="prefill.1"} 1' in metrics and "hearth_prefill_group_sent_bytes{" in metrics
            wait_for("metrics of the group", told, 5)
            wait_for("idle node", node.idle, 10)


def test_short_prompts_are_computed_alone():
    with group_node(2) as node:
        ids = long_prompt()[:60]
        for i in range(4):
            node.completion(ids[i:], **OPTIONS)
        assert shared_passes(node, 2) == [(0, 0)] * 2
        status = node.status()["workers"]
        assert sum(int(status[w]["prefill_tokens_total"]) for w in workers(2)) > 100
    with group_node(2, 'prefill.group = "auto"\nnode.activation_terms = 1') as node:
        node.completion(long_prompt(), **OPTIONS)
        assert shared_passes(node, 2) == [(1, 0)] * 2
    with Node(config=config(2, 'prefill.group = "off"'), start=False) as node:
        for name in ["weightstore", *workers(2), "decode.0", "router"]:
            node.start(name)
        node.wait_ready()
        for w in workers(2):
            node.wait_worker(w)
        node.completion(long_prompt(), **OPTIONS)
        assert not group_of(node, "prefill.0") and not group_files(node)


def test_experts_through_each_ranks_own_rings():
    asked = prompts(2)
    with Node(config=BASE + "\nweightstore.numa_shards = 2") as node:
        whole = answers_of(node, asked)
    with group_node(2, 'prefill.expert_source = "ring"\nprefill.ring_slots = 3\nweightstore.numa_shards = 2') as node:
        assert answers_of(node, asked) == whole
        assert all(p > 0 and f == 0 for p, f in shared_passes(node, 2))
        rings = node.status()["weightstore"]["rings"]
        assert len(rings) == 4 and all(int(r.get("records", 0)) > 20 for r in rings), rings


def killed(ranks, trapped, point):
    """Requests while `trapped` kills itself in a shared pass: the same answers; it is started anew, and so is the group."""
    whole = expected(6)
    with group_node(ranks, trapped=trapped, point=f"{point}:kill") as node:
        store = node.pid("weightstore")
        threads, answers = ask_all(node, prompts(3))
        wait_for(f"{trapped}'s death at {point}", lambda: node.processes[trapped].poll() is not None)
        for t in threads:
            t.join(60)
        assert answers == whole[:3], (ranks, trapped, point)
        node.start(trapped)
        assert wait_group(node, ranks) != node.group
        before = shared_passes(node, ranks)
        assert answers_of(node, prompts(6)[3:]) == whole[3:], (ranks, trapped, point)
        wait_for("idle node", node.idle, 20)
        assert all(now[0] > then[0] for then, now in zip(before, shared_passes(node, ranks))), (before, shared_passes(node, ranks))
        assert node.pid("weightstore") == store and node.processes["weightstore"].poll() is None
        assert len(group_files(node)) == 1, group_files(node)
        print(f"     {ranks} ranks, {trapped} killed at {point}: equal", flush=True)


def test_leader_killed():
    """In the call, in a middle layer, and where it publishes."""
    more = ("exchange.started:1", "kv.progress:1", "kv.progress:33", "exchange.sent:25", "kv.token_ids:4") if MORE else ()
    for point in ("exchange.sent:2", "kv.progress:23", "kv.token_ids:1", *more):
        killed(2, "prefill.0", point)
    killed(4, "prefill.0", "kv.progress:11")


def test_member_killed():
    """Before it says that it computes, in the first layer, in a later one; in the call and after a pass."""
    more = ("exchange.started:1", "exchange.sent:3", "exchange.taken:5", "group.state:2") if MORE else ()
    for point in ("group.state:1", "exchange.started:2", "exchange.taken:21", *more):
        killed(2, "prefill.1", point)
    for trapped, point in (("prefill.3", "exchange.sent:20"), *([("prefill.2", "exchange.taken:50")] if MORE else [])):
        killed(4, trapped, point)


def test_leader_killed_while_a_member_is_stopped_in_the_pass():
    """The member could go on and write into the pages at any time: nobody gets them before the store has killed it."""
    whole = expected(3)
    with group_node(2, trapped="prefill.1", point="exchange.taken:20:stop") as node:
        threads, answers = ask_all(node, prompts(3))

        def stopped():
            with open(f"/proc/{node.pid('prefill.1')}/stat") as f:
                return f.read().rsplit(")", 1)[1].split()[0] == "T"
        wait_for("the member's stop", stopped)
        node.kill("prefill.0")
        node.start("prefill.0")
        time.sleep(3)
        # The former prefill.0 is gone, and its pages are still its own.
        leases = [lease for lease in node.status()["weightstore"]["leases"] if lease["name"] == "prefill.0"]
        assert leases and leases[0]["state"] != "dead" and int(leases[0].get("rows", 0)) > 0, leases
        wait_for("the member's end", lambda: node.processes["prefill.1"].poll() is not None, 30)
        for t in threads:
            t.join(60)
        assert answers == whole
        node.start("prefill.1")
        wait_group(node, 2)
        wait_for("idle node", node.idle, 20)
        assert "may be writing into pages of a rank that is gone" in node.log("weightstore")


def test_a_stopped_member_holds_up_no_request_for_long():
    """SIGSTOP of a member in mid-pass: the router sees it in a few seconds, and what it waits for goes on elsewhere."""
    whole = expected(3)
    with group_node(2, trapped="prefill.1", point="exchange.taken:20:stop") as node:
        threads, answers = ask_all(node, prompts(3))
        for t in threads:
            t.join(60)
        assert answers == whole
        # Its leader has ended, so that the store would see to it; it was killed when the pages were needed.
        for worker in workers(2):
            if node.processes[worker].poll() is not None:
                node.start(worker)
        wait_group(node, 2)
        wait_for("idle node", node.idle, 20)


def test_store_killed_in_mid_pass():
    """The ranks go on without it; the next store takes the group over."""
    whole = expected(3)
    with group_node(2) as node:
        for _ in range(2):
            threads, answers = ask_all(node, prompts(3))
            time.sleep(0.05)
            node.restart("weightstore")
            for t in threads:
                t.join(60)
            assert answers == whole
            assert wait_group(node, 2) == node.group, "the group of before"
        wait_for("idle node", node.idle, 10)
        node.kill("weightstore")
        node.kill("prefill.1")
        node.start("weightstore")
        node.start("prefill.1")
        assert wait_group(node, 2) != node.group
        assert answers_of(node, prompts(3)) == whole
        assert len(group_files(node)) == 1, group_files(node)


def test_a_cancelled_request_ends_the_pass_of_all_ranks():
    whole = expected(3)
    with group_node(2) as node:
        for delay in (0.0, 0.01, 0.03, 0.06):
            with contextlib.suppress(StopIteration), node.stream("/v1/completions", {"prompt": long_prompt() * 5, "max_tokens": 5}):
                time.sleep(delay)
            wait_for("idle node", node.idle, 10)
        assert answers_of(node, prompts(3)) == whole
        wait_for("idle node", node.idle, 10)


def test_ranks_asked_to_stop_under_load():
    """SIGTERM of a member and of the leader while prompts run: exit code 0 at once, every request is answered."""
    whole = expected(3)
    with group_node(2) as node:
        for worker in ("prefill.1", "prefill.0"):
            threads, answers = ask_all(node, prompts(3))
            time.sleep(0.04)
            assert node.terminate(worker) == 0
            node.start(worker)
            for t in threads:
                t.join(60)
            assert answers == whole, worker
            wait_group(node, 2)
        wait_for("idle node", node.idle, 10)


if __name__ == "__main__":
    run_tests(globals())

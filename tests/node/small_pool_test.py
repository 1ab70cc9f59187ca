#!/usr/bin/env python3
"""A KV pool that is too small for what is asked: streams wait, give spare pages back and are preempted; every answer still equals its solo answer."""
import concurrent.futures
import signal

from harness import Node, run_tests, wait_for


def requests(count, tokens):
    """Greedy and sampled ones in turn, each with a prompt of its own."""
    for i in range(count):
        sampling = dict(temperature=0.9, seed=i) if i % 2 else dict(temperature=0)
        yield dict(prompt=f"The fox number {i} said", max_tokens=tokens, ignore_eos=True, return_token_ids=True, **sampling)


def answer(node, request):
    choice = node.completion(**request)["choices"][0]
    return choice["text"], choice["token_ids"], choice["finish_reason"]


def together_as_alone(node, asked):
    alone = [answer(node, request) for request in asked]
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda request: answer(node, request), asked))
    for request, one, other in zip(asked, alone, together):
        assert one == other, (request, one, other)
    wait_for("every page is given back", node.idle, 10)


def with_pool(tokens, count, length):
    with Node(config=f"weightstore.kv_pool_tokens = {tokens}") as node:
        together_as_alone(node, list(requests(count, length)))
        resumes = int(node.status()["router"]["resumes_total"])
        print(f"{count} streams of {length} tokens in a pool of {tokens}: {resumes} resumes")
        # Each preemption costs a stream its place once; a stream that comes back waits for pages instead of taking them from others again.
        assert resumes < 20 * count, f"{resumes} resumes of {count} streams"


def test_sixteen_streams_in_eight_pages():
    with_pool(512, 16, 200)


def test_six_streams_of_which_four_fit():
    with_pool(1024, 6, 200)


def test_two_streams_of_which_one_fits():
    with_pool(512, 2, 400)


def test_two_decode_workers_do_not_wait_for_each_other():
    with Node(config="weightstore.kv_pool_tokens = 512\ndecode.instances = 2", start=False) as node:
        for name in ("weightstore", "prefill.0", "decode.0", "decode.1", "router"):
            node.start(name)
        node.wait_ready()
        together_as_alone(node, list(requests(4, 400)))


def test_long_prompts_through_prefill():
    with Node(config="weightstore.kv_pool_tokens = 1024\nrouter.chunked_prefill_max_tokens = 0") as node:
        asked = [dict(request, prompt=request["prompt"] * 20) for request in requests(8, 100)]
        together_as_alone(node, asked)


def test_decode_killed_while_the_pool_is_full():
    with Node(config="weightstore.kv_pool_tokens = 1024") as node:
        asked = list(requests(8, 200))
        alone = [answer(node, request) for request in asked]
        with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
            together = [pool.submit(answer, node, request) for request in asked]
            for _ in range(2):
                before = int(node.status()["router"]["completion_tokens_total"])
                wait_for("work", lambda: int(node.status()["router"]["completion_tokens_total"]) > before + 50, 20)
                node.signal("decode.0", signal.SIGKILL)
                node.processes["decode.0"].wait()
                node.start("decode.0")
            assert [f.result(60) for f in together] == alone
        wait_for("every page is given back", node.idle, 10)


if __name__ == "__main__":
    run_tests(globals())

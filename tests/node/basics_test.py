#!/usr/bin/env python3
"""A node answers: chat, completions, streaming, tokens, health, metrics, prefix reuse, both prefill paths, the operator's commands."""
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time

from harness import BIN, FABLE, SOURCE, Node, run_tests, wait_for

GOLDEN = json.loads((SOURCE / "tests/golden/fable-moe/golden.json").read_text())


def greedy_of(node, prompt_name):
    """Our greedy tokens and the reference's, up to the reference's first near-tie."""
    reference = next(g for g in GOLDEN["greedy"] if g["prompt"] == prompt_name)
    prompt = next(p for p in GOLDEN["prompts"] if p["name"] == prompt_name)
    sure = next((i for i, gap in enumerate(reference["top1_minus_top2"]) if gap < 0.25), len(reference["ids"]))
    choice = node.completion(prompt["ids"], max_tokens=len(reference["ids"]), ignore_eos=True, return_token_ids=True)["choices"][0]
    return choice["token_ids"][:sure], reference["ids"][:sure]


def test_golden_through_http():
    with Node() as node:
        for greedy in GOLDEN["greedy"]:
            ours, reference = greedy_of(node, greedy["prompt"])
            assert ours == reference and len(ours) > 0, (greedy["prompt"], ours, reference)


def test_a_bare_gguf_file_is_served_as_a_directory_of_its_numbers():
    """Everything comes out of the file: weights, config, tokenizer, chat template. Against the same numbers in F32 sums are rounded elsewhere: compared up to a near-tie."""
    prompt = next(p for p in GOLDEN["prompts"] if p["n_tokens"] >= 300)["ids"]

    def sure(choice):
        for i, likely in enumerate(choice["logprobs"]["top_logprobs"]):
            best = sorted(likely.values(), reverse=True)
            if len(best) < 2 or best[0] - best[1] < 0.05:
                return choice["token_ids"][:i]
        return choice["token_ids"]

    with tempfile.TemporaryDirectory(prefix="hearth-test-gguf-") as directory:
        written = subprocess.run([str(BIN.parent / "tests/write_gguf_model"), str(FABLE), directory], capture_output=True, text=True, check=True)
        gguf, plain = written.stdout.splitlines()
        assert os.listdir(os.path.dirname(gguf)) == [os.path.basename(gguf)], "nothing stands beside it"
        answers = []
        for model in (gguf, plain):
            with Node(model=model) as node:
                node.command("config")
                given = [sure(node.completion(p, max_tokens=40, ignore_eos=True, return_token_ids=True, logprobs=2)["choices"][0])
                         for p in (prompt, "Once upon a time", "The old clock in the hall")]
                text = [node.post("/tokenize", {"content": "Two  mice, 1234 <｜User｜> and é!", "add_special": True}).json(),
                        node.post("/apply-template", {"messages": [{"role": "user", "content": "Tell me a story."}]}).json(),
                        node.chat("Tell me the story of The Golden Apple.", max_tokens=5)["choices"][0]["message"]["content"]]
                answers.append((given, text))
        (ours, our_text), (theirs, their_text) = answers
        assert our_text == their_text and all(our_text), (our_text, their_text)
        for one, other in zip(ours, theirs):
            both = min(len(one), len(other))
            assert both >= 5 and one[:both] == other[:both], (one, other)


def test_long_prompts_go_through_the_prefill_worker_and_give_the_same_answer():
    prompt = next(p for p in GOLDEN["prompts"] if p["n_tokens"] >= 300)["ids"]
    answers = []
    for threshold in (0, 100000):
        with Node(config=f"router.chunked_prefill_max_tokens = {threshold}") as node:
            answers.append(node.completion(prompt, max_tokens=40, return_token_ids=True, logprobs=5)["choices"][0])
            by_prefill = int(node.status()["workers"]["prefill.0"]["prefill_tokens_total"])
            assert (by_prefill > 0) == (threshold == 0), by_prefill
            wait_for("idle node", node.idle)
    assert answers[0] == answers[1], "the two paths compute the same forms"


def test_prefix_reuse_survives_worker_restarts():
    prompt = next(p for p in GOLDEN["prompts"] if p["n_tokens"] >= 300)["ids"]
    with Node() as node:
        def ask():
            return node.completion(prompt, max_tokens=20, return_token_ids=True, logprobs=3)
        first = ask()
        assert first["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0) == 0
        again = ask()
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (len(prompt) - 1) // 64 * 64, cached
        assert again["choices"] == first["choices"]
        node.restart("decode.0")
        node.wait_ready()
        after = ask()
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        assert after["choices"] == first["choices"]


def test_streaming_equals_whole():
    with Node() as node:
        for path, body, text in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Tell me the story of The Golden Apple."}]}, lambda c: c["delta"].get("content") or ""),
                ("/v1/completions", {"prompt": "Once upon a time"}, lambda c: c["text"])):
            options = {"temperature": 0.8, "seed": 5, "max_tokens": 60}
            whole = node.post(path, {"model": "m", **body, **options}).json()
            with node.stream(path, {**body, **options, "stream_options": {"include_usage": True}}) as events:
                chunks = list(events)
            pieces = "".join(text(c) for chunk in chunks for c in chunk["choices"])
            expected = whole["choices"][0].get("text") or whole["choices"][0]["message"]["content"]
            assert pieces == expected, (pieces, expected)
            assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_stop_tokens_of_the_client():
    with Node() as node:
        prompt = dict(prompt="Once upon a time", max_tokens=40, ignore_eos=True, return_token_ids=True)
        whole = node.completion(**prompt)["choices"][0]
        ids = whole["token_ids"]
        stop = ids[11]
        first = ids.index(stop)
        cut = node.completion(**prompt, stop_token_ids=[stop])["choices"][0]
        assert cut["finish_reason"] == "stop" and cut["token_ids"] == ids[:first + 1], (cut, ids)
        assert whole["text"].startswith(cut["text"]), "a stop token's own text is not part of the answer"
        # Both spellings of one penalty.
        one, other = (node.completion(**prompt, **{name: 1.4})["choices"][0]["token_ids"] for name in ("repetition_penalty", "repeat_penalty"))
        assert one == other and one != ids, (one, other)


def test_stop_signal_in_the_first_moment_of_a_process():
    for delay in (0.004, 0.006, 0.008, 0.012, 0.02, 0.03):
        with Node(start=False) as node:
            for name in ("weightstore", "prefill", "decode", "router"):
                node.start(name)
                # Before main's first statement there are only the loader and the libraries' own start.
                wait_for(f"{name}: main has begun", lambda: blocked(node.pid(name)), 5, interval=0.0002)
                time.sleep(delay)
                node.signal(name, signal.SIGTERM)
                assert node.processes[name].wait(10) == 0, (name, delay, node.log(name))


def blocked(pid):
    mask = next(line for line in open(f"/proc/{pid}/status") if line.startswith("SigBlk:"))
    return int(mask.split()[1], 16) >> (signal.SIGTERM - 1) & 1


def test_client_gone_means_work_stopped():
    with Node() as node:
        with node.stream("/v1/completions", {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}) as events:
            for _ in range(5):
                next(events)
        start = time.monotonic()
        wait_for("idle node", node.idle, timeout=5)
        assert time.monotonic() - start < 3, "within a step, and the time to ask"
        assert int(node.status()["router"]["requests_cancelled"]) == 1


def test_health_and_models_and_metrics():
    with Node() as node:
        assert node.get("/v1/models").json()["data"][0]["id"] == "m"
        node.completion("Once", max_tokens=3)
        metrics = node.get("/metrics").body.decode()
        assert "ttft" in metrics and "tokens" in metrics, metrics[:500]
        node.kill("decode.0")
        wait_for("health to tell", lambda: node.get("/health").status == 503, timeout=8)
        node.start("decode.0")
        node.wait_ready(20)
        assert len(node.completion("Once", max_tokens=3)["choices"][0]["text"]) > 0


def test_operator_commands():
    with Node() as node:
        _, out, _ = node.command("run", "--temperature", "0", "--max-tokens", "12", "--raw", "Once upon a time")
        assert out.startswith(node.completion("Once upon a time", max_tokens=12)["choices"][0]["text"].rstrip("\n")[:20]), out
        _, out, err = node.command("verify")
        assert "agree with the manifest and with" in out, (out, err)
        _, out, _ = node.command("status")
        for word in ("weightstore", "prefill.0", "decode.0", "router", "KV pool", "tokens/s"):
            assert word in out, (word, out)
        code, _, err = node.command("drop", check=False)
        assert code == 1 and "running" in err, err


def test_what_a_worker_found_out_is_told():
    with Node() as node:
        memory = {name: w["memory"] for name, w in node.status()["workers"].items()}
        for name, m in memory.items():
            assert int(m["pages_looked_at"]) > 0 and int(m["pages_huge"]) <= int(m["pages_looked_at"]), m
            assert m["page_sizes"].startswith("2 MB ") and m["wrong_node"], m
        # fable-moe lies in the caches, where reading with and without is equally fast
        assert memory["decode.0"]["prefetch_on"] and memory["decode.0"]["prefetch"].startswith("on (not measured: "), memory
        assert memory["prefill.0"]["prefetch"] == "", memory
        out = node.command("status")[1]
        for line in ("decode.0 prefetch: on (", "decode.0 image pages: 2 MB ", "decode.0 pages on the wrong node: "):
            assert line in out, out
        metrics = node.get("/metrics").body.decode()
        for gauge in ("hearth_prefetch_on{", "hearth_image_pages_looked_at{", "hearth_image_pages_wrong_node{"):
            assert gauge in metrics, metrics


def test_what_streaming_passes_did_is_told():
    prompt = next(p for p in GOLDEN["prompts"] if p["n_tokens"] >= 300)["ids"][:259]
    # The second pass has three rows, which choose at most 12 of 32 experts, and not slots enough for all: those behind are not on their way when the gate speaks.
    slp = 'router.chunked_prefill_max_tokens = 0\nprefill.path = "slp"\nprefill.expert_source = "ring"\nprefill.device_memory_bytes = 6000000'
    with Node(config=slp) as node:
        assert "streamed" not in node.status()["workers"]["prefill.0"]
        for _ in range(2):
            node.completion(prompt, max_tokens=1)
        s = node.status()["workers"]["prefill.0"]["streamed"]
        # The second time only what is behind the last published page, and the position before it, whose hidden state the MTP module needs.
        assert int(s["passes"]) == 2 and int(s["tokens"]) == len(prompt) - 1 + (len(prompt) - 1) % 64 + 1, s
        assert int(s["experts_copied"]) + int(s["experts_skipped"]) == 2 * 5 * 32 and int(s["experts_skipped"]) > 0, s
        assert int(s["records_from_rings"]) + int(s["records_from_image"]) == int(s["experts_copied"]), s
        assert int(s["bytes_copied"]) > 3_000_000 and s["last_tokens_per_second"] > 0, s
        assert 0 < s["waited_for_copies_seconds"] < s["seconds"] and 0 < s["waited_for_slots_seconds"] < s["seconds"], s
        assert s["waited_for_rings_seconds"] <= s["seconds"], s
        out = node.command("status")[1]
        for line in ("prefill.0 streamed: 2 passes, ", "for copies (the link is the limit)", "prefill.0 rings: "):
            assert line in out, out

        def metrics():
            return node.get("/metrics").body.decode()
        wait_for("counters", lambda: 'hearth_streamed_total{what="passes",worker="prefill.0"} 2' in metrics(), 5)
        assert 'hearth_streamed_seconds_total{what="waited_for_copies",worker="prefill.0"} 0.' in metrics(), metrics()


def cpu_seconds(pid):
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_idle_workers_use_no_cpu():
    with Node() as node:
        node.completion("Once upon a time", max_tokens=40, ignore_eos=True)
        wait_for("idle node", node.idle)
        time.sleep(0.5)
        before = {name: cpu_seconds(node.pid(name)) for name in ("decode.0", "prefill.0")}
        time.sleep(3)
        for name, seconds in before.items():
            assert cpu_seconds(node.pid(name)) - seconds <= 0.06, name  # beats, status polls and the like


def test_every_order_of_a_step_gives_the_same_tokens_and_is_told():
    prompts = [p["ids"][:40] for p in GOLDEN["prompts"] if p["n_tokens"] >= 40][:3] * 2
    answers = {}
    for order in ("joint", "plain", "alternate", "auto"):
        with Node(config=f'decode.overlap = "{order}"') as node:
            got = [None] * len(prompts)

            def ask(i):
                # Long enough that the last prompt, which is paid from the others' slack, still finds them there.
                got[i] = node.completion(prompts[i], max_tokens=400, ignore_eos=True, return_token_ids=True, logprobs=1)["choices"][0]
            threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
            for t in threads:
                t.start()
            for t in threads:
                t.join(60)
            answers[order] = got
            worker = node.status()["workers"]["decode.0"]
            assert worker["step_order_pinned"] == (order != "auto"), worker
            shared = [o for o in worker["step_orders"] if int(o["streams"]) > 1]
            assert shared, worker
            if order == "auto":
                assert any(o["joint_ms"] > 0 and o["plain_ms"] > 0 and o["alternate_ms"] > 0 for o in shared), shared
                wait_for("gauges", lambda: b"hearth_step_order_seconds{" in node.get("/metrics").body, 5)
            else:
                assert all(o["chosen"] == order and o[order + "_ms"] > 0 for o in shared), shared
                assert "pinned by decode.overlap" in node.command("status")[1]
    assert all(a == answers["joint"] for a in answers.values()), "an order changed a token or a logprob"


def test_up_supervises():
    node = Node(start=False)
    with node:
        with node.supervised():
            first = node.completion("Once upon a time", max_tokens=30)["choices"][0]["text"]
            for kind in ("weightstore", "decode.0", "prefill.0"):
                status = node.status()
                pid = status["weightstore"]["pid"] if kind == "weightstore" else status["workers"][kind]["pid"]
                os.kill(pid, signal.SIGKILL)

                def back():
                    s = node.status()
                    now = s["weightstore"] if kind == "weightstore" else s["workers"].get(kind)
                    return now and now["pid"] != pid
                wait_for(f"{kind} to be restarted", back, 15)
                node.wait_ready(15)
                assert node.completion("Once upon a time", max_tokens=30)["choices"][0]["text"] == first
        assert node.regions(), "the image stays for the next start"
        node.command("drop")
        assert not node.regions()


def test_switch_to_a_second_generation():
    """`hearth load` under work: the running answer ends undisturbed, new ones queue and are served by the new weights; the old generation goes."""
    node = Node(start=False)
    with node:
        copy = node.dir / "other-model"
        shutil.copytree(FABLE, copy)
        with node.supervised():
            old = {r.rsplit(".", 1)[1] for r in node.regions()}
            whole = node.completion("Once upon a time", max_tokens=1500, ignore_eos=True)["choices"][0]["text"]
            with node.stream("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}) as events:
                text = next(events)["choices"][0]["text"]
                _, out, _ = node.command("load", str(copy))
                assert "is ready" in out, out
                text += "".join(c["text"] for e in events for c in e["choices"])
            assert text == whole

            def switched():
                s = node.status()
                return (s["weightstore"] and all(s["workers"].values()) and len(s["weightstore"]["generations"]) == 1
                        and s["weightstore"]["generations"][0]["model_dir"] == str(copy) and all(w["state"] == "ready" for w in s["workers"].values()))
            wait_for("the switch", switched, 30)
            node.wait_ready(20)
            assert whole.startswith(node.completion("Once upon a time", max_tokens=40)["choices"][0]["text"])
            assert not old & {r.rsplit(".", 1)[1] for r in node.regions()}, "the old generation is gone"


if __name__ == "__main__":
    run_tests(globals())

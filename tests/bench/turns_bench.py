#!/usr/bin/env python3
"""What a long prompt costs a running stream on the same cores: time per output token alone, and beside another request's prefill, with and without turns
(docs/shared-memory.md, "Turn board"). All of one run, on a node of its own; printed are ratios to the stream alone. Never run by ctest: times depend on what
else the machine does.
Usage: turns_bench.py [MODEL_DIR] [--prompt TOKENS] [--path chunked|slp] [--target MS] [--rounds N]"""
import argparse
import pathlib
import statistics
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "node"))
from harness import FABLE, Node, wait_for  # noqa: E402


def gaps_of(node, tokens):
    """Milliseconds between a stream's tokens, and when each came."""
    body = {"prompt": "Once upon a time there was a king", "max_tokens": tokens, "ignore_eos": True, "temperature": 0.7, "seed": 3}
    times = []
    with node.stream("/v1/completions", body) as events:
        for event in events:
            if event.get("choices"):
                times.append(time.monotonic())
    return [(b, (b - a) * 1e3) for a, b in zip(times, times[1:])]


def prompts_until(node, size, stop, spans):
    i = 0
    while not stop.is_set():
        i += 1
        begin = time.monotonic()
        node.completion([10 + (i * 131 + j * 7919) % 1000 for j in range(size)], max_tokens=1)
        spans.append((begin, time.monotonic()))


def measure(node, args, beside):
    """Gaps of a stream: all of it alone, or those that fell into another request's prefill; and the seconds that such a prompt took."""
    stop, spans = threading.Event(), []
    thread = threading.Thread(target=prompts_until, args=(node, args.prompt, stop, spans))
    result = []
    runner = threading.Thread(target=lambda: result.extend(gaps_of(node, args.tokens)))
    runner.start()
    time.sleep(0.1)
    if beside:
        thread.start()
    runner.join()
    stop.set()
    if not beside:
        return [gap for _, gap in result], []
    thread.join()
    end = result[-1][0]
    inside = [gap for at, gap in result if any(b <= at <= e for b, e in spans)]
    return inside, [e - b for b, e in spans if e <= end]


def node_of(args, turns):
    config = "router.chunked_prefill_max_tokens = 64\nweightstore.reuse_decoded_pages = false\nweightstore.kv_pool_tokens = 32768"
    if args.path == "slp":
        config += '\nprefill.path = "slp"\nprefill.device_memory_bytes = 64000000'
    if args.target:
        config += f"\ndecode.tpot_target_ms = {args.target}"
    node = Node(model=args.model, config=config, start=False)
    node.start("weightstore")
    wait_for("an image", lambda: node.status()["weightstore"]["generations"])
    if not turns:  # without the board nobody can take turns
        for board in node.shm.glob(f"hearth.{node.name}.turns.*"):
            board.unlink()
    for kind in ("prefill.0", "decode.0", "router"):
        node.start(kind)
    node.wait_ready()
    node.wait_worker("prefill.0")
    return node


def quantiles(values):
    ordered = sorted(values)
    return statistics.fmean(ordered), ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default=str(FABLE))
    parser.add_argument("--prompt", type=int, default=2400)
    parser.add_argument("--tokens", type=int, default=1200)
    parser.add_argument("--path", choices=("chunked", "slp"), default="slp")
    parser.add_argument("--target", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    print(f"prompts of {args.prompt} tokens through prefill ({args.path}) beside one stream; gaps between its tokens, ms")
    for _ in range(args.rounds):
        for turns in (True, False):
            with node_of(args, turns) as node:
                gaps_of(node, 100)
                node.completion(list(range(100, 100 + args.prompt)), max_tokens=1)
                alone, _ = measure(node, args, beside=False)
                begin = time.monotonic()
                node.completion([2000 - j % 1500 for j in range(args.prompt)], max_tokens=1)
                prompt_alone = time.monotonic() - begin
                beside, took = measure(node, args, beside=True)
                a, b = quantiles(alone), quantiles(beside)
                print(f"{'with turns   ' if turns else 'without turns'}  alone mean {a[0]:.2f} p50 {a[1]:.2f} p99 {a[2]:.2f}   beside mean {b[0]:.2f} "
                      f"({b[0] / a[0]:.2f}x) p50 {b[1]:.2f} ({b[1] / a[1]:.2f}x) p99 {b[2]:.2f} ({b[2] / a[2]:.2f}x)   "
                      f"prompt {prompt_alone:.2f} s alone, " + (f"{statistics.median(took):.2f} s beside" if took else "none ended beside it"), flush=True)


if __name__ == "__main__":
    main()

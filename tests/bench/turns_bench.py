#!/usr/bin/env python3
"""What a long prompt costs a running stream: the gaps between its tokens alone, and beside prompts of other requests in a prefill worker that streams the
weights (slp) or reads them in chunks (chunked), with both workers on the same cores or on disjoint ones, and on the same cores without turns
(docs/shared-memory.md, "Turn board"). One node, one store; workers and router start anew for each line, and each line's ratios are to its own stream alone.
Never run by ctest: times depend on what else the machine does.

  hearth synth --config-json my/config.json --out /tmp/model && tests/bench/turns_bench.py /tmp/model --cores shared,disjoint --paths slp,chunked

On disjoint cores prefill has the second half of them to itself, everything else (decode, store, router, this client) the first."""
import argparse
import itertools
import os
import pathlib
import re
import statistics
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "node"))
from harness import FABLE, Node, wait_for  # noqa: E402

CORES = sorted(os.sched_getaffinity(0))
FIRST, REST = CORES[:max(1, len(CORES) // 2)], CORES[max(1, len(CORES) // 2):]


def start_on(cores, node, kind):
    """A process inherits the cores of the thread that starts it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        node.start(kind)
    finally:
        os.sched_setaffinity(0, before)


def gaps_of(node, seconds):
    """(when, milliseconds since the token before) of a stream that is left after so long."""
    body = {"prompt": "Once upon a time there was a king", "max_tokens": 100000, "ignore_eos": True, "temperature": 0.7, "seed": 3}
    times = []
    with node.stream("/v1/completions", body) as events:
        for event in events:
            if event.get("choices"):
                times.append(time.monotonic())
            if times and times[-1] - times[0] > seconds:
                break
    return [(b, (b - a) * 1e3) for a, b in zip(times, times[1:])]


SALTS = itertools.count()


def ask_prompt(node, size):
    """Seconds to the first token of a prompt that no page is cached of."""
    salt = next(SALTS)
    begin = time.monotonic()
    node.completion([10 + (salt * 131 + j * 7919) % 1000 for j in range(size)], max_tokens=1)
    return time.monotonic() - begin


def steps_of(node):
    """Decode's own account of its last thousand steps, ms: what gaps have beyond it is between steps, or on the way to the client."""
    status = node.status()["workers"]["decode.0"]
    return status["step_ms_p50"], status["step_ms_p99"]


def foretold(node):
    """Count and sum of real over predicted time to the first token, of prompts that a prefill worker computed."""
    metrics = node.get("/metrics").body.decode()
    return tuple(sum(float(v) for v in re.findall(rf'hearth_ttft_real_over_predicted_{what}{{path="prefill [^}}]*}} (\S+)', metrics))
                 for what in ("count", "sum"))


def measure(node, args):
    gaps_of(node, 0.5)
    for _ in range(args.warm):
        ask_prompt(node, args.prompt)
    wait_for("an idle node", node.idle)
    time.sleep(1.1)  # the router looks at what passes cost once a second
    alone = [gap for _, gap in gaps_of(node, args.seconds / 2)]
    wait_for("an idle node", node.idle)
    steps_alone = steps_of(node)
    prompt_alone = ask_prompt(node, args.prompt)
    before = foretold(node)
    gaps, took, spans, stop = [], [], [], threading.Event()

    def prompts():
        while not stop.is_set():
            begin = time.monotonic()
            spans.append((begin, None))
            seconds = ask_prompt(node, args.prompt)
            spans[-1] = (begin, begin + seconds)

    stream = threading.Thread(target=lambda: gaps.extend(gaps_of(node, args.seconds)))
    asker = threading.Thread(target=prompts)
    stream.start()
    time.sleep(0.3)
    asker.start()
    while not gaps and stream.is_alive():
        time.sleep(0.05)
    stop.set()
    asker.join()
    stream.join()
    after = foretold(node)
    end = gaps[-1][0]
    beside = [gap for at, gap in gaps if any(b <= at <= e for b, e in spans)]
    took = [e - b for b, e in spans if e <= end]
    return alone, beside, prompt_alone, took, (before, after), (steps_alone, steps_of(node))


def quantiles(values):
    ordered = sorted(values)
    return {"mean": statistics.fmean(ordered), "p50": ordered[len(ordered) // 2], "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
            "max": ordered[-1]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(FABLE))
    parser.add_argument("--prompt", type=int, default=600, help="tokens")
    parser.add_argument("--seconds", type=float, default=8, help="of a stream beside prompts")
    parser.add_argument("--warm", type=int, default=4, help="prompts before")
    parser.add_argument("--paths", default="slp,chunked")
    parser.add_argument("--cores", default="shared,disjoint,unprotected", help="unprotected: shared, without turns")
    parser.add_argument("--target", type=int, default=0, help="decode.tpot_target_ms")
    parser.add_argument("--chunk-tokens", type=int, default=256, help="prefill.chunk_tokens")
    parser.add_argument("--device-memory", type=int, default=300_000_000, help="prefill.device_memory_bytes")
    args = parser.parse_args()
    if not REST:
        sys.exit("needs two cores")
    config = ("router.chunked_prefill_max_tokens = 64\nweightstore.reuse_decoded_pages = false\nweightstore.kv_pool_tokens = 16384\n"
              f'prefill.path = "slp"\nprefill.device_memory_bytes = {args.device_memory}\nprefill.chunk_tokens = {args.chunk_tokens}\n'
              f"decode.tpot_target_ms = {args.target}")
    with Node(model=args.model, config=config, start=False, ready_timeout=120) as node:
        node.start("weightstore")
        wait_for("an image", lambda: "READY" in node.log("weightstore"), 120)
        print(f"prompts of {args.prompt} tokens in prefill beside one stream; gaps between its tokens in ms, ratios to the stream alone")
        as_slp = node.config.read_text()
        # Without the board nobody can take turns, and it comes back only with another store: those lines come last.
        for cores in sorted(args.cores.split(","), key=lambda kind: kind == "unprotected"):
            for path in args.paths.split(","):
                if cores == "unprotected":
                    for board in node.shm.glob(f"hearth.{node.name}.turns.*"):
                        board.unlink()
                node.config.write_text(as_slp.replace('path = "slp"', f'path = "{path}"'))
                if "router" in node.logs:  # whom it has met is told by its log
                    pathlib.Path(node.logs["router"]).write_text("")
                for kind in ("prefill.0", "decode.0", "router"):
                    start_on(CORES if cores != "disjoint" else REST if kind == "prefill.0" else FIRST, node, kind)
                if cores == "disjoint":
                    os.sched_setaffinity(0, FIRST)
                node.wait_ready()
                node.wait_worker("prefill.0")
                alone, beside, prompt_alone, took, (before, after), steps = measure(node, args)
                a, b = quantiles(alone), quantiles(beside)
                line = "  ".join(f"{what} {a[what]:.2f} -> {b[what]:.2f} ({b[what] / a[what]:.2f}x)" for what in a)
                foreseen = f"; real / predicted {(after[1] - before[1]) / (after[0] - before[0]):.2f}" if after[0] > before[0] else ""
                print(f"{cores:11} {path:7}  {line}; prompt {prompt_alone:.2f} s alone, " +
                      (f"{statistics.median(took):.2f} s beside" if took else "none ended beside it") + f"{foreseen}; steps p50 {steps[0][0]:.2f} -> {steps[1][0]:.2f}, p99 {steps[0][1]:.2f} -> {steps[1][1]:.2f}", flush=True)
                turns = [text for text in node.command("status")[1].splitlines() if " turns: " in text]
                print("".join(f"    {text}\n" for text in turns), end="", flush=True)
                os.sched_setaffinity(0, CORES)
                for kind in ("router", "decode.0", "prefill.0"):
                    node.terminate(kind)


if __name__ == "__main__":
    main()

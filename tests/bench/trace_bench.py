#!/usr/bin/env python3
"""What `hearth trace` costs a running stream: tokens a second without a trace, with one, and with one of every op (--ops), in turn within a round, on one node.
Never run by ctest: times depend on what else the machine does.
Usage: trace_bench.py [MODEL_DIR] [--tokens N] [--rounds N]"""
import argparse
import pathlib
import signal
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "node"))
from harness import BIN, FABLE, Node  # noqa: E402

MODES = {"no trace": None, "trace": [], "trace --ops": ["--ops"]}


def tokens_per_second(node, tokens):
    """Of one greedy stream, between its first token and its last."""
    body = {"prompt": "Once upon a time there was a king", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    times = []
    with node.stream("/v1/completions", body) as events:
        for event in events:
            if event.get("choices"):
                times.append(time.monotonic())
    return (len(times) - 1) / (times[-1] - times[0])


def traced(node, tokens, options):
    if options is None:
        return tokens_per_second(node, tokens), ""
    path = node.dir / "trace.json"
    trace = subprocess.Popen([str(BIN / "hearth"), "trace", "--config", str(node.config), "--out", str(path), "--until-interrupt", *options],
                             stderr=subprocess.PIPE, text=True)
    time.sleep(0.5)  # until it records
    speed = tokens_per_second(node, tokens)
    trace.send_signal(signal.SIGINT)
    _, said = trace.communicate(timeout=120)
    if trace.returncode != 0:
        sys.exit(f"hearth trace: {said}")
    return speed, said.strip().splitlines()[-1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default=str(FABLE))
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    speeds = {mode: [] for mode in MODES}
    with Node(model=args.model, config="decode.speculation = 0") as node:
        tokens_per_second(node, 200)
        for _ in range(args.rounds):
            for mode, options in MODES.items():
                speed, said = traced(node, args.tokens, options)
                speeds[mode].append(speed)
                if said and len(speeds[mode]) == 1:
                    print(f"{mode}: {said}")
    alone = statistics.median(speeds["no trace"])
    for mode, of_mode in speeds.items():
        ratios = [s / a for s, a in zip(of_mode, speeds["no trace"])]
        print(f"{mode:12} {statistics.median(of_mode):7.0f} tokens/s ({statistics.median(of_mode) / alone:.3f} of no trace; by rounds "
              f"{min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()

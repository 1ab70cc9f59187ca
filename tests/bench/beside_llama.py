#!/usr/bin/env python3
"""The forward pass beside llama.cpp's, in alternated runs: decode at batch 1, 2, 4, 6 and prefill, tokens a second and their ratio.

  tests/bench/beside_llama.py --llama-bench BIN/llama-bench --gguf model.gguf --model DIR [--terms 1|2] [--rounds 2] [--prefill 512]

`--gguf` and `--model` are the same architecture and shapes, in Q8_0 and in FP8; both are read into memory before anything is timed. llama.cpp takes M tokens in one
micro-batch for batch M, as `llama-bench -p M` does. Only the ratios count: on shared machines the memory's speed changes by the minute.
"""
import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

BATCHES = (1, 2, 4, 6)


def llama(args):
    """Tokens a second by test: "prefill", or the batch size."""
    found = {}
    threads = str(args.threads)
    for tests in (["-p", ",".join(map(str, BATCHES[1:])), "-n", "0", "-r", "8"], ["-p", "0", "-n", "32", "-r", "2"], ["-p", str(args.prefill), "-n", "0", "-r", "2"]):
        out = subprocess.run([args.llama_bench, "-m", args.gguf, "-t", threads, "-o", "json", *tests], check=True, capture_output=True, text=True).stdout
        for row in json.loads(out):
            name = 1 if row["n_gen"] else "prefill" if row["n_prompt"] == args.prefill else row["n_prompt"]
            found[name] = row["avg_ts"]
    return found


def hearth(args):
    command = [args.forward_bench, args.model, "--threads", str(args.threads), "--terms", str(args.terms), "--steps", "12", "--prefill", str(args.prefill)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {}
    for name, rate in re.findall(r"^(prefill +\d+ tokens|decode  batch \d+): +([\d.]+) tokens/s", out, re.M):
        found["prefill" if name.startswith("prefill") else int(name.split()[-1])] = float(rate)
    missing = {"prefill", *BATCHES} - set(found)
    if missing:
        sys.exit(f"{' '.join(command)} printed no figure for {missing}:\n{out}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-bench", required=True)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--model", required=True, help="the Hugging Face directory")
    parser.add_argument("--forward-bench", default=str(pathlib.Path(__file__).resolve().parents[2] / "build/release/bench/forward_bench"))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--terms", type=int, default=2, choices=(1, 2))
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()

    rounds = []
    for number in range(args.rounds):
        # Each second round in the other order: what comes first meets a machine that has just rested.
        runs = [("llama.cpp", llama), ("hearth", hearth)]
        result = {}
        for name, run in runs if number % 2 == 0 else reversed(runs):
            print(f"round {number + 1} of {args.rounds}: {name} ...", file=sys.stderr, flush=True)
            result[name] = run(args)
        rounds.append(result)

    print(f"{'':12} {'llama.cpp':>12} {'Hearth':>12} {'ratio':>8}   (tokens/s, medians of {args.rounds} rounds; {args.threads} threads, {args.terms} activation terms)")
    for test in (*BATCHES, "prefill"):
        theirs = statistics.median(r["llama.cpp"][test] for r in rounds)
        ours = statistics.median(r["hearth"][test] for r in rounds)
        ratio = statistics.median(r["hearth"][test] / r["llama.cpp"][test] for r in rounds)
        name = f"batch {test}" if test != "prefill" else f"prefill {args.prefill}"
        print(f"{name:12} {theirs:12.1f} {ours:12.1f} {ratio:7.2f}x")


if __name__ == "__main__":
    main()

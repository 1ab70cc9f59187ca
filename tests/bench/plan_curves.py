#!/usr/bin/env python3
"""What each part of a machine is worth: `hearth plan` over what-ifs, drawn as curves of first-token time and of decode speed.

  tests/bench/plan_curves.py --out docs/img/plan-curves.svg
  tests/bench/plan_curves.py --hearth build/release/bin/hearth --model kimi-k2 --hardware epyc-9355-2x5090 --out kimi.svg --table

A column is a part (links, GPU memory, sockets, DRAM channels), a line one size of it; all else is the machine's own, whose line is drawn thick. Above: seconds to the first token by
length of prompt, by the faster of the paths that leave the other GPU to decoding (an open circle where that is the CPU's); dotted, two GPUs that share the
prompt. Below: tokens a second of one stream (full line) and of two (dashed) by context; no line where decode's
weights do not fit into the GPU. Takes some minutes on two cores, needs no GPU and no weights. Needs Debian's python3-matplotlib.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys

try:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot
except ImportError:
    sys.exit("plan_curves.py: matplotlib is missing: apt install python3-matplotlib, and run this with /usr/bin/python3")

PARTS = {
    "link to the GPU": ["pcie=3", "pcie=4", "pcie=5"],
    "GPU memory": ["vram=16", "vram=24", "vram=32"],
    "sockets": ["sockets=1", "sockets=2"],
    "DRAM channels": ["channels=8", "channels=12", "channels=24"],
}
PROMPTS = [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]
CONTEXTS = [1024, 4096, 16384, 32768, 65536, 131072]
BATCHES = [1, 2]
ALONE = ["chunked", "slp"]
COLORS = ["#d95f02", "#7570b3", "#1b9e77"]


def plan(flags, what_if):
    """The report of `hearth plan`; with "" of the machine as it is."""
    command = [flags.hearth, "plan", "--json", "--model", flags.model, "--hardware", flags.hardware] + (["--what-if", what_if] if what_if else [])
    for name, values in (("--prompt", PROMPTS), ("--context", CONTEXTS), ("--batch", BATCHES)):
        command += [name, *map(str, values)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"plan_curves.py: {' '.join(command)}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def first_token(report, paths):
    """{tokens: (seconds, path)} by the fastest of these paths."""
    best = {}
    for p in report["prompts"]:
        if p["path"] in paths and (p["tokens"] not in best or p["first_token_s"] < best[p["tokens"]][0]):
            best[p["tokens"]] = (p["first_token_s"], p["path"])
    return best


def decode_speed(report, streams):
    """{context: tokens/s} in the better order; empty where the streams' weights do not fit."""
    if report["memory"]["kv_tokens"] < 0:
        return {}
    best = {}
    for p in report["decode"]:
        if p["streams"] == streams:
            best[p["context"]] = max(best.get(p["context"], 0), p["tokens_per_s"])
    return best


def label(what_if):
    key, size = what_if.split("=")
    return {"pcie": f"PCIe {size}", "vram": f"{size} GB", "sockets": f"{size} socket{'s' if size != '1' else ''}", "channels": f"{size} channels"}[key]


def same(report, base):
    return all(report[key] == base[key] for key in ("prompts", "decode"))


def thousands(value, _=None):
    return f"{value / 1024:g}K"


def draw(flags, base, reports):
    matplotlib.rcParams.update({"svg.hashsalt": "hearth", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9})
    figure, axes = pyplot.subplots(2, len(PARTS), figsize=(4 * len(PARTS), 7), sharex="row", sharey="row", layout="constrained")
    for (part, sizes), (above, below) in zip(PARTS.items(), axes.T):
        for color, what_if in zip(COLORS, sizes):
            report = reports[what_if]
            width = 2.6 if same(report, base) else 1.3
            points, shared = first_token(report, ALONE), first_token(report, ["dslp"])
            above.plot(list(shared), [seconds for seconds, _ in shared.values()], ":", color=color, lw=width)
            above.plot(list(points), [seconds for seconds, _ in points.values()], color=color, lw=width, label=label(what_if))
            by_cpu = {n: seconds for n, (seconds, path) in points.items() if path == "chunked"}
            above.plot(list(by_cpu), list(by_cpu.values()), "o", color=color, ms=6, mfc="white")
            for streams, style in zip(BATCHES, ("-", "--")):
                speeds = decode_speed(report, streams)
                below.plot(list(speeds), list(speeds.values()), style, color=color, lw=width, label=label(what_if) if streams == 1 else None)
        above.set_title(part)
        above.axhline(30, color="#999999", lw=0.8, ls=":")
        above.set(xscale="log", yscale="log", xticks=PROMPTS[::2], xlabel="tokens of the prompt")
        below.axhline(20, color="#999999", lw=0.8, ls=":")
        below.set(xscale="log", xticks=CONTEXTS[::2], xlabel="context", ylim=(0, None))
        for axis in (above, below):
            axis.xaxis.set_major_formatter(thousands)
            axis.minorticks_off()
            axis.grid(True, lw=0.3)
            axis.legend(frameon=False)
    axes[0][0].set_ylabel("seconds to the first token (dotted: 30)")
    axes[0][0].set_yticks([3, 10, 30, 100, 300])
    axes[0][0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes[1][0].set_ylabel("tokens/s (dotted: 20)")
    figure.suptitle(f"{flags.model} on {flags.hardware}, one part changed at a time; thick: as the machine is", fontsize=10)
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(flags.out, metadata={"Date": None})


def print_table(base, reports):
    columns = [4096, 16384, 32768, 65536]
    print(f"{'':14}" + "".join(f"{thousands(n):>11}" for n in columns) + f"{'32K, two':>11}{'one stream':>14}{'two streams':>14}")
    for name, report in [("as it is", base), *reports.items()]:
        points, shared = first_token(report, ALONE), first_token(report, ["dslp"])
        cells = "".join(f"{points[n][0]:9.1f} {'c' if points[n][1] == 'chunked' else ' '}" if n in points else f"{'-':>11}" for n in columns)
        cells += f"{shared[32768][0]:11.1f}" if 32768 in shared else f"{'-':>11}"
        speeds = [decode_speed(report, streams).get(4096) for streams in BATCHES]
        print(f"{name:14}{cells}" + "".join(f"{speed:14.1f}" if speed else f"{'-':>14}" for speed in speeds))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hearth", default="build/release/bin/hearth", help="the program (default: %(default)s)")
    parser.add_argument("--model", default="deepseek-r1", help="as `hearth plan` takes it (default: %(default)s)")
    parser.add_argument("--hardware", default="epyc-9355-2x5090", help="as `hearth plan` takes it (default: %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the SVG")
    parser.add_argument("--table", action="store_true", help="print the figures too")
    flags = parser.parse_args()
    what_ifs = [what_if for sizes in PARTS.values() for what_if in sizes]
    reports = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {pool.submit(plan, flags, what_if): what_if for what_if in ["", *what_ifs]}
        for future in concurrent.futures.as_completed(futures):
            reports[futures[future]] = future.result()
            print(f"\r{len(reports)} of {len(futures)} plans", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    base = reports.pop("")
    draw(flags, base, {what_if: reports[what_if] for what_if in what_ifs})
    if flags.table:
        print_table(base, {what_if: reports[what_if] for what_if in what_ifs})


if __name__ == "__main__":
    main()

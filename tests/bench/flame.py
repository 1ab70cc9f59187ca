#!/usr/bin/env python3
"""A flame picture of where CPU time goes: samples a command or a running process with perf and draws an SVG.

  cmake --preset release -B build/frames -DCMAKE_CXX_FLAGS=-fno-omit-frame-pointer && cmake --build build/frames --target forward_bench
  tests/bench/flame.py --out decode.svg --keep 'HostOps|CpuExpertEngine|DecoderPass' --frame-pointers -- build/frames/bench/forward_bench DIR --prefill 16
  tests/bench/flame.py --out worker.svg --pid $(pgrep -f hearth-decode) --seconds 10

Width is CPU time, summed over threads; height is the call stack, callers below. `--keep` leaves only stacks with a frame that matches, from that frame up, so that
threads of a pool and their caller lie on one another. The CPU kernels keep whole tiles of weights on the stack, more than perf copies: without --frame-pointers their callers stay unknown, and
`--keep` drops them (it says how many). Needs Debian's linux-perf, and kernel.perf_event_paranoid <= 1 or root. A sample every 2 ms by the
CPU's clock: works in virtual machines, which mostly have no counters.
"""
import argparse
import collections
import html
import re
import subprocess
import sys
import tempfile
import zlib

ROW = 18
WIDTH = 1400
TEXT = 6.6  # width of a letter


def short(symbol):
    """A frame's name without template arguments, parameters and namespaces of ours; None for what only passes a call on."""
    if "InvokeObject<" in symbol or "function_ref" in symbol:  # a lambda handed to the pool: named by whose it is
        owner = re.search(r"InvokeObject<hearth::((?:\(anonymous namespace\)::)?\w+::\w+)\(", symbol)
        symbol = owner.group(1) if owner else ""
    if not symbol or "ThreadPool::" in symbol:
        return None
    symbol = symbol.replace("(anonymous namespace)::", "").replace("hearth::", "")
    previous = None
    while previous != symbol:
        previous, symbol = symbol, re.sub(r"<[^<>]*>", "", symbol)
    symbol = re.sub(r"\{lambda.*", "lambda", symbol)
    return re.sub(r"\(.*", "", symbol).strip() or "?"


def stacks(script, keep):
    """Counts of stacks, callers first, and how many samples have no frame to keep."""
    counts = collections.Counter()
    dropped = 0
    for sample in script.split("\n\n"):
        frames = [m.group(1) for m in re.finditer(r"^\s+[0-9a-f]+ (.+?)(?:\+0x[0-9a-f]+)? \(.*\)$", sample, re.M)]
        names = [name for name in map(short, reversed(frames)) if name]
        if keep:
            first = next((i for i, name in enumerate(names) if re.search(keep, name)), None)
            if first is None:
                dropped += 1
                continue
            names = names[first:]
        merged = [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
        if merged:
            counts[tuple(merged)] += 1
    return counts, dropped


def tree(counts):
    root = {"name": "all", "count": 0, "children": {}}
    for stack, count in counts.items():
        node = root
        node["count"] += count
        for name in stack:
            node = node["children"].setdefault(name, {"name": name, "count": 0, "children": {}})
            node["count"] += count
    return root


def depth(node, total):
    return 1 + max((depth(child, total) for child in node["children"].values() if child["count"] * WIDTH >= total), default=0)


def draw(node, left, level, height, total, out):
    width = node["count"] / total * WIDTH
    if width < 1:
        return
    top = height - (level + 1) * ROW
    hue = zlib.crc32(node["name"].encode()) % 45
    share = f"{100 * node['count'] / total:.1f}%"
    label = f"{node['name']} {share}"
    room = int((width - 6) / TEXT)
    text = label if len(label) <= room else label[: max(0, room - 1)] + "…" if room > 3 else ""
    out.append(f'<g><title>{html.escape(label)}</title><rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW - 1}" rx="2" fill="hsl({hue},75%,68%)"/>'
               f'<text x="{left + 3:.1f}" y="{top + 13}">{html.escape(text)}</text></g>')
    for child in sorted(node["children"].values(), key=lambda c: -c["count"]):
        draw(child, left, level + 1, height, total, out)
        left += child["count"] / total * WIDTH


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--keep", help="a regular expression on frames")
    parser.add_argument("--pid", help="sample this process instead of a command")
    parser.add_argument("--seconds", type=float, default=10, help="with --pid")
    parser.add_argument("--frame-pointers", action="store_true", help="the program was built with -fno-omit-frame-pointer; else stacks are unwound from copies of 4 KB")
    parser.add_argument("--title", default="")
    parser.add_argument("command", nargs="*")
    args = parser.parse_args()
    if bool(args.pid) == bool(args.command):
        parser.error("give either --pid or a command after --")
    with tempfile.NamedTemporaryFile(suffix=".perf") as data:
        record = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "499", "--call-graph", "fp" if args.frame_pointers else "dwarf,4096", "-o", data.name]
        record += ["-p", args.pid, "--", "sleep", str(args.seconds)] if args.pid else ["--", *args.command]
        subprocess.run(record, check=True, stdout=sys.stderr)
        script = subprocess.run(["perf", "script", "--no-inline", "-i", data.name, "-F", "comm,ip,sym,dso"], check=True, capture_output=True, text=True).stdout
    counts, dropped = stacks(script, args.keep)
    root = tree(counts)
    if root["count"] == 0:
        sys.exit(f"no sample of {args.keep!r}: nothing to draw")
    height = depth(root, root["count"]) * ROW + 30
    out = []
    draw(root, 0, 0, height - 4, root["count"], out)
    with open(args.out, "w") as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="monospace" font-size="11">'
                   f'<rect width="{WIDTH}" height="{height}" fill="white"/><text x="4" y="16" font-size="13">{html.escape(args.title)}</text>{"".join(out)}</svg>\n')
    print(f"{args.out}: {root['count']} samples; {dropped} others have no frame to keep")


if __name__ == "__main__":
    main()

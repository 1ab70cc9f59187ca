#!/usr/bin/env python3
"""How fast a node comes back. Makes a synthetic checkpoint of about --gb gigabytes, then prints: load speed beside what `dd` reads and memcpy
writes here; the store killed (-9) and restarted until READY; the decode worker killed and restarted until its first token.

  tests/bench/restart_bench.py --gb 10 --dir /some/disk        (needs as much free shared memory, and twice as much disk cache or disk)
"""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "node"))
from harness import BIN, SOURCE, Node, wait_for  # noqa: E402


def config(gigabytes):
    """DeepSeek-V3's shapes at a quarter of the width: an expert has 2.75 MB; layers are added until the size is reached."""
    base = json.loads((SOURCE / "deploy/models/fable-moe/config.json").read_text())
    base.update(hidden_size=1792, moe_intermediate_size=512, intermediate_size=4608, n_routed_experts=128, num_experts_per_tok=8, n_group=8, topk_group=4,
                num_attention_heads=16, q_lora_rank=384, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_nextn_predict_layers=0)
    base["num_hidden_layers"] = 1 + max(1, round(gigabytes * 1e9 / (128 * 3 * 1792 * 512)))
    return base


def memcpy_speed():
    """Bytes a second that one thread copies, best of three."""
    block, target = bytearray(256 << 20), bytearray(256 << 20)
    best = 0
    for _ in range(3):
        start = time.monotonic()
        target[:] = block
        best = max(best, len(block) / (time.monotonic() - start))
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=10)
    parser.add_argument("--dir", default="/tmp")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    work = pathlib.Path(args.dir) / f"hearth-restart-{os.getpid()}"
    work.mkdir()
    try:
        (work / "config.json").write_text(json.dumps(config(args.gb)))
        subprocess.run([str(BIN / "hearth"), "synth", "--config-json", str(work / "config.json"), "--out", str(work / "model"), "--tokenizer", str(SOURCE / "deploy/models/fable-moe")], check=True)
        files = sorted((work / "model").glob("*.safetensors"))
        size = sum(f.stat().st_size for f in files)
        for f in files:
            subprocess.run(["dd", f"if={f}", "iflag=nocache", "count=0", "status=none"], check=False)
        start = time.monotonic()
        for f in files:
            subprocess.run(["dd", f"if={f}", "of=/dev/null", "bs=16M", "iflag=direct", "status=none"], check=True)
        dd = size / (time.monotonic() - start)
        memcpy = memcpy_speed()
        with Node(model=work / "model", ready_timeout=600, config="weightstore.kv_pool_tokens = 8192") as node:
            loaded = next(line for line in node.log("weightstore").splitlines() if "loaded" in line)
            status = node.status()["weightstore"]
            seconds = float(status["ready_seconds"])
            print(f"image {size / 1e9:.2f} GB; READY after {seconds:.2f} s = {size / seconds / 1e9:.2f} GB/s: {size / seconds / dd:.0%} of dd's direct read ({dd / 1e9:.2f} GB/s), "
                  f"{size / seconds / memcpy:.0%} of memcpy ({memcpy / 1e9:.2f} GB/s)")
            print(f"  {loaded}")
            node.completion("Once upon a time", max_tokens=2)
            store, worker = [], []
            for _ in range(args.runs):
                node.restart("weightstore")

                def ready():
                    s = node.status()["weightstore"]
                    return s and s["pid"] == node.pid("weightstore") and float(s["ready_seconds"]) > 0 and s
                store.append(float(wait_for("READY", ready)["ready_seconds"]))
                node.wait_ready()
                node.kill("decode.0")
                start = time.monotonic()
                node.start("decode.0")
                with node.stream("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 2, "ignore_eos": True}) as events:
                    next(events)
                worker.append(time.monotonic() - start)
            for what, times, limit in (("store killed: process start to READY", store, 1.0), ("decode worker killed: process start to a client's first token", worker, 2.0)):
                print(f"{what}: median {statistics.median(times) * 1e3:.0f} ms, slowest {max(times) * 1e3:.0f} ms (limit {limit:.0f} s)")
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()

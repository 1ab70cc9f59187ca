#!/usr/bin/env python3
"""One copy of the weights in DRAM, however many processes use it, and private memory within what the configuration says: from /proc/PID/smaps of a node
that has served through the store's rings, streamed prompts and decode steps."""
import json
import re
import subprocess

from harness import BIN, FABLE, SOURCE, Node, run_tests, wait_for

PROCESSES = ("weightstore", "prefill.0", "decode.0", "router")
DEVICE_MEMORY = 64_000_000
# Programs, libraries' data, stacks and heaps of a process, whatever the model's size.
OWN = 32 << 20


def bytes_of(pid, field, where):
    """Sum of a field of smaps over mappings whose file's name has `where` in it, or ("") that have no file."""
    total, counts = 0, False
    for line in open(f"/proc/{pid}/smaps"):
        if head := re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)", line.rstrip()):
            counts = where in head[1] if where else not head[1].startswith("/")
        elif counts and line.startswith(field + ":"):
            total += int(line.split()[1]) << 10
    return total


def synthetic(folder):
    """A checkpoint of 0.4 GB, most of it experts, so that a second copy of a fraction of it would be seen."""
    config = json.loads((FABLE / "config.json").read_text())
    config.update(hidden_size=1024, moe_intermediate_size=512, intermediate_size=1024, n_routed_experts=64, num_hidden_layers=5, num_nextn_predict_layers=0)
    (folder / "config.json").write_text(json.dumps(config))
    subprocess.run([str(BIN / "hearth"), "synth", "--config-json", str(folder / "config.json"), "--out", str(folder / "model"), "--tokenizer",
                    str(SOURCE / "deploy/models/fable-moe")], check=True, capture_output=True)
    return folder / "model"


def test_one_copy_of_the_weights_and_bounded_private_memory():
    config = ('router.chunked_prefill_max_tokens = 64\nprefill.path = "slp"\nprefill.expert_source = "ring"\nprefill.ring_slots = 4\n'
              f"prefill.chunk_tokens = 64\nprefill.device_memory_bytes = {DEVICE_MEMORY}")
    with Node(config=config, start=False) as node:
        node.config.write_text(node.config.read_text().replace(str(FABLE), str(synthetic(node.dir))))
        for name in PROCESSES:
            node.start(name)
        node.wait_ready()
        node.wait_worker("prefill.0")
        for i in range(3):
            node.completion([10 + i + j * 7919 % 1000 for j in range(400)], max_tokens=64, ignore_eos=True)
        assert int(node.status()["workers"]["prefill.0"]["streamed"]["records_from_rings"]) > 0, node.status()["workers"]["prefill.0"]
        wait_for("an idle node", node.idle)
        image = sum(path.stat().st_size for path in node.shm.glob(f"hearth.{node.name}.segment*"))
        mapped = {name: bytes_of(node.pid(name), "Pss", f"hearth.{node.name}.segment") for name in PROCESSES}
        assert image > 300_000_000 and abs(sum(mapped.values()) - image) <= image / 100, (image, mapped)
        private = {name: bytes_of(node.pid(name), "Private_Dirty", "") + bytes_of(node.pid(name), "Private_Clean", "") for name in PROCESSES}
        print({name: f"{size / 1e6:.0f} MB" for name, size in private.items()})
        for name, size in private.items():
            assert size <= OWN + (DEVICE_MEMORY if name == "prefill.0" else 0), private
        for name in ("prefill.0", "decode.0"):  # what the operator is shown
            shown = int(node.status()["workers"][name]["resident_private_bytes"])
            assert abs(shown - private[name]) < 16 << 20, (name, shown, private)


if __name__ == "__main__":
    run_tests(globals())

#!/usr/bin/env python3
"""Arrows only go down (docs/architecture.md): fails on an include that points up or sideways, on a service that includes another service,
and on a room of common/ that the table below does not name. Also: an engine's threads, waits and clocks go through Device."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# room -> rooms that it may include, besides itself
ALLOWED = {
    "base": [],
    "trace": ["base"],
    "shm": ["base"],
    "disk": ["base"],
    "numa": ["base"],
    "formats": ["base"],
    "text": ["formats", "base"],
    "kernels": ["base"],
    "image": ["formats", "shm", "disk", "numa", "base"],
    "device": ["kernels", "numa", "shm", "trace", "base"],
    "roofline": ["device", "kernels", "numa", "base"],
    "experts": ["device", "kernels", "shm", "disk", "trace", "base"],
    "model": ["experts", "device", "kernels", "formats", "shm", "trace", "base"],
    "slp": ["model", "experts", "device", "kernels", "formats", "shm", "trace", "base"],
    "sim": ["roofline", "experts", "device", "kernels", "shm", "trace", "base"],
    "plan": ["sim", "slp", "model", "experts", "roofline", "device", "kernels", "image", "formats", "shm", "base"],
    "rpc": ["shm", "disk", "trace", "base"],
    "worker": ["model", "experts", "roofline", "device", "kernels", "formats", "rpc", "shm", "numa", "trace", "base"],
}
SERVICES = ["weightstore", "prefill", "decode", "router", "cli"]
# Below the seam: the host backend makes threads, waits and reads the clock, so that nobody above it does.
SEAM = ["common/experts", "common/model", "common/slp", "common/worker", "services/prefill", "services/decode"]
BANNED = re.compile(r"std::(?:jthread|thread|condition_variable\w*|this_thread|async)\b|\bstd::chrono::(?:steady|system|high_resolution)_clock"
                    r"|\b(?:usleep|nanosleep|sleep_for|sleep_until|clock_gettime|pthread_create|pthread_cond_\w+)\b")
# The process around an engine may tell gRPC a deadline and measure its own start.
SEAM_EXEMPT = {"common/worker/worker_process.cc", "common/worker/continue_service.cc"}

INCLUDE = re.compile(r'^\s*#\s*include\s+"((?:common|services)/[^"]+)"', re.M)


def sources(folder):
    return [p for p in sorted((ROOT / folder).rglob("*")) if p.suffix in (".h", ".cc", ".inc")]


def room_of(path):
    parts = path.split("/")
    return (parts[0], parts[1])


def main():
    errors = []
    for folder in sorted(p.name for p in (ROOT / "common").iterdir() if p.is_dir()):
        if folder not in ALLOWED:
            errors.append(f"common/{folder}: a room that this test's table does not name")
    files = sources("common") + sources("services")
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        layer, room = room_of(name)
        test = name.endswith("_test.cc") or name.endswith("_bench.cc") or "_test_util" in name or "/testing/" in name
        for include in INCLUDE.findall(path.read_text(encoding="utf-8")):
            to_layer, to_room = room_of(include)
            if (to_layer, to_room) == (layer, room):
                continue
            if to_layer == "services":
                errors.append(f"{name}: includes {include}: " + ("a service never includes another service" if layer == "services" else "common never includes a service"))
            elif layer == "common" and to_room not in ALLOWED.get(room, []) and not test:
                errors.append(f"{name}: includes {include}: common/{room} may include only {', '.join(ALLOWED.get(room, [])) or 'itself'}")
    for folder in SEAM:
        for path in sources(folder):
            name = path.relative_to(ROOT).as_posix()
            if name in SEAM_EXEMPT or name.endswith("_test.cc") or name.endswith("_bench.cc"):
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                code = line.split("//")[0]
                if BANNED.search(code):
                    errors.append(f"{name}:{number}: '{code.strip()}': an engine's threads, waits and clocks go through Device (common/device/device.h)")
    # The architecture page names every room, and no room that is not there.
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:common|services)/[a-z]+)/?`", page))
    there = {f"common/{r.name}" for r in (ROOT / "common").iterdir() if r.is_dir()} | {f"services/{s}" for s in SERVICES}
    for missing in sorted(there - named):
        errors.append(f"docs/architecture.md does not name {missing}")
    for stale in sorted(named - there):
        errors.append(f"docs/architecture.md names {stale}, which is not there")
    print("\n".join(errors))
    print(f"{len(files)} files looked at, {len(errors)} wrong arrows")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())

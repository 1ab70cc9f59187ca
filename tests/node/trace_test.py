#!/usr/bin/env python3
"""`hearth trace`: a request's phases in all processes, in order, nested, on one clock; a worker that dies while it is traced; what is refused."""
import collections
import json
import signal
import subprocess
import time

from harness import BIN, FABLE, Node, run_tests, wait_for

PROMPT = "Once upon a time there was a fox who wanted to see the sea. " * 20
Span = collections.namedtuple("Span", "name begin end shapes")


class Trace:
    """A trace file: spans by (process, track), from left to right, an enclosing one first. Times in microseconds."""

    def __init__(self, path):
        self.json = json.loads(path.read_text())
        events = self.json["traceEvents"]
        processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        tracks = {e["tid"]: (processes[e["pid"]], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
        self.tracks = collections.defaultdict(list)
        for e in events:
            if e["ph"] == "X":
                shapes = dict(word.split("=") for word in e["args"]["shapes"].split() if "=" in word)
                self.tracks[tracks[e["tid"]]].append(Span(e["name"], e["ts"], e["ts"] + e["dur"], shapes))
        for spans in self.tracks.values():
            spans.sort(key=lambda s: (s.begin, -s.end))
        self.check_nesting()

    def check_nesting(self):
        """On a track two spans are one behind the other or one within the other (to the file's nanosecond)."""
        for track, spans in self.tracks.items():
            around = []
            for span in spans:
                while around and around[-1].end <= span.begin + 0.0015:
                    around.pop()
                assert not around or span.end <= around[-1].end + 0.0015, (track, around[-1], span)
                around.append(span)

    def named(self, process, track, name):
        return [s for s in self.tracks.get((process, track), []) if s.name == name]

    def notes(self):
        return self.json.get("otherData", {}).get("notes", [])


def inside(inner, outer, slack=0.0015):
    return outer.begin - slack <= inner.begin and inner.end <= outer.end + slack


def start_trace(node, *args, name="trace.json"):
    path = node.dir / name
    command = [str(BIN / "hearth"), "trace", "--config", str(node.config), "--out", str(path), *args]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    time.sleep(0.5)  # until it records
    return process, path


def finish(process, path, code=0):
    _, err = process.communicate(timeout=30)
    assert process.returncode == code, (process.returncode, err)
    return Trace(path), err


def only_request(trace):
    """The router's spans of the one request, and its stream."""
    (track,) = [t for t in trace.tracks if t[0] == "router" and t[1].endswith("[0]")]
    return trace.tracks[track]


def check_life(trace, prefill_span):
    """Queue, prefill worker, hand-off and decode worker, each within what the router says, and the steps within decoding."""
    states = only_request(trace)
    assert [s.name for s in states] == ["queued", "prefilling", "handoff", "decoding"], states
    for before, after in zip(states, states[1:]):
        assert abs(before.end - after.begin) < 0.002, "a request is always in one state"
    queued, prefilling, _, decoding = states
    (first,) = [s for t, spans in trace.tracks.items() if t[1].endswith("to first token") for s in spans]
    assert abs(first.begin - queued.begin) < 0.002 and decoding.begin < first.end < decoding.end
    assert prefill_span and all(inside(s, prefilling) for s in prefill_span), (prefill_span, prefilling)
    assert decoding.shapes["then"] == "done" and decoding.shapes["tokens"] == "12"

    stream = queued.shapes["stream"]
    (offer,) = trace.named("prefill.0", "pages", "offer")
    (taken,) = trace.named("decode.0", "pages", "take or match")
    assert offer.shapes["stream"] == taken.shapes["stream"] == stream
    assert prefill_span[-1].end <= offer.begin and offer.end <= taken.begin and inside(taken, decoding)

    steps = trace.named("decode.0", "loop", "step")
    assert steps and all(inside(s, decoding) for s in steps[:-1])
    assert decoding.begin < steps[-1].begin < decoding.end, "the router has the last token before its step is over"
    assert taken.end <= steps[0].begin
    # Before its first step a stream that comes from prefill queries a position again, whose hidden state the MTP module needs.
    passes = steps + trace.named("decode.0", "loop", "prefill")
    for name, around in (("layer", passes), ("head", steps), ("sample", steps)):
        parts = trace.named("decode.0", "loop", name)
        assert len(parts) >= len(steps) and all(any(inside(p, s) for s in around) for p in parts), name
    layers = trace.named("decode.0", "loop", "layer")
    experts = trace.named("decode.0", "loop", "experts")
    assert experts and all(any(inside(e, layer) for layer in layers) for e in experts)
    attention = [a for a in trace.named("decode.0", "loop", "attention") if int(a.shapes["layer"]) < 6]  # others: drafts
    assert attention and all(any(inside(a, layer) and a.shapes["layer"] == layer.shapes["layer"] for layer in layers) for a in attention)
    return states


def test_a_request_through_prefill_and_decode():
    with Node(config="router.chunked_prefill_max_tokens = 0\nprefill.chunk_tokens = 128") as node:
        process, path = start_trace(node, "--seconds", "1.5", "--svg", str(node.dir / "trace.svg"))
        usage = node.completion(PROMPT, max_tokens=12, ignore_eos=True)["usage"]
        trace, err = finish(process, path)
        assert not trace.notes(), trace.notes()
        assert "ui.perfetto.dev" in err, err
        chunks = trace.named("prefill.0", "loop", "prefill")
        assert len(chunks) == -(-(usage["prompt_tokens"] - 1) // 128)
        check_life(trace, chunks)
        layers = trace.named("prefill.0", "loop", "layer")
        assert len(layers) == 6 * len(chunks) and all(any(inside(layer, c) for c in chunks) for layer in layers)
        assert len(trace.named("prefill.0", "loop", "publish")) == 7 * len(chunks), "six layers and the MTP module's"
        # Small ops only where they are asked for.
        assert not trace.named("decode.0", "loop", "norm")
        svg = (node.dir / "trace.svg").read_text()
        assert svg.startswith("<svg") and svg.rstrip().endswith("</svg>") and "decode.0 loop" in svg and "prefill.0 loop" in svg


def test_a_streamed_pass_shows_copies_experts_and_rings():
    slp = 'router.chunked_prefill_max_tokens = 0\nprefill.path = "slp"\nprefill.expert_source = "ring"\nprefill.device_memory_bytes = 24000000'
    with Node(config=slp) as node:
        process, path = start_trace(node, "--seconds", "1.5")
        usage = node.completion(PROMPT, max_tokens=12, ignore_eos=True)["usage"]
        trace, _ = finish(process, path)
        passes = trace.named("prefill.0", "slp compute", "pass")
        check_life(trace, passes)
        (one,) = passes
        assert int(one.shapes["rows"]) == usage["prompt_tokens"] - 1 and one.shapes["prompts"] == "1"
        layers = trace.named("prefill.0", "slp compute", "layer")
        assert [s.shapes["layer"] for s in layers] == [str(i) for i in range(6)]
        experts = trace.named("prefill.0", "slp compute", "expert")
        assert 0 < len(experts) <= 5 * 32 and all(any(inside(e, layer) for layer in layers) for e in experts)
        loads = trace.named("prefill.0", "slp copy", "load")
        assert len([s for s in loads if int(s.shapes["expert"]) >= 0]) >= len(experts), "each expert that is computed was loaded"
        copies = trace.named("prefill.0", "slp copy", "to_device")
        assert len(copies) >= len(loads) and all(any(inside(c, load) for load in loads) for c in copies)
        assert all(inside(s, one) for s in loads + layers)
        assert trace.named("prefill.0", "slp copy", "wait for slot") or trace.named("prefill.0", "slp compute", "wait for copy")
        fills = trace.named("weightstore", "ring 0 of prefill.0", "fill")
        assert len(fills) >= len(experts) and all(one.begin <= f.begin and int(f.shapes["bytes"]) > 0 for f in fills)
        assert len(trace.named("prefill.0", "slp compute", "publish")) == 7


def test_ops_are_called_as_the_simulator_calls_them():
    with Node() as node:
        process, path = start_trace(node, "--seconds", "1", "--ops")
        node.completion("Once upon a time", max_tokens=4, ignore_eos=True)
        trace, _ = finish(process, path)
        real = {s.name for s in trace.tracks[("decode.0", "loop")]}
        sim = node.dir / "sim.json"
        subprocess.run([str(BIN / "hearth"), "plan", "--model", str(FABLE / "config.json"), "--hardware", "epyc-9355-cpu", "--context", "128", "--batch", "1",
                        "--prompt", "128", "--timeline", str(sim)], check=True, stdout=subprocess.DEVNULL, timeout=60)
        simulated = {s.name for spans in Trace(sim).tracks.values() for s in spans}
        assert len(simulated) >= 8 and simulated <= real, simulated - real


def test_until_a_request_ends():
    with Node() as node:
        body = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
        with node.stream("/v1/completions", body) as events:
            request = next(events)["id"]
            begun = time.monotonic()
            process, path = start_trace(node, "--request", request)
            for _ in events:
                pass
        trace, _ = finish(process, path)
        assert time.monotonic() - begun < 30
        states = only_request(trace)
        assert [s.name for s in states] == ["queued", "decoding"], states
        steps = trace.named("decode.0", "loop", "step")
        assert steps and steps[-1].end <= states[-1].end + 50_000
        code, _, err = node.command("trace", "--request", request, "--out", str(path), check=False)
        assert code == 1 and "has ended" in err, err
        code, _, err = node.command("trace", "--request", "nobody", "--out", str(path), check=False)
        assert code == 1 and "'nobody'" in err, err


def test_until_interrupt_and_from_several_at_once():
    with Node() as node:
        first, first_path = start_trace(node, "--until-interrupt")
        second, second_path = start_trace(node, "--until-interrupt", name="second.json")
        node.completion("Once upon a time", max_tokens=4, ignore_eos=True)
        second.send_signal(signal.SIGINT)
        finish(second, second_path)
        node.completion("Once upon a time", max_tokens=4, ignore_eos=True)
        first.send_signal(signal.SIGTERM)
        trace, _ = finish(first, first_path)
        seen = len(Trace(second_path).named("decode.0", "loop", "step"))
        assert 0 < seen < len(trace.named("decode.0", "loop", "step")), "each reads for itself"


def test_a_worker_that_dies_loses_its_own_part_alone():
    with Node() as node:
        process, path = start_trace(node, "--until-interrupt")
        node.completion("Once upon a time", max_tokens=4, ignore_eos=True)
        time.sleep(0.3)  # until the router has what was recorded
        node.restart("decode.0")
        wait_for("the worker's return", lambda: node.status()["workers"]["decode.0"]["state"] == "ready")
        node.wait_ready()
        time.sleep(0.5)  # until it is followed again
        node.completion("Once upon a time", max_tokens=4, ignore_eos=True)
        process.send_signal(signal.SIGINT)
        trace, err = finish(process, path)
        (note,) = trace.notes()
        assert note.startswith("decode.0 went away (") and f"note: {note}" in err, (note, err)
        again = f"decode.0 (process {node.pid('decode.0')})"
        assert trace.named("decode.0", "loop", "step") and trace.named(again, "loop", "step")
        assert trace.named("weightstore", "leases", "reclaim")
        assert len([t for t in trace.tracks if t[0] == "router" and t[1].endswith("[0]")]) == 2


def test_a_stopped_worker_does_not_hold_up_the_end():
    with Node() as node:
        process, path = start_trace(node, "--until-interrupt")
        node.signal("prefill.0", signal.SIGSTOP)
        try:
            process.send_signal(signal.SIGINT)
            trace, _ = finish(process, path)
        finally:
            node.signal("prefill.0", signal.SIGCONT)
        assert any(n.startswith("prefill.0 does not answer") for n in trace.notes()), trace.notes()


def test_processes_stop_while_they_are_traced():
    with Node() as node:
        process, path = start_trace(node, "--until-interrupt")
        node.completion("Once upon a time", max_tokens=4, ignore_eos=True)
        time.sleep(0.3)
        for name in ("prefill.0", "decode.0", "weightstore"):
            assert node.terminate(name, timeout=6) == 0, name
        assert node.terminate("router", timeout=6) == 0
        trace, _ = finish(process, path)
        assert trace.named("decode.0", "loop", "step"), "what was there is written"
        assert not any(n.startswith(("prefill.0 went away", "decode.0 went away", "weightstore went away")) for n in trace.notes()), trace.notes()
        assert trace.notes()[-1].startswith("the router went away ("), trace.notes()


def test_what_is_refused():
    node = Node(start=False)
    with node:
        out = str(node.dir / "t.json")

        def refused(*args, code=78, words=()):
            got, _, err = node.command("trace", *args, check=False)
            assert got != 0 and (code is None or got == code), (got, err)
            for word in words:
                assert word in err, (word, err)
            assert not (node.dir / "t.json").exists()
        refused("--out", out, words=["--seconds N, --request ID, --until-interrupt"])
        refused("--out", out, "--seconds", "1", "--until-interrupt", words=["one of"])
        for bad in ("0", "-1", "nan", "1e9", "soon"):
            refused("--out", out, "--seconds", bad, code=None, words=["--seconds"])
        refused("--seconds", "1", code=None, words=["--out"])
        refused("--seconds", "1", "--out", "/nowhere/t.json", words=["/nowhere/t.json: cannot be written"])
        refused("--seconds", "1", "--out", out, "--svg", str(node.dir), words=["cannot be written"])
        refused("--seconds", "1", "--out", out, code=1, words=["the router does not answer"])


if __name__ == "__main__":
    run_tests(globals())

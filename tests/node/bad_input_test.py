#!/usr/bin/env python3
"""Bad input at the door, in files and in the machine: each with a clear error that names the cause, and nothing left behind."""
import json
import os
import re
import shutil
import socket
import struct
import subprocess

from harness import BIN, FABLE, Node, run_tests, wait_for


def refused(node, status, body, path="/v1/chat/completions", words=(), param=None, code=None, raw=None, headers=None):
    answer = node.request("POST", path, raw if raw is not None else body, headers)
    assert answer.status == status, (answer.status, answer.body[:300], body)
    assert answer.headers["Content-Type"].startswith("application/json"), answer.headers["Content-Type"]
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}, error
    for word in words:
        assert str(word).lower() in error["message"].lower(), (word, error)
    if param:
        assert error["param"] == param, error
    if code:
        assert error["code"] == code, error
    return error


def test_a_budget_too_small_says_what_would_do():
    config = 'router.chunked_prefill_max_tokens = 0\nprefill.path = "slp"\nprefill.chunk_tokens = 16\nprefill.device_memory_bytes = '

    def refusal(budget):
        with Node(config=config + str(budget), start=False) as node:
            node.start("weightstore")
            assert node.start("prefill.0").wait(60) == 78, node.log("prefill.0")
            return int(re.search(rf"prefill.device_memory_bytes = {budget}, the smallest that works is (\d+)", node.log("prefill.0")).group(1))

    told = refusal(1000)  # not even the model's own tables fit
    assert refusal(told - 1) == told
    with Node(config=config + str(told)) as node:
        assert node.completion("word " * 100, max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
        assert int(node.status()["workers"]["prefill.0"]["prefill_tokens_total"]) > 0


def test_requests():
    with Node() as node:
        hello = [{"role": "user", "content": "hi"}]
        refused(node, 400, None, raw=b"{not json")
        refused(node, 400, None, raw=b"")
        refused(node, 400, None, raw=b'{"model":"m","messages":[{"role":"user","content":"hi"}]}\x00trailing', words=["zero byte"])
        refused(node, 400, None, raw=b"[1,2]")
        refused(node, 400, None, raw=b'{"model":"m","messages":[{"role":"user","content":"\xff\xfe"}]}')
        refused(node, 400, {"model": "m", "messages": []}, words=["messages"])
        refused(node, 400, {"model": "m"}, words=["messages"])
        refused(node, 400, {"model": "m", "messages": "hi"}, words=["messages"])
        refused(node, 404, {"model": "nobody", "messages": hello}, words=["nobody"])
        for field, value in (("temperature", "hot"), ("temperature", -1), ("top_p", 2), ("max_tokens", 0), ("max_tokens", "many"), ("n", 0), ("n", 129), ("stop", [1]),
                             ("stop", {}), ("logit_bias", []), ("logprobs", 3), ("top_logprobs", 21), ("seed", "x"), ("stream", "yes"), ("presence_penalty", "a")):
            refused(node, 400, {"model": "m", "messages": hello, field: value}, words=[field])
        error = refused(node, 400, {"model": "m", "prompt": "word " * 6000}, path="/v1/completions", words=["4096"], code="context_length_exceeded")
        assert any(int(w) > 4096 for w in error["message"].replace(",", " ").replace(".", " ").split() if w.isdigit()), error
        refused(node, 413, None, raw=b'{"model":"m","messages":[{"role":"user","content":"' + b"a" * (10 << 20) + b'"}]}')
        refused(node, 400, {"model": "m", "prompt": [1, 2, 99999]}, path="/v1/completions", words=["99999"])
        refused(node, 400, {"model": "m", "prompt": [-1]}, path="/v1/completions")
        refused(node, 404, {}, path="/v1/nothing")
        assert node.get("/v1/chat/completions").status == 405 and "POST" in node.get("/v1/chat/completions").headers["Allow"]
        refused(node, 400, {"model": "m", "messages": hello, "response_format": {"type": "json_object"}}, words=["response_format"])
        refused(node, 400, {"model": "m", "messages": hello, "tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}, words=["tool_choice"])
        refused(node, 400, {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, words=["image_url"])
        for path, prompt in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": hello})):
            for field, value in (("allowed_token_ids", [5]), ("bad_words", ["a"]), ("typical_p", 0.5), ("mirostat", 2),
                                 ("n_predict", 3), ("tools", [{"type": "function", "function": {"name": "f"}}]), ("tool_choice", "required"), ("audio", {})):
                refused(node, 400, {"model": "m", **prompt, field: value}, path=path, words=[field])
            assert node.post(path, {"model": "m", **prompt, "max_tokens": 2, "mirostat": 0, "typical_p": 1, "stop_token_ids": [], "tools": []}).status == 200
        refused(node, 400, {"model": "m", "messages": hello, "user": 7}, words=["user"])
        compressed = node.post("/v1/completions", {"model": "m", "prompt": "hi"}, headers={"Content-Encoding": "gzip"})
        assert compressed.status == 415 and "Content-Encoding" in compressed.json()["error"]["message"], compressed.body
        half = node.post("/v1/completions", b'{"prompt": "a\\ud83d"}')
        assert half.status == 400 and "half of a pair" in half.json()["error"]["message"], half.body
        refused(node, 400, {"model": "m", "prompt": [5] * 5000}, path="/v1/completions", param="prompt", code="context_length_exceeded")
        # The same with stream: a real status, not a 200 with an error inside.
        refused(node, 400, {"model": "m", "messages": [], "stream": True}, words=["messages"])
        # What clients send beside: null equals absent, unknown fields are ignored.
        fine = {"model": "m", "messages": hello, "max_tokens": 3, "user": "u", "metadata": {}, "store": False, "service_tier": "auto", "logit_bias": {}, "frequency_penalty": None,
                "tools": [], "tool_choice": None, "functions": None, "seed": None, "response_format": {"type": "text"}, "foo": 1, "stop": None, "temperature": None, "n": None, "stream": None}
        assert node.post("/v1/chat/completions", fine).status == 200
        wait_for("idle node", node.idle, 10)


def store_fails(node, words, code=None, env=None):
    node.start("weightstore", env)
    returned = node.processes["weightstore"].wait(30)
    log = node.log("weightstore")
    assert returned != 0 and (code is None or returned == code), (returned, log)
    for word in words:
        assert str(word) in log, (word, log[-1500:])
    assert "terminate called" not in log and "Segmentation" not in log, log
    assert not node.regions(), ("left behind", node.regions())
    return log


def model_copy(node, change):
    target = node.dir / "model"
    shutil.copytree(FABLE, target)
    change(target)
    text = node.config.read_text()
    node.config.write_text(text.replace(json.dumps(str(FABLE)), json.dumps(str(target))))


def edit_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_header(path, change):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length:])


def poke(path, tensor, byte, value):
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    begin = json.loads(data[8:8 + length])[tensor]["data_offsets"][0]
    data[8 + length + begin + byte:8 + length + begin + byte + len(value)] = value
    path.write_bytes(data)


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def find_tensor(model, part):
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(n for n in sorted(index) if part in n)
    return name, model / index[name]


def test_checkpoints():
    expert = "layers.3.mlp.experts.17.up_proj.weight"

    def nan_code(model):
        name, file = find_tensor(model, expert)
        poke(file, name, 77, b"\x7f")

    def bad_scale(value):
        def change(model):
            name, file = find_tensor(model, expert + "_scale_inv")
            poke(file, name, 0, struct.pack("<f", value))
        return change

    def nan_norm(model):
        name, file = find_tensor(model, "layers.2.input_layernorm.weight")
        poke(file, name, 0, b"\xc0\x7f")

    def header(part, change):
        def edit(model):
            name, file = find_tensor(model, part)
            edit_header(file, lambda h: change(h, name))
        return edit

    def drop_scale(model):
        name, file = find_tensor(model, expert + "_scale_inv")
        edit_header(file, lambda h: h.update({"unused": h.pop(name)}))
        edit_json(model / "model.safetensors.index.json", lambda i: (i["weight_map"].pop(name), i["weight_map"].update({"unused": file.name})))

    cases = [
        (lambda m: (m / SECOND).write_bytes((m / SECOND).read_bytes()[:-1]), [SECOND]),
        (lambda m: (m / SECOND).unlink(), [SECOND]),
        (header(expert, lambda h, n: h[n].update(dtype="F8_E9M9")), ["F8_E9M9", expert]),
        (header(expert + "_scale_inv", lambda h, n: h[n].update(shape=[1, 1])), [expert]),
        (header("layers.1.self_attn.o_proj.weight", lambda h, n: h[n].update(data_offsets=[v + 64 for v in h[n]["data_offsets"]])), ["o_proj"]),
        (drop_scale, [expert]),
        (nan_code, [expert, "77"]),
        (bad_scale(float("nan")), [expert]),
        (bad_scale(float("inf")), [expert]),
        (bad_scale(-1.0), [expert]),
        (bad_scale(0.0), [expert]),
        (nan_norm, ["input_layernorm"]),
        (lambda m: edit_json(m / "config.json", lambda c: c.pop("kv_lora_rank")), ["kv_lora_rank"]),
        (lambda m: edit_json(m / "config.json", lambda c: c.update(hidden_size=None)), ["hidden_size"]),
        (lambda m: edit_json(m / "config.json", lambda c: c.update(architectures=["LlamaForCausalLM"])), ["LlamaForCausalLM", "DeepseekV3ForCausalLM"]),
        (lambda m: edit_json(m / "config.json", lambda c: c["quantization_config"].update(weight_block_size=[64, 64])), ["64"]),
        (lambda m: (m / "config.json").write_text("{ nope"), ["config.json"]),
        (lambda m: (m / "config.json").unlink(), ["config.json"]),
    ]
    for number, (change, words) in enumerate(cases):
        with Node(start=False) as node:
            model_copy(node, change)
            store_fails(node, words)
            print(f"     {number}: {node.log('weightstore').strip().splitlines()[-1][:150]}")


def test_tokenizer_without_merges():
    with Node(start=False) as node:
        model_copy(node, lambda m: edit_json(m / "tokenizer.json", lambda t: t["model"].pop("merges")))
        node.start("weightstore")
        node.start("router")
        assert node.processes["router"].wait(20) != 0
        assert "merges" in node.log("router"), node.log("router")


def test_machine():
    with Node(start=False, config="node.shm_dir = \"/proc\"") as node:
        store_fails(node, ["/proc"])
    with Node(start=False, config="weightstore.kv_pool_bytes = 9000000000000") as node:
        log = store_fails(node, ["need"])
        assert "available" in log, log
    with Node() as node:  # port in use: the second router says so and ends
        second = Node(start=False, config=f"router.http_listen = \"127.0.0.1:{node.http_port}\"")
        with second:
            second.start("router")
            assert second.processes["router"].wait(20) != 0
            assert str(node.http_port) in second.log("router") and "in use" in second.log("router"), second.log("router")
    with Node(start=False) as node:  # unknown key: exit code 78, named
        node.config.write_text(node.config.read_text() + "[decode]\nbatch = 2\n")
        for kind in ("weightstore", "prefill.0", "decode.0", "router"):
            node.start(kind)
            assert node.processes[kind].wait(20) == 78
            assert "decode.batch" in node.log(kind), node.log(kind)


def test_small_shm():
    """A tmpfs of 8 MiB for a 30 MB model: refused before the first byte, with both numbers."""
    with Node(start=False) as node:
        small = node.dir / "shm"
        small.mkdir()
        if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)], capture_output=True).returncode != 0:
            print("     not run: mounting a tmpfs needs root")
            return
        try:
            node.config.write_text(node.config.read_text().replace('shm_dir = "/dev/shm"', f"shm_dir = {json.dumps(str(small))}"))
            log = store_fails(node, ["available"])
            assert "8.39 MB" in log or "8 MiB" in log or "MB" in log, log
            assert not list(small.iterdir())
        finally:
            subprocess.run(["umount", str(small)], check=False)


def test_stale_image_of_another_version():
    with Node() as node:
        node.terminate("router")
        for kind in ("prefill.0", "decode.0", "weightstore"):
            assert node.terminate(kind) == 0, node.log(kind)
        manifest = next(p for p in node.shm.glob(f"hearth.{node.name}.manifest.*"))
        with open(manifest, "r+b") as f:
            f.seek(8)  # RegionHeader.format_version
            f.write(struct.pack("<I", 99))
        node.start("weightstore")
        wait_for("an end or a start", lambda: node.processes["weightstore"].poll() is not None or "99" in node.log("weightstore"), 20)
        assert "99" in node.log("weightstore"), node.log("weightstore")


def test_missing_runtime_dir():
    """A configuration error like another: one clear line, code 78, so that no service manager tries for ever."""
    with Node(start=False) as node:
        gone = node.dir / "gone"
        node.config.write_text(node.config.read_text().replace(f'runtime_dir = "{node.dir}"', f'runtime_dir = "{gone}"'))
        for name in ("weightstore", "prefill.0", "decode.0", "router"):
            node.start(name)
            assert node.processes[name].wait(20) == 78, (name, node.log(name))
            assert str(gone) in node.log(name), (name, node.log(name))
        assert not node.regions()


def test_unix_socket_paths_and_foreign_files():
    """A file of another program under a like name is not touched, a stale socket is replaced."""
    with Node(start=False) as node:
        foreign = node.shm / f"hearth.{node.name}x.manifest.0000"
        foreign.write_bytes(b"not ours")
        stale = socket.socket(socket.AF_UNIX)
        stale.bind(str(node.dir / f"{node.name}.weightstore.sock"))
        stale.close()
        try:
            for kind in ("weightstore", "decode.0", "prefill.0", "router"):
                node.start(kind)
            node.wait_ready()
            assert foreign.read_bytes() == b"not ours"
        finally:
            foreign.unlink()


if __name__ == "__main__":
    run_tests(globals())

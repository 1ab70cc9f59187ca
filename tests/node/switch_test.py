#!/usr/bin/env python3
"""`hearth load` of a model with another tokenizer: what ran before ends as it began, what comes after is encoded and decoded with the new one."""
import json
import os
import signal
import subprocess
import threading

from harness import BIN, FABLE, Node, run_tests, wait_for

WORDS = "Once upon a time"
BYTES = [3 + b for b in WORDS.encode()]  # the byte-level tokenizer that `hearth synth` writes: 0 to 2 are special


def make_other_model(folder):
    """Random weights in fable-moe's shape, with a vocabulary of 300 and a context of 512."""
    config = json.loads((FABLE / "config.json").read_text())
    config.update(vocab_size=300, max_position_embeddings=512)
    source = folder / "other-config.json"
    source.write_text(json.dumps(config))
    subprocess.run([str(BIN / "hearth"), "synth", "--config-json", str(source), "--out", str(folder / "other-model")], check=True, capture_output=True)
    return folder / "other-model"


def check_other_model(node):
    """The router speaks for the new model in everything that it says."""
    models = node.get("/v1/models").json()["data"]
    assert [(m["id"], m["max_model_len"]) for m in models] == [("other-model", 512)], models
    assert node.post("/tokenize", {"content": WORDS}).json()["tokens"] == BYTES
    assert node.post("/detokenize", {"tokens": BYTES}).json()["content"] == WORDS
    # Bytes that are no text show as U+FFFD: only what is ASCII throughout can be compared whole.
    body = {"prompt": WORDS, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
            "logit_bias": {str(3 + b): 100 for b in b"abcdefgh"}}
    answer = node.post("/v1/completions", body)
    assert answer.status == 200, (answer.status, answer.body)
    choice = answer.json()["choices"][0]
    assert choice["prompt_token_ids"][-len(BYTES):] == BYTES, choice
    assert len(choice["token_ids"]) == 24 and choice["text"] == bytes(i - 3 for i in choice["token_ids"]).decode(), choice
    refused = node.post("/v1/completions", {"prompt": [5] * 512})
    assert refused.status == 400 and refused.json()["error"]["code"] == "context_length_exceeded", refused.body
    assert node.post("/v1/completions", {"prompt": [300]}).status == 400
    return choice["text"]


def test_switch_to_a_model_with_another_tokenizer():
    node = Node(start=False)
    with node:
        node.config.write_text(node.config.read_text().replace('name = "m"\n', ""))  # the name then follows the directory
        other = make_other_model(node.dir)
        with node.supervised():
            assert [m["id"] for m in node.get("/v1/models").json()["data"]] == ["fable-moe"]
            old = {"model": "fable-moe", "prompt": WORDS, "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
            whole = node.post("/v1/completions", old).json()["choices"][0]["text"]
            answers = []
            with node.stream("/v1/completions", old) as events:
                text = next(events)["choices"][0]["text"]
                _, out, _ = node.command("load", str(other))
                assert "is ready" in out, out
                # Comes while the old worker still finishes its stream: it waits, and is the new model's.
                late = threading.Thread(target=lambda: answers.append(node.post("/v1/completions", {"prompt": WORDS, "max_tokens": 4, "return_token_ids": True})))
                late.start()
                text += "".join(c["text"] for e in events for c in e["choices"])
            assert text == whole, "the running answer is not disturbed"
            late.join()
            assert answers[0].status == 200, answers[0].body
            assert answers[0].json()["choices"][0]["prompt_token_ids"][-len(BYTES):] == BYTES
            node.wait_ready(30)
            first = check_other_model(node)

            # A router that starts anew reads the configuration's model first, and then finds that the store has another.
            wait_for("the workers", lambda: all(w and w["state"] == "ready" for w in node.status()["workers"].values()), 30)
            before = node.status()["router"]["pid"]
            os.kill(before, signal.SIGKILL)
            wait_for("another router", lambda: node.status()["router"] and node.status()["router"]["pid"] != before, 30)
            node.wait_ready(30)
            assert check_other_model(node) == first


if __name__ == "__main__":
    run_tests(globals())

"""The official OpenAI client and a gRPC client, unchanged, against a real node. Started by clients_test.sh."""
import threading
import time

import grpc
import openai
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from hearth.v1 import inference_pb2 as pb
from hearth.v1 import inference_pb2_grpc as rpc

from harness import Node, run_tests, wait_for

STORY = [{"role": "user", "content": "Tell me the story of The Golden Apple."}]


def openai_client(node, **kw):
    return openai.OpenAI(base_url=f"http://localhost:{node.http_port}/v1", api_key="any", max_retries=0, **kw)


def test_openai_package():
    with Node() as node:
        client = openai_client(node)
        assert [m.id for m in client.models.list()] == ["m"]
        assert client.models.retrieve("m").object == "model"
        whole = client.chat.completions.create(model="m", messages=STORY, temperature=0, max_tokens=30)
        text = whole.choices[0].message.content
        assert text and whole.usage.completion_tokens == 30 and whole.choices[0].finish_reason == "length"
        chunks = list(client.chat.completions.create(model="m", messages=STORY, temperature=0, max_tokens=30, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
        assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage.completion_tokens == 30
        probabilities = client.chat.completions.create(model="m", messages=STORY, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3)
        content = probabilities.choices[0].logprobs.content
        assert len(content) == 5 and all(len(t.top_logprobs) == 3 and t.logprob <= 0 and t.top_logprobs[0].token == t.token for t in content)
        assert bytes(b for t in content for b in t.bytes).decode() == probabilities.choices[0].message.content
        two = client.chat.completions.create(model="m", messages=STORY, temperature=1, n=2, seed=4, max_tokens=20)
        again = client.chat.completions.create(model="m", messages=STORY, temperature=1, n=2, seed=4, max_tokens=20)
        texts = [c.message.content for c in two.choices]
        assert texts[0] != texts[1] and texts == [c.message.content for c in again.choices] and two.usage.completion_tokens == 40
        old = client.completions.create(model="m", prompt="Once upon a time", temperature=0, max_tokens=12, logprobs=2)
        logprobs = old.choices[0].logprobs
        assert len(logprobs.tokens) == 12 and all(old.choices[0].text[o:].startswith(t) for o, t in zip(logprobs.text_offset, logprobs.tokens))
        stopped = client.chat.completions.create(model="m", messages=STORY, temperature=0, max_tokens=30, stop=[text[10:16]])
        assert stopped.choices[0].message.content == text[:text.index(text[10:16])] and stopped.choices[0].finish_reason == "stop"
        parts = client.chat.completions.create(model="m", temperature=0, max_tokens=30, messages=[{"role": "user", "content": [{"type": "text", "text": "Tell me the story of "}, {"type": "text", "text": "The Golden Apple."}]}])
        assert parts.choices[0].message.content == text
        for bad, error in (({"model": "nobody"}, openai.NotFoundError), ({"messages": []}, openai.BadRequestError), ({"temperature": -1}, openai.BadRequestError)):
            try:
                client.chat.completions.create(**{"model": "m", "messages": STORY, **bad})
                raise AssertionError(f"{bad} was accepted")
            except error as e:
                assert e.body["message"], e
        # A client that leaves in the middle.
        stream = client.chat.completions.create(model="m", messages=STORY, max_tokens=3000, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        wait_for("idle node", node.idle, 10)


def test_api_keys():
    with Node(start=False) as node:
        keys = node.dir / "keys"
        keys.write_text("first-key\nsecond-key\n")
        node.config.write_text(node.config.read_text().replace("[router]\n", f'[router]\napi_key_file = "{keys}"\n'))
        for kind in ("weightstore", "prefill.0", "decode.0", "router"):
            node.start(kind)
        node.wait_ready()
        for key, fine in (("first-key", True), ("second-key", True), ("third-key", False), ("", False)):
            try:
                openai.OpenAI(base_url=f"http://localhost:{node.http_port}/v1", api_key=key or "x", max_retries=0).chat.completions.create(model="m", messages=STORY, max_tokens=2)
                assert fine, key
            except openai.AuthenticationError:
                assert not fine, key
        channel = grpc.insecure_channel(f"localhost:{node.grpc_port}")
        stub = rpc.InferenceStub(channel)
        try:
            stub.Tokenize(pb.TokenizeRequest(text="hi"))
            raise AssertionError("gRPC without a key was served")
        except grpc.RpcError as e:
            assert e.code() == grpc.StatusCode.UNAUTHENTICATED, e.code()
        assert stub.Tokenize(pb.TokenizeRequest(text="hi"), metadata=[("authorization", "Bearer first-key")]).ids


def test_grpc_client():
    with Node() as node:
        channel = grpc.insecure_channel(f"localhost:{node.grpc_port}")
        stub = rpc.InferenceStub(channel)
        assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        assert "hearth.v1.Inference" in ProtoReflectionDescriptorDatabase(channel).get_services()
        model = stub.ListModels(pb.ListModelsRequest()).models[0]
        assert (model.id, model.context_tokens, model.vocab_size, model.ready) == ("m", 4096, 4096, True)
        ids = stub.Tokenize(pb.TokenizeRequest(text="Once upon a time", add_special_tokens=True)).ids
        assert ids[0] == 0 and stub.Detokenize(pb.DetokenizeRequest(ids=ids[1:])).text == "Once upon a time"

        def generate(**kw):
            options = pb.GenerationOptions(max_tokens=30, sampling=pb.SamplingParams(temperature=0), **kw)
            events = list(stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), options=options)))
            assert events[0].WhichOneof("event") == "accepted" and events[-1].WhichOneof("event") == "finished"
            return "".join(e.delta.text for e in events), [i for e in events for i in e.delta.token_ids], events[-1].finished
        text, token_ids, finished = generate()
        http = node.completion(list(ids), max_tokens=30, return_token_ids=True)["choices"][0]
        assert (text, token_ids) == (http["text"], http["token_ids"]) and finished.reason == http["finish_reason"]
        assert finished.usage.prompt_tokens == len(ids) and finished.usage.completion_tokens == len(token_ids)
        chat = list(stub.Chat(pb.ChatRequest(messages=[pb.ChatMessage(role="user", content=STORY[0]["content"])], options=pb.GenerationOptions(max_tokens=30, sampling=pb.SamplingParams(temperature=0)))))
        assert "".join(e.delta.text for e in chat) == node.chat(STORY[0]["content"], max_tokens=30)["choices"][0]["message"]["content"]

        # Cancel by id from another call; then by the client's own cancellation; then by deadline.
        def endless(request_id, **kw):
            options = pb.GenerationOptions(max_tokens=3000, ignore_eos=True)
            return stub.Generate(pb.GenerateRequest(text="Once", request_id=request_id, options=options), **kw)
        call = endless("mine")
        next(call)
        assert stub.Cancel(pb.CancelRequest(request_id="mine")).was_running
        assert [e for e in call][-1].finished.reason == "cancelled"
        call = endless("")
        next(call)
        call.cancel()
        try:
            list(endless("", timeout=0.5))
            raise AssertionError("the deadline did not end it")
        except grpc.RpcError as e:
            assert e.code() == grpc.StatusCode.DEADLINE_EXCEEDED, e.code()
        wait_for("idle node", node.idle, 10)
        for request, code in ((pb.GenerateRequest(model="nobody", text="x"), grpc.StatusCode.NOT_FOUND), (pb.GenerateRequest(text=""), grpc.StatusCode.INVALID_ARGUMENT),
                              (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[9999999])), grpc.StatusCode.INVALID_ARGUMENT),
                              (pb.GenerateRequest(text="x" * 200000), grpc.StatusCode.INVALID_ARGUMENT)):
            try:
                list(stub.Generate(request))
                raise AssertionError(f"accepted: {str(request)[:80]}")
            except grpc.RpcError as e:
                assert e.code() == code, (e.code(), e.details())


def test_many_clients_at_once():
    with Node() as node:
        client = openai_client(node)
        expected = client.chat.completions.create(model="m", messages=STORY, temperature=0, max_tokens=20).choices[0].message.content
        results = []
        threads = [threading.Thread(target=lambda: results.append(client.chat.completions.create(model="m", messages=STORY, temperature=0, max_tokens=20).choices[0].message.content)) for _ in range(16)]
        start = time.monotonic()
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert results == [expected] * 16
        print(f"     16 at once in {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    run_tests(globals())

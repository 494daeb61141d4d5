#!/usr/bin/env python3
"""Images in requests: in every dialect the same prompt, its tokens counted, its answer that of the image; broken, huge and
fetched images refused by the part's name; cached pages by the image's content and by client; text beside images; models
without a tower as before."""
import base64
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
import zlib

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import mtp_toy  # noqa
from gguf_tools import read_safetensors, write_safetensors  # noqa
from serverlib import Server, run_tests  # noqa
from vision_model import make  # noqa

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
FOLDER = make(os.path.join(BUILD, "tests/vision-model"))
A = base64.b64encode(open("tests/golden_images/qwen3_vl/a.png", "rb").read()).decode()
B = base64.b64encode(open("tests/golden_images/qwen3_vl/b.png", "rb").read()).decode()
JPEG = base64.b64encode(open("tests/golden_images/b.jpg", "rb").read()).decode()
SAME = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


def png(width, height, data=b""):
    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def b64(data):
    return base64.b64encode(data).decode()


def url(data, kind="png"):
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}


def text(s):
    return {"type": "text", "text": s}


def chat(s, content, status=200, key=None, **more):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return s.json("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **SAME, **more}, status, headers=headers)


def answer(r):
    return r["choices"][0]["message"]["content"]


def test_dialects(s):
    """One picture and one question: the same prompt and the same answer in every dialect."""
    first = chat(s, [url(A), text("What?")])
    n, said = first["usage"]["prompt_tokens"], answer(first)
    plain = chat(s, "What?")
    assert n == plain["usage"]["prompt_tokens"] + 20 + 2, (n, plain["usage"])  # 20 features and two marks
    assert said and said != answer(plain) and said != answer(chat(s, [url(B), text("What?")]))
    assert answer(chat(s, [{"type": "image_url", "image_url": f"data:image/png;base64,{A}"}, text("What?")])) == said

    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": A}}
    body = {"messages": [{"role": "user", "content": [image, text("What?")]}], **SAME}
    r = s.json("/v1/messages", body)
    assert r["usage"]["input_tokens"] + r["usage"].get("cache_read_input_tokens", 0) == n, r["usage"]
    assert "".join(b["text"] for b in r["content"]) == said
    counted = s.json("/v1/messages/count_tokens", {"messages": body["messages"]})
    assert counted["input_tokens"] == n

    part = {"type": "input_image", "image_url": f"data:image/png;base64,{A}"}
    r = s.json("/v1/responses", {"input": [{"role": "user", "content": [part, {"type": "input_text", "text": "What?"}]}], "max_output_tokens": 12,
                                 "temperature": 0, "ignore_eos": True})
    assert r["usage"]["input_tokens"] == n and r["output"][0]["content"][0]["text"] == said, r
    more = s.json("/v1/responses", {"input": "And?", "previous_response_id": r["id"], "max_output_tokens": 1})
    assert more["usage"]["input_tokens"] > n + 12  # the picture is part of what came before

    r = s.json("/api/chat", {"messages": [{"role": "user", "content": "What?", "images": [A]}], "stream": False,
                             "options": {"temperature": 0, "num_predict": 12}, "ignore_eos": True})
    assert r["prompt_eval_count"] == n and r["message"]["content"] == said, r
    r = s.json("/api/generate", {"prompt": "What?", "images": [A], "stream": False, "options": {"temperature": 0, "num_predict": 12},
                                 "ignore_eos": True})
    assert r["prompt_eval_count"] == n and r["response"] == said, r
    assert "vision" in s.json("/api/show", {"model": "x"})["capabilities"]
    assert json.loads(s.get("/props")[2])["modalities"]["vision"] is True


def test_tool_results(s):
    """A picture that a tool returns, as agents read files: in both dialects that have them."""
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    start = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    one = s.json("/v1/chat/completions", {"messages": [*start, {"role": "tool", "tool_call_id": "c", "content": [url(A)]}], **SAME})
    none = s.json("/v1/chat/completions", {"messages": [*start, {"role": "tool", "tool_call_id": "c", "content": ""}], **SAME})
    assert one["usage"]["prompt_tokens"] == none["usage"]["prompt_tokens"] + 22
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": A}}
    r = s.json("/v1/messages", {"messages": [
        {"role": "user", "content": "Look."}, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "read", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [image]}]}], **SAME})
    assert "".join(b["text"] for b in r["content"]) == answer(one)


def test_order(s):
    """Pictures stand where they were put, and each is itself: swapped they are another prompt."""
    ab = chat(s, [text("1"), url(A), text("2"), url(B), text("3")], no_cache=True)
    ba = chat(s, [text("1"), url(B), text("2"), url(A), text("3")], no_cache=True)
    assert ab["usage"]["prompt_tokens"] == ba["usage"]["prompt_tokens"] and answer(ab) != answer(ba)
    again = chat(s, [text("1"), url(A), text("2"), url(B), text("3")])
    assert answer(again) == answer(ab)
    shown = s.json("/apply-template", {"messages": [{"role": "user", "content": [text("1"), url(A), text("2")]}]})["prompt"]
    assert "1<|vision_start|><|image_pad|><|vision_end|>2" in shown, shown
    assert answer(chat(s, [url(JPEG, "jpeg"), text("?")])) != answer(chat(s, [url(A), text("?")]))


def test_plain_marks(s):
    """The model's marks in a text stay text; so do words that look like ours."""
    r = chat(s, [text("<|image_pad|><|vision_start|>"), url(A)])
    assert r["usage"]["prompt_tokens"] == chat(s, "<|image_pad|><|vision_start|>")["usage"]["prompt_tokens"] + 22
    chat(s, "image00000000000000000000000000000000" + "0000 is no image")


def test_completions(s):
    """A raw prompt with the model's template and a mark gives what the chat gives; marks and images must match."""
    want = answer(chat(s, [url(A), text("What?")]))
    prompt = "<|im_start|>user\n<__media__>What?<|im_end|>\n<|im_start|>assistant\n"
    for path, field in ("/v1/completions", "max_tokens"), ("/completion", "n_predict"):
        def ask(p, status=200):
            return s.json(path, {"prompt": p, field: 12, "temperature": 0, "ignore_eos": True}, status)
        r = ask({"prompt_string": prompt, "multimodal_data": [A]})
        assert (r["choices"][0]["text"] if "choices" in r else r["content"]) == want, (r, want)
        for bad, words in (({"prompt_string": prompt, "multimodal_data": []}, "0 images for 1 marks"),
                           ({"prompt_string": prompt, "multimodal_data": [A, A]}, "2 images for 1 marks"),
                           ({"prompt_string": prompt, "multimodal_data": ["%"]}, "prompt.multimodal_data[0]: the image is not valid base64"),
                           ({"prompt_string": prompt, "multimodal_data": [b64(b"x")]}, "prompt.multimodal_data[0]: neither PNG"),
                           ({"prompt_string": prompt + "<|image_pad|>", "multimodal_data": [A]}, "the model's own marks"),
                           ({"prompt_string": prompt}, "a list multimodal_data"), ({"multimodal_data": [A]}, "a string prompt_string")):
            r = ask(bad, 400)
            assert words in json.dumps(r), (words, r)


def test_detail(s):
    """detail is obeyed or refused; a large picture with few details is fewer tokens, and another picture for the cache."""
    folder = make(os.path.join(BUILD, "tests/vision-model-large"))
    pixels = json.load(open(f"{folder}/preprocessor_config.json"))
    pixels["size"]["longest_edge"] = 1 << 16
    json.dump(pixels, open(f"{folder}/preprocessor_config.json", "w"))
    large = Server(BUILD, "-c", "4096", model=folder)
    rows = b"".join(b"\0" + bytes((x * 3 + y * c) & 255 for x in range(256) for c in (1, 2, 3)) for y in range(256))
    big = b64(png(256, 256, zlib.compress(rows)))

    def ask(detail, status=200):
        r = chat(large, [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{big}", **detail}}, text("What?")], status)
        return r if status != 200 else (r["usage"]["prompt_tokens"], answer(r), r["usage"]["prompt_tokens_details"]["cached_tokens"])
    plain = ask({})
    for value in "auto", "high", "original":
        assert ask({"detail": value})[:2] == plain[:2]
    low, again = ask({"detail": "low"}), ask({"detail": "low"})
    assert plain[0] - low[0] == 1024 - 256 and low[2] < 32 and again[2] > 200 and again[:2] == low[:2] and low[1] != plain[1], (plain, low, again)
    for value in "tiny", 3:
        assert "messages[0].content[0]: detail: expected low, high, original or auto" in json.dumps(ask({"detail": value}, 400))
    r = large.json("/v1/responses", {"input": [{"role": "user", "content": [
        {"type": "input_image", "image_url": f"data:image/png;base64,{big}", "detail": "low"}, {"type": "input_text", "text": "What?"}]}],
        "max_output_tokens": 1})
    assert r["usage"]["input_tokens"] == low[0], (r["usage"], low)
    large.stop()


def test_cache(s):
    """A picture seen again: its pages come from the cache, of its client alone; another picture's never."""
    body = [text("Describe this picture in some words, please: "), url(B), text("!")]
    first = chat(s, body, key="k1")
    again = chat(s, body, key="k1")
    assert answer(first) == answer(again)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 60, again["usage"]
    other = chat(s, [body[0], url(A), body[2]], key="k1")
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] < 64 and answer(other) != answer(first)


def test_refused(s):
    """What is no picture, is too large, or would have to be fetched: a 400 that names the part."""
    def refuse(part, words, at=1):
        r = chat(s, [text("x"), part], status=400)["error"]
        assert f"messages[0].content[{at}]: {words}" in r["message"], r
    refuse(url("!!"), "the image is not valid base64")
    refuse(url(b64(b"hello")), "neither PNG, JPEG, WebP, GIF nor BMP")
    refuse(url(b64(base64.b64decode(A)[:300])), "PNG: the file ends too early")
    refuse(url(b64(png(60000, 60000))), "PNG: 60000 x 60000 pixels; at most 33554432 pixels are accepted")
    wide = zlib.compress((b"\0" + b"\x80" * 3 * 4000) * 2)
    refuse(url(b64(png(4000, 2, wide))), "an image of 4000 x 2: one side is more than 200 times the other")
    refuse({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
           "images are not fetched from other servers: send a data: URL, or allow the origin (--allow-image-origins)")
    refuse({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "expected data:image/...;base64,...")
    refuse({"type": "image_url", "image_url": {}}, "the image has no url")
    r = s.json("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["AAAA"]}]}, 400)
    assert "messages[0].images[0]: neither PNG" in r["error"], r
    r = s.json("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "url", "url": "http://localhost/x"}}]}]}, 400)
    assert "are not fetched" in r["error"]["message"], r
    r = s.json("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}]}, 400)
    assert "neither PNG" in r["error"]["message"], r
    chat(s, [text("still"), url(A)])
    many = chat(s, [url(A)] * 257, status=400)["error"]["message"]
    assert "more than 256 images" in many, many


def test_too_long(s):
    """Pictures count: a prompt that they make too long is refused as any other."""
    r = chat(s, [url(A)] * 120, status=400)["error"]
    assert r["code"] == "context_length_exceeded" and r["n_prompt_tokens"] > 120 * 22, r


def test_streams(s):
    """Streams with pictures beside streams of text, all as alone."""
    bodies = [[url(A), text("s")], "text alone", [url(B), text("s")], "another text", [text("q"), url(A), url(B)]]
    alone = [answer(chat(s, b)) for b in bodies]
    got = [None] * len(bodies)

    def run(i):
        events = s.stream("/v1/chat/completions", {"messages": [{"role": "user", "content": bodies[i]}], **SAME})
        got[i] = "".join(json.loads(e)["choices"][0]["delta"].get("content") or "" for e in events[:-1] if json.loads(e)["choices"])
    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(bodies))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == alone


def test_together(s):
    """Four requests at once with one long prefix that has pictures: one computes it, the others take it from the cache. Another
    picture in the same place shares the text before it alone."""
    def ask(content):
        return chat(s, content, max_tokens=3)
    n = ask([text("A common text. " * 25), url(A)])["usage"]["prompt_tokens"]
    for pictures in ((A, A, A, A), (A, B, A, B)):
        lead = f"{len(set(pictures))} pictures. " + "A common text. " * 25
        bodies = [[text(lead), url(p), text("More. " * 40), text(f"Question {i}?")] for i, p in enumerate(pictures)]
        got = [None] * 4

        def run(i):
            got[i] = ask(bodies[i])
        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        cached = [r["usage"]["prompt_tokens_details"]["cached_tokens"] for r in got]
        whole = [r["usage"]["prompt_tokens"] for r in got]
        groups = [sorted(c for c, p in zip(cached, pictures) if p == q) for q in set(pictures)]
        for g in groups:  # the first of a picture has at most the text before it, the others all whole pages
            assert g[0] < n and all(c > n and c >= 0.98 * (min(whole) - 32) for c in g[1:]), (cached, whole, n)
        assert [answer(r) for r in got] == [answer(chat(s, b, max_tokens=3)) for b in bodies]


def test_blind(_):
    """Without a tower, or with --no-images, nothing has changed."""
    for flags, model in ((), None), (("--no-images",), FOLDER):
        s = Server(BUILD, *flags, model=model)
        r = chat(s, [url(A)], status=400)["error"]["message"]
        assert "this model reads text only" in r, r
        assert json.loads(s.get("/props")[2])["modalities"]["vision"] is False
        s.stop()
    s = Server(BUILD, "--max-image-tokens", "8", "--max-image-pixels", "5000", model=FOLDER)
    r = chat(s, [url(A)])
    assert r["usage"]["prompt_tokens"] < chat(s, "")["usage"]["prompt_tokens"] + 20
    assert "at most 5000 pixels" in chat(s, [url(B)], status=400)["error"]["message"]
    s.stop()


def test_steps(_):
    """Draft tokens, small steps, a full cache, a schema: the answers to pictures stay those of a plain server."""
    plain, drafting = (os.path.join(BUILD, "tests/vision-model-" + x) for x in ("plain", "drafting"))
    make(plain, "tests/golden_images/qwen3_5")
    mtp_toy.main(plain, drafting, 1)
    shutil.copy(f"{plain}/tokenizer.json", drafting)
    os.remove(f"{drafting}/generation_config.json")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}},
                                                                             "required": ["n"], "additionalProperties": False}}}
    want = None
    for model, flags in ((plain, ()), (drafting, ("--draft", "1")), (drafting, ("--draft", "3", "-b", "7")), (plain, ("-b", "16")),
                         (plain, ("--draft", "3", "--draft-model", drafting)), (drafting, ("--draft-model", plain)),
                         (plain, ("--no-prefix-cache",)), (plain, ("--kv-tokens", "160", "-c", "128"))):
        s = Server(BUILD, *flags, model=model)
        got = [answer(chat(s, b)) for b in ([url(A), text("What is it?")], [text("And"), url(B), url(A)], [url(A), text("What is it?")], "text")]
        got.append(answer(chat(s, [url(B), text("How many?")], response_format=schema, ignore_eos=False, max_tokens=40)))
        assert set(json.loads(got[4])) == {"n"}
        assert "--draft" not in flags or s.metrics()["steel_draft_tokens_total"] > 0
        want = want or got
        assert got == want, (flags, got, want)
        s.stop()


def test_beside(_):
    """--deterministic: the same bytes alone and beside others. An adapter: other answers to a picture, whose pages are not the base's;
    tools beside a picture."""
    folder = make(os.path.join(BUILD, "tests/vision-model-adapter"))
    adapter, tensors = os.path.join(BUILD, "tests/vision-adapter"), read_safetensors(f"{folder}/model.safetensors")
    os.makedirs(adapter, exist_ok=True)
    weights = {}
    for name, (_, shape, _) in tensors.items():
        if name.startswith("model.language_model.") and name.endswith(("q_proj.weight", "v_proj.weight", "o_proj.weight")):
            for part, dims in ("A", (2, shape[1])), ("B", (shape[0], 2)):
                values = [((7 * i + len(name)) % 13 - 6) / 12 for i in range(dims[0] * dims[1])]
                weights[f"base_model.model.{name[:-7]}.lora_{part}.weight"] = ("F32", list(dims), struct.pack(f"<{len(values)}f", *values))
    write_safetensors(f"{adapter}/adapter_model.safetensors", weights)
    json.dump({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "o_proj"]},
              open(f"{adapter}/adapter_config.json", "w"))
    s = Server(BUILD, "--deterministic", "--lora", f"odd={adapter}", model=folder)
    prompts = [[url(A), text("What is it?")], [text("And"), url(B), url(A)], "text alone", [url(B)]]
    want = [answer(chat(s, p)) for p in prompts]
    got = [None] * 12

    def one(i):
        got[i] = answer(chat(s, prompts[i % 4], max_tokens=12))
    threads = [threading.Thread(target=one, args=(i,)) for i in range(12)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert got == want * 3, (got, want)
    odd = chat(s, prompts[0], model="odd")
    assert answer(odd) != want[0] and odd["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, odd
    again = chat(s, prompts[0], model="odd")
    assert answer(again) == answer(odd) and again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, again
    assert answer(chat(s, prompts[0])) == want[0]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    assert chat(s, prompts[0], tools=[tool], max_tokens=4)["usage"]["prompt_tokens"] >= chat(s, prompts[0])["usage"]["prompt_tokens"]
    s.stop()


def test_cancel(_):
    """Clients leave while their pictures are decoded and encoded: the work ends, and others are answered as before."""
    folder = make(os.path.join(BUILD, "tests/vision-model-slow"))
    pixels = json.load(open(f"{folder}/preprocessor_config.json"))
    pixels["size"]["longest_edge"] = 1 << 16
    json.dump(pixels, open(f"{folder}/preprocessor_config.json", "w"))
    s = Server(BUILD, "-c", "20000", model=folder, env={"STEEL_ISA": "ref"})
    want = answer(chat(s, [url(A), text("What?")]))
    many = []
    for i in range(12):  # seconds of work for the reference kernels
        rows = b"".join(b"\0" + bytes((x * (i + 3) + y * c) & 255 for x in range(256) for c in (1, 2, 3)) for y in range(256))
        many.append(url(b64(png(256, 256, zlib.compress(rows, 1)))))
    body = json.dumps({"messages": [{"role": "user", "content": many}], **SAME, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    clients, before = [s.socket() for _ in range(3)], s.metrics()["steel_prompt_tokens_computed_total"]
    for c in clients:
        c.sendall(head + body)

    def under_way():
        return sum(v for k, v in s.metrics().items() if k.startswith(("steel_jobs", "steel_requests_running", "steel_requests_waiting")))
    while not under_way():
        time.sleep(0.01)
    for c in clients:
        c.close()
    while under_way():
        time.sleep(0.01)
    assert s.metrics()["steel_prompt_tokens_computed_total"] - before < 12 * 1024  # not all of one prompt
    assert answer(chat(s, [url(A), text("What?")])) == want
    s.stop()


def test_memory(_):
    """What requests hold of pictures is bounded: a second one of the same client is refused while the first runs, text is not."""
    s = Server(BUILD, "--image-memory", "1K", model=FOLDER)
    slow = json.dumps({"messages": [{"role": "user", "content": [url(A), text("Go on")]}], "ignore_eos": True, "n": 4, "stream": True}).encode()
    refused = None
    while not refused:  # unless the first has ended already
        c = s.socket()
        c.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(slow) + slow)
        c.recv(15)
        status, headers, reply = s.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [url(B)]}], **SAME})
        refused = reply if status == 429 else None
        assert status == 200 or int(headers["retry-after"]) > 0, reply
        chat(s, "text")
        c.close()
    assert "images of other requests" in refused, refused
    s.wait_metric("steel_requests_running", 0)
    chat(s, [url(B)])
    assert s.stop() == 0
    p = subprocess.run([BUILD + "/steel", "serve", FOLDER, "--image-memory", "much"], capture_output=True, text=True)
    assert p.returncode == 2 and "--image-memory much" in p.stderr, p


def test_stop(s):
    """All is freed (under a sanitizer: nothing leaks)."""
    assert s.stop() == 0, s.log()[-2000:]


run_tests([test_dialects, test_tool_results, test_order, test_plain_marks, test_completions, test_detail, test_cache, test_refused, test_too_long, test_streams, test_together, test_blind, test_steps, test_beside, test_cancel, test_memory, test_stop],
          Server(BUILD, model=FOLDER))

#!/usr/bin/env python3
"""llama.cpp's own API and fill-in-the-middle: /completion, /infill, `suffix`, field by field, with hostile bodies and
clients that leave. The model with fill-in-the-middle tokens is the toy with renamed tokens."""
import json
import os
import subprocess
import sys

sys.path.insert(0, os.path.dirname(__file__))
from serverlib import Gateway, Server, fim_model, http_request, run_tests

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
PREFIX, SUFFIX, MIDDLE, PAD, REPO, FILE = range(264, 270)
QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
KEYS = ["fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"]
SMALL = {"n_predict": 6, "temperature": 0, "ignore_eos": True}
ASCII = [[i, False] for i in range(128, 288)]


def ids(text):
    return list(text.encode())


def events(s, path, body):
    """The events of a stream without [DONE]."""
    status, headers, text = s.post(path, dict(body, stream=True))
    assert status == 200 and headers["content-type"].startswith("text/event-stream") and "[DONE]" not in text, text
    return [json.loads(e[6:]) for e in text.strip().split("\n\n") if e.startswith("data: ")]


def tokens_of(s, prompt):
    """The token ids of a prompt that was decoded with its special tokens."""
    return s.json("/tokenize", {"content": prompt})["tokens"]


def test_completion(plain, fim):
    want = plain.json("/v1/completions", {"prompt": "hello", "max_tokens": 6, "temperature": 0, "ignore_eos": True})
    for slot, path in enumerate(("/completion", "/completions")):
        c = plain.json(path, dict(SMALL, prompt="hello", seed=7, id_slot=slot))
        settings, timings = c.pop("generation_settings"), c.pop("timings")
        assert c == {"index": 0, "content": want["choices"][0]["text"], "tokens": [], "id_slot": slot, "stop": True, "model": "toy",
                     "tokens_predicted": 6, "tokens_evaluated": 5, "prompt": "hello", "has_new_line": "\n" in c["content"],
                     "truncated": False, "stop_type": "limit", "stopping_word": "", "tokens_cached": 11}, c
        assert settings["n_predict"] == 6 and settings["seed"] == 7 and settings["temperature"] == 0
        assert timings["cache_n"] + timings["prompt_n"] == 5 and timings["predicted_n"] == 6, timings
    c = plain.json("/completion", dict(SMALL, prompt=ids("hello"), return_tokens=True, n_probs=2))
    assert c["content"] == want["choices"][0]["text"] and len(c["tokens"]) == 6
    probs = c["completion_probabilities"]
    assert [p["id"] for p in probs] == c["tokens"] and all(len(p["top_logprobs"]) == 2 for p in probs)
    assert all(p["top_logprobs"][0]["id"] == p["id"] and p["logprob"] <= 0 and p["bytes"] for p in probs), probs
    # the absence of a limit, none at all, and a stopping word
    assert plain.json("/completion", {"prompt": "a", "n_predict": 0})["tokens_predicted"] == 0
    long = plain.json("/completion", {"prompt": "a", "temperature": 0, "ignore_eos": True, "logit_bias": ASCII, "n_predict": 40})
    word = long["content"][20]
    c = plain.json("/completion", {"prompt": "a", "temperature": 0, "ignore_eos": True, "logit_bias": ASCII, "stop": [word]})
    assert c["stop_type"] == "word" and c["stopping_word"] == word and long["content"].startswith(c["content"] + word), c
    many = plain.json("/completion", dict(SMALL, prompt=["hello", "b"]))
    assert [m["index"] for m in many] == [0, 1] and many[0]["content"] == want["choices"][0]["text"]


def test_stream(plain, fim):
    body = dict(SMALL, prompt="hello", logit_bias=ASCII, n_probs=1, timings_per_token=True)
    whole = plain.json("/completion", dict(body, return_tokens=True))
    got = events(plain, "/completion", body)
    assert "".join(e["content"] for e in got) == whole["content"]
    assert [t for e in got for t in e["tokens"]] == whole["tokens"]
    assert [p for e in got for p in e["completion_probabilities"]] == whole["completion_probabilities"]
    assert [e["stop"] for e in got] == [False] * (len(got) - 1) + [True]
    assert all(e["timings"]["predicted_n"] == e["tokens_predicted"] and e["tokens_evaluated"] == 5 for e in got[:-1]), got
    end = dict(got[-1], content=whole["content"], tokens=whole["tokens"])
    assert end.keys() == whole.keys() and end["stop_type"] == "limit" and end["prompt"] == "hello"


def test_response_fields(plain, fim):
    fields = ["content", "generation_settings/n_predict", "timings/prompt_n", "nothing", "content/x", "/", ""]
    c = plain.json("/completion", dict(SMALL, prompt="zz", response_fields=fields))
    assert c.keys() == {"content", "generation_settings/n_predict", "timings/prompt_n"} and c["generation_settings/n_predict"] == 6, c
    assert plain.json("/completion", dict(SMALL, prompt="zz", response_fields=[""])) == {}
    end = events(plain, "/completion", dict(SMALL, prompt="zz", response_fields=["stop", "prompt"]))[-1]
    assert end == {"stop": True, "prompt": "zz"}, end


def test_limits(plain, fim):
    """Time and indentation end an output after a line, as editors want it."""
    lines = {"prompt": "x", "ignore_eos": True, "temperature": 0, "n_predict": 400, "grammar": 'root ::= "a\\n" ("  b\\n")+ [c] [d]*'}
    text = plain.json("/completion", dict(lines, grammar='root ::= "a\\n" "  b\\n" "    c\\n" "  d\\n" "e\\n"', ignore_eos=False))
    assert text["content"] == "a\n  b\n    c\n  d\ne\n" and text["stop_type"] == "eos", text
    for n, want in ((0, "a\n  b\n    c\n  d\ne\n"), (1, "a\n  b\n    c\n  d\n"), (3, "a\n")):
        c = plain.json("/completion", dict(lines, grammar='root ::= "a\\n" "  b\\n" "    c\\n" "  d\\n" "e\\n"', ignore_eos=False, n_indent=n))
        assert (c["content"], c["stop_type"]) == (want, "limit" if n else "eos"), (n, c)
    only = lambda text: [[i, False] for i in range(288) if i not in ids(text)]
    endless = {"prompt": "x", "logit_bias": only("b\n"), "ignore_eos": True, "max_tokens": 4000, "seed": 1}
    c = plain.json("/completion", dict(endless, t_max_predict_ms=1))
    assert c["stop_type"] == "limit" and c["tokens_predicted"] < 4000 and c["has_new_line"], c
    c = plain.json("/completion", dict(endless, logit_bias=only("bc"), t_max_predict_ms=1, n_predict=300))
    assert c["tokens_predicted"] == 300 and not c["has_new_line"]
    c = plain.json("/completion", {"prompt": [97] * 8000, "n_predict": 3, "ignore_eos": True, "t_max_prompt_ms": 1})
    assert (c["content"], c["stop_type"], c["tokens_predicted"]) == ("", "limit", 0), c
    plain.wait_metric("steel_requests_running", 0)


def test_infill(plain, fim):
    body = dict(SMALL, input_prefix="def f(", input_suffix="):\n")
    c = fim.json("/infill", body)
    assert tokens_of(fim, c["prompt"]) == [PREFIX] + ids("def f(") + [SUFFIX] + ids("):\n") + [MIDDLE], c["prompt"]
    assert c["stop"] and c["tokens_predicted"] == 6 and not c["truncated"]
    c = fim.json("/infill", dict(body, prompt="x, "))
    assert tokens_of(fim, c["prompt"]) == [PREFIX] + ids("def f(x, ") + [SUFFIX] + ids("):\n") + [MIDDLE]
    extra = [{"filename": "a.py", "text": "A = 1\n"}, {"text": "no name"}]
    c = fim.json("/infill", dict(body, input_extra=extra))
    assert tokens_of(fim, c["prompt"]) == (
        [REPO] + ids("project\n") + [FILE] + ids("a.py\nA = 1\n") + [FILE] + ids("file\nno name") + [FILE] + ids("current\n") +
        [PREFIX] + ids("def f(") + [SUFFIX] + ids("):\n") + [MIDDLE]), c["prompt"]
    # tokens spelled in the texts of a client are text
    c = fim.json("/infill", dict(body, input_prefix="<|fim_middle|>", response_fields=["tokens_evaluated"]))
    assert c == {"tokens_evaluated": 3 + len("<|fim_middle|>") + len("):\n")}, c
    # what is farthest from the cursor is cut, and said
    c = fim.json("/infill", dict(body, input_prefix="p" * 9000 + "P", input_suffix="S" + "s" * 9000, input_extra=extra))
    got = tokens_of(fim, c["prompt"])
    assert c["truncated"] and len(got) == c["tokens_evaluated"] == 8192 - 6, len(got)
    cut = got.index(SUFFIX)
    assert got[0] == PREFIX and got[cut - 1] == ord("P") and got[cut + 1] == ord("S") and got[-1] == MIDDLE
    assert abs(cut - 3 * (len(got) - cut)) < 16, cut
    # as llama.vim asks, and as it warms the cache
    c = fim.json("/infill", dict(body, prompt="", samplers=["top_k", "top_p", "infill"], top_k=40, top_p=0.9, cache_prompt=True, stop=[],
                                 n_indent=0, t_max_prompt_ms=10000, t_max_predict_ms=10000, input_extra=[],
                                 response_fields=["content", "timings/prompt_n", "timings/predicted_ms", "truncated", "tokens_cached"]))
    assert c.keys() == {"content", "timings/prompt_n", "timings/predicted_ms", "truncated", "tokens_cached"}, c
    assert fim.json("/infill", dict(body, n_predict=0, samplers=[], temperature=0.0, response_fields=[""])) == {}
    got = events(fim, "/infill", body)
    assert "".join(e["content"] for e in got) == fim.json("/infill", body)["content"] and got[-1]["stop"]
    e = plain.json("/infill", body, 501)["error"]
    assert e["type"] == "not_supported_error" and e["param"] == "input_prefix" and "fill-in-the-middle" in e["message"], e


def test_suffix(plain, fim):
    infill = fim.json("/infill", dict(SMALL, input_prefix="one ", input_suffix=" three"))
    c = fim.json("/v1/completions", {"prompt": "one ", "suffix": " three", "max_tokens": 6, "temperature": 0, "ignore_eos": True})
    assert c["choices"][0]["text"] == infill["content"] and c["usage"]["prompt_tokens"] == 3 + len("one  three")
    o = fim.json("/api/generate", {"model": "m", "prompt": "one ", "suffix": " three", "stream": False,
                                   "options": {"num_predict": 6, "temperature": 0}})
    assert o["prompt_eval_count"] == 3 + len("one  three") and infill["content"].startswith(o["response"]), o
    for path, body, where in (("/v1/completions", {"prompt": ["a"], "suffix": "b"}, "prompt"),
                              ("/v1/completions", {"prompt": "a", "suffix": 3}, "suffix")):
        assert fim.json(path, body, 400)["error"]["param"] == where
    assert "system" in fim.json("/api/generate", {"prompt": "a", "suffix": "b", "system": "c"}, 400)["error"]
    assert "suffix" in fim.json("/api/generate", {"prompt": "a", "suffix": {}}, 400)["error"]
    assert plain.json("/v1/completions", {"prompt": "a", "suffix": "b"}, 400)["error"]["param"] == "suffix"
    assert "fill-in-the-middle" in plain.json("/api/generate", {"prompt": "a", "suffix": "b"}, 400)["error"]
    assert plain.json("/v1/completions", {"prompt": "a", "suffix": "", "max_tokens": 1})["object"] == "text_completion"


def test_names(plain, fim):
    """Tokens known by name, those that only metadata names, suffixes that come first, and names that are plain text."""
    cases = ((QWEN, (), [PREFIX, 97, SUFFIX, 98, MIDDLE]), (["<a>", "<b>", "<c>"], KEYS[:3], [PREFIX, 97, SUFFIX, 98, MIDDLE]),
             (["[PREFIX]", "[SUFFIX]"], (), [SUFFIX, 98, PREFIX, 97]),
             (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], (), [PREFIX, 97, SUFFIX, 98, MIDDLE]),
             (["<fim_prefix>", "<fim_suffix>"], (), None))
    for names, keys, want in cases:
        s = Server(BUILD, model=fim_model(plain, os.path.join(plain.dir.name, "named.gguf"), names, keys))
        c = s.json("/infill", dict(SMALL, input_prefix="a", input_suffix="b"), 200 if want else 501)
        assert not want or tokens_of(s, c["prompt"]) == want, (names, c)
        s.stop()


def test_lookups(plain, fim):
    props = json.loads(plain.get("/props")[2])
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == 8192 and settings["params"]["n_predict"] == -1 and settings["params"]["top_k"] == 40, settings
    assert props["model_alias"] == "toy" and props["eos_token"] == "<|im_end|>" and props["chat_template"].startswith("{%- if tools %}")
    assert props["modalities"] == {"vision": False, "audio": False} and props["build_info"].startswith("steel-")
    idle = json.loads(plain.get("/slots")[2])
    assert len(idle) == props["total_slots"] > 1
    assert idle == [{"id": i, "n_ctx": 8192, "speculative": True, "is_processing": False} for i in range(len(idle))]
    sock = plain.socket()
    sock.sendall(http_request("/completion", {"prompt": "secret", "stream": True, "ignore_eos": True, "n_predict": 8000}))
    while b"data: " not in sock.recv(65536):
        pass
    text = plain.get("/slots")[2]
    busy = [s for s in json.loads(text) if s["is_processing"]]
    assert len(busy) == 1 and "secret" not in text, busy
    assert busy[0]["n_prompt_tokens"] == 6 and busy[0]["next_token"]["n_decoded"] > 0
    sock.close()
    plain.wait_metric("steel_requests_running", 0)
    for action in ("save", "restore", "erase"):
        e = plain.json(f"/slots/0?action={action}", {"filename": "a"}, 501)["error"]
        assert e["type"] == "not_supported_error" and "start it with --slot-save-path" in e["message"]
    assert json.loads(plain.get("/version")[2])["version"] == props["build_info"][6:]
    assert plain.get("/ping")[::2] == plain.get("/health")[::2]


def test_counts(plain, fim):
    hi = [{"role": "user", "content": "hi"}]
    n = plain.json("/v1/chat/completions", {"messages": hi, "max_tokens": 1})["usage"]["prompt_tokens"]
    for stream in (False, True):
        c = plain.json("/v1/chat/completions/input_tokens", {"messages": hi, "stream": stream})
        assert c == {"object": "chat.completion.input_tokens", "input_tokens": n}, c
    assert plain.json("/v1/responses/input_tokens", {"input": "hi"}) == {"object": "response.input_tokens", "input_tokens": n}
    assert plain.json("/v1/chat/completions/input_tokens", {"messages": 3}, 400)["error"]["param"] == "messages"
    assert plain.json("/v1/responses/input_tokens", {"input": 3}, 400)["error"]["param"] == "input"


def test_openapi(plain, fim):
    doc = json.loads(plain.get("/openapi.json")[2])
    rows = [json.loads(line) for line in subprocess.run([os.path.join(BUILD, "tests/test_endpoints"), "--list"], check=True,
                                                        capture_output=True, text=True).stdout.splitlines()]
    want = {(p.replace("*", "{name}", 1).replace("*", "{part}"), r["method"].lower()) for r in rows if r["served"] for p in r["paths"]}
    assert {(p, m) for p, methods in doc["paths"].items() for m in methods} == want
    assert doc["paths"]["/completion"]["post"]["requestBody"] and doc["paths"]["/ping"]["get"]["security"] == []


def test_embedding(plain, fim):
    for path in ("/embedding", "/reranking", "/v1/reranking"):
        assert plain.json(path, {"content": "a", "query": "a", "documents": ["a"]}, 501)["error"]["type"] == "not_supported_error"
    s = Server(BUILD, "--embedding", os.path.join(plain.dir.name, "toy.gguf"))
    want = [d["embedding"] for d in s.json("/v1/embeddings", {"input": ["a", "b"]})["data"]]
    for key in ("content", "input"):
        got = s.json("/embedding", {key: ["a", "b"]})
        assert got == [{"index": 0, "embedding": [want[0]]}, {"index": 1, "embedding": [want[1]]}]
    for body, where in (({}, "content"), ({"content": 3}, "content"), ({"content": ["a", {}]}, "content[1]"), ({"input": []}, "input"),
                        ({"content": "a", "embd_normalize": 0}, "embd_normalize")):
        assert s.json("/embedding", body, 400)["error"]["param"] == where, body
    s.stop()


def test_hostile(plain, fim):
    good = {"prompt": "a", "n_predict": 1}
    for field, bad in (("n_predict", (-3, "x", 1.5, [], 2 ** 40)), ("n_probs", (-1, 21, "x")), ("id_slot", ("x", -2, 16)), ("n_cmpl", (0, "x")),
                       ("n_indent", (-1, 5000, "x")), ("t_max_predict_ms", (-2, "x", 2 ** 31)), ("t_max_prompt_ms", ({}, 2 ** 40)),
                       ("return_tokens", (1, "x")), ("timings_per_token", (0,)), ("response_fields", ("x", [1], ["a"] * 65, {})),
                       ("prompt", (None, 3, {}, [[]], [1, "a"], [-1], [288], [""] * 65)), ("stop", (3, [""])), ("stream", ("x",)),
                       ("cache_prompt", (3,)), ("grammar", ("root", 3)), ("temperature", ("x", -1))):
        for v in bad:
            e = plain.json("/completion", dict(good, **{field: v}), 400)["error"]
            assert (e["param"] or "").startswith(field) or field in e["message"], (field, v, e)
    e = plain.json("/completion", dict(good, n_probs=1, post_sampling_probs=True), 400)["error"]
    assert e["param"] == "post_sampling_probs"
    good = {"input_prefix": "a", "input_suffix": "b", "n_predict": 1}
    for field, bad in (("input_prefix", (None, 3, [])), ("input_suffix", (None, {})), ("prompt", (3, ["a"])),
                       ("input_extra", ("x", [3], [{}], [{"text": 1}], [{"text": "a", "filename": 1}], [{"text": "a"}] * 257))):
        for v in bad:
            e = fim.json("/infill", dict(good, **{field: v}), 400)["error"]
            assert e["param"].startswith(field), (field, v, e)
    e = plain.json("/completion", {"prompt": [97] * 9000}, 400)["error"]
    assert e["type"] == "exceed_context_size_error" or e["code"] == "context_length_exceeded", e


def test_cancel(plain, fim):
    for s, path, body in ((plain, "/completion", {"prompt": "a"}), (fim, "/infill", {"input_prefix": "a", "input_suffix": "b"})):
        sock = s.socket()
        sock.sendall(http_request(path, dict(body, stream=True, ignore_eos=True, n_predict=8000, t_max_prompt_ms=60000)))
        while b"data: " not in sock.recv(65536):
            pass
        sock.close()
        s.wait_metric("steel_requests_running", 0)
    sock = fim.socket()
    sock.sendall(http_request("/infill", {"input_prefix": "a" * 6000, "input_suffix": "b", "ignore_eos": True, "t_max_prompt_ms": 60000}))
    sock.close()
    fim.wait_count("client left", 2)
    fim.wait_metric("steel_requests_running", 0)


def test_gateway(plain, fim):
    g = Gateway(BUILD, [fim])
    g.wait_count("replica is in", 1)
    body = dict(SMALL, input_prefix="a", input_suffix="b")
    assert g.json("/infill", body)["content"] == fim.json("/infill", body)["content"]
    assert g.json("/completion", dict(SMALL, prompt="a"))["stop_type"] == "limit"
    g.stop()


plain = Server(BUILD)
fim = Server(BUILD, model=fim_model(plain, os.path.join(plain.dir.name, "fim.gguf"), QWEN))
run_tests([test_completion, test_stream, test_response_fields, test_limits, test_infill, test_suffix, test_names, test_lookups, test_counts,
           test_openapi, test_embedding, test_hostile,
           test_cancel, test_gateway], plain, fim)

"""Embeddings and reranking: the commands, /v1/embeddings, /v1/rerank and Ollama's /api/embed, over a small BERT whose words are letters."""
import base64
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading

sys.path.insert(0, os.path.dirname(__file__))
from letters_model import letters_model
from serverlib import HANG, Server, run_tests

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
STEEL = os.path.join(BUILD, "steel")
WORK = tempfile.mkdtemp(prefix="steel-embeddings-")
BERT, RANK = letters_model(WORK, "tiny-bert", "bert"), letters_model(WORK, "tiny-rank", "bert_rerank")
TEXTS = ["what is a panda?", "a", "the panda is a bear", "x" * 20 + " y"]


def steel(*args, text="", code=0):
    r = subprocess.run([STEEL, *args], input=text, capture_output=True, text=True, timeout=HANG)
    assert r.returncode == code, (args, r.stdout[-300:], r.stderr[-500:])
    return r.stdout if code == 0 else r.stderr


def close(a, b, eps=2e-3):
    return len(a) == len(b) and max(abs(x - y) for x, y in zip(a, b)) <= eps


def length(v):
    return math.sqrt(sum(x * x for x in v))


def test_commands(_):
    """Texts as arguments, lines, JSON lines: the same vectors; .npy holds them; wrong use is said."""
    lines = [json.loads(l) for l in steel("embed", BERT, *TEXTS).splitlines()]
    assert [l["index"] for l in lines] == [0, 1, 2, 3] and lines[1]["tokens"] == 3
    assert all(abs(length(l["embedding"]) - 1) < 1e-5 for l in lines)
    assert not close(lines[0]["embedding"], lines[2]["embedding"])
    vectors = [l["embedding"] for l in lines]
    again = [json.loads(l)["embedding"] for l in steel("embed", BERT, text="\n".join(TEXTS) + "\n").splitlines()]
    assert all(close(a, b) for a, b in zip(vectors, again))
    jsonl = "\n".join([json.dumps(TEXTS[0]), json.dumps({"text": TEXTS[1]}), json.dumps({"input": TEXTS[2]}), json.dumps({"content": TEXTS[3]})])
    again = [json.loads(l)["embedding"] for l in steel("embed", BERT, "--jsonl", text=jsonl).splitlines()]
    assert all(close(a, b) for a, b in zip(vectors, again))
    npy = os.path.join(WORK, "v.npy")
    steel("embed", BERT, "--out", npy, *TEXTS)
    raw = open(npy, "rb").read()
    assert raw[:8] == b"\x93NUMPY\x01\x00" and b"'shape': (4, %d)" % len(vectors[0]) in raw[:128] and (len(raw) - 128) == 16 * len(vectors[0])
    assert close(struct.unpack("<%df" % len(vectors[0]), raw[128:128 + 4 * len(vectors[0])]), vectors[0])
    short = json.loads(steel("embed", BERT, "--dims", "8", TEXTS[0]))["embedding"]
    scale = length(vectors[0][:8])
    assert close(short, [x / scale for x in vectors[0][:8]])
    cls = json.loads(steel("embed", BERT, "--pooling", "cls", "--no-normalize", TEXTS[0]))["embedding"]
    assert length(cls) > 2
    ranked = [l.split("\t") for l in steel("rerank", RANK, "-q", "what is a panda?", text="\n".join(TEXTS)).splitlines()]
    assert sorted(int(r[1]) for r in ranked) == [0, 1, 2, 3] and [float(r[0]) for r in ranked] == sorted((float(r[0]) for r in ranked), reverse=True)
    assert all(0 <= float(r[0]) <= 1 for r in ranked)
    assert len(steel("rerank", RANK, "-q", "x", "--top", "2", text="a\nb\nc\n").splitlines()) == 2
    assert "line 2" in steel("embed", BERT, "--jsonl", text='"a"\n{"b": 1}\n', code=1)
    long = "a " * 300
    assert json.loads(steel("embed", BERT, long))["tokens"] == 128
    err = steel("embed", BERT, "--no-truncate", long, code=1)
    assert "302 tokens" in err and "128" in err
    assert "makes embeddings" in steel("run", BERT, "-p", "hi", code=1)
    assert "--pooling" in steel("embed", BERT, "--pooling", "max", "a", code=2)
    assert "no tokenizer" in steel("embed", "tests/golden/bert", "a", code=1)


def tensors(path):
    """Header (a dict) and data of a safetensors file."""
    raw = open(path, "rb").read()
    n = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8:8 + n]), raw[8 + n:]


def broken(name, change):
    """A copy of the reranker whose tensors were changed."""
    path = os.path.join(WORK, name)
    shutil.copytree(RANK, path)
    head, data = tensors(os.path.join(path, "model.safetensors"))
    data = change(head, bytearray(data))
    text = json.dumps(head).encode()
    open(os.path.join(path, "model.safetensors"), "wb").write(struct.pack("<Q", len(text)) + text + bytes(data))
    return path


def test_broken_heads(_):
    """A classification head of another type or shape is named, none is made up; numbers that are not finite are an error."""
    def integers(head, data):
        head["classifier.weight"].update(dtype="I16")
        return data

    def narrow(head, data):
        head["classifier.weight"]["shape"] = [2, head["classifier.weight"]["shape"][1] // 2]
        return data

    def gone(head, data):
        head["else.weight"] = head.pop("classifier.weight")
        return data

    def nan(head, data):
        a, b = head["classifier.bias"]["data_offsets"]
        data[a:b] = b"\xc0\x7f" * ((b - a) // 2) if head["classifier.bias"]["dtype"] == "BF16" else b"\x00\x00\xc0\x7f" * ((b - a) // 4)
        return data

    for name, change, word in (("r1", integers, "classifier.weight: type I16"), ("r2", narrow, "classifier.weight: shape"), ("r3", gone, "classifier.weight: missing"),
                               ("r4", nan, "not finite")):
        assert word in steel("rerank", broken(name, change), "-q", "a", text="b\n", code=1), name


def test_hostile_pooling(_):
    """Whatever modules.json and 1_Pooling say: vectors, or one line that names the file; nothing outside the folder is read."""
    pooling = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
    dense = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}
    mean = {"pooling_mode_mean_tokens": True}
    cases = [(b"", None, "modules.json"), (b"{}", None, "modules.json"), (b"[1]", None, "modules.json"), (b"[{}]", None, "modules.json"),
             (b"[" * 100000, None, "modules.json"), (b"\xff\xfe", None, "modules.json"), (b" " * (2 << 20), None, "modules.json"),
             ([{"type": "a.Pooling", "path": "../../etc"}], None, "modules.json"), ([{"type": "a.Pooling", "path": "/etc"}], None, "modules.json"),
             ([{"type": "a.WordWeights", "path": "1"}], None, "WordWeights"), ([{"type": 5, "path": "1_Pooling"}], mean, "modules.json"),
             ([pooling], None, "1_Pooling"), ([pooling], b"", "1_Pooling"), ([pooling], b"[]", "1_Pooling"), ([pooling], {}, "no way of pooling"),
             ([pooling], {"pooling_mode": "sum"}, "no way of pooling"), ([pooling], {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
             ([pooling], {**mean, "pooling_mode_cls_token": True}, "several"), ([pooling, dense], mean, "2_Dense"), ([pooling] + [dense] * 1000, mean, "2_Dense")]
    for i, (modules, config, word) in enumerate(cases):
        path = os.path.join(WORK, f"hostile{i}")
        shutil.copytree(BERT, path)
        os.mkdir(path + "/1_Pooling")
        for file, text in (("modules.json", modules), ("1_Pooling/config.json", config)):
            if text is not None:
                open(os.path.join(path, file), "wb").write(text if isinstance(text, bytes) else json.dumps(text).encode())
        err = steel("embed", path, "a", code=1)
        assert len(err.strip().splitlines()) == 1 and word in err, (i, err[-500:])


def test_metrics(s):
    """Texts, tokens and steps of both models, under their names."""
    def figures():
        found = {}
        for line in s.get("/metrics")[2].splitlines():
            if line.startswith("steel_embed_"):
                name, value = line.rsplit(" ", 1)
                found[name] = float(value)
        return found
    key = lambda what, model, task: f'steel_embed_{what}{{model_name="{model}",task="{task}"}}'
    before = figures()
    used = s.json("/v1/embeddings", {"input": TEXTS})["usage"]["total_tokens"]
    ranked = s.json("/v1/rerank", {"query": "a", "documents": TEXTS})["usage"]["total_tokens"]
    after = figures()
    grown = lambda *k: after[key(*k)] - before[key(*k)]
    assert grown("texts_total", "tiny-bert", "embed") == grown("texts_total", "tiny-rank", "rerank") == 4, after
    assert grown("tokens_total", "tiny-bert", "embed") == used and grown("tokens_total", "tiny-rank", "rerank") == ranked
    assert 1 <= grown("steps_total", "tiny-bert", "embed") <= 4 and after[key("texts_waiting", "tiny-bert", "embed")] == 0
    assert after[key("rejections_total", "tiny-rank", "rerank")] == 0
    plain = Server(BUILD)
    assert "steel_embed_" not in plain.get("/metrics")[2]
    plain.stop()


def test_openai(s):
    """Texts, one text, token ids; floats and base64; dimensions; usage; the same as the command's."""
    r = s.json("/v1/embeddings", {"model": "tiny-bert", "input": TEXTS})
    assert r["object"] == "list" and r["model"] == "tiny-bert" and [d["index"] for d in r["data"]] == [0, 1, 2, 3]
    assert r["usage"]["prompt_tokens"] == r["usage"]["total_tokens"] > 20
    want = [json.loads(l) for l in steel("embed", BERT, *TEXTS).splitlines()]
    assert r["usage"]["total_tokens"] == sum(w["tokens"] for w in want)
    assert all(close(d["embedding"], w["embedding"]) for d, w in zip(r["data"], want))
    coded = s.json("/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"})["data"]
    for d, c in zip(r["data"], coded):
        raw = base64.b64decode(c["embedding"], validate=True)
        assert close(struct.unpack("<%df" % len(d["embedding"]), raw), d["embedding"])
    one = s.json("/v1/embeddings", {"input": TEXTS[1]})["data"]
    assert len(one) == 1 and close(one[0]["embedding"], want[1]["embedding"])
    ids = [2, 5 + "abc".index("a"), 3]
    for form in (ids, [ids]):
        assert close(s.json("/v1/embeddings", {"input": form})["data"][0]["embedding"], want[1]["embedding"])
    short = s.json("/v1/embeddings", {"input": TEXTS[0], "dimensions": 8})["data"][0]["embedding"]
    assert len(short) == 8 and abs(length(short) - 1) < 1e-5
    models = {m["id"]: m for m in json.loads(s.get("/v1/models")[2])["data"]}
    assert models["tiny-bert"]["capabilities"] == ["embedding"] and models["tiny-rank"]["capabilities"] == ["rerank"]


def test_refusals(s):
    """What cannot be is a 400 that names the field."""
    for body, param, word in [({}, "input", "missing"), ({"input": []}, "input", "empty"), ({"input": 5}, "input", "must be"), ({"input": ["a", 5]}, "input[1]", "neither"),
                              ({"input": [["x"]]}, "input[0]", ""), ({"input": [[99999]]}, "input[0]", ""), ({"input": "a", "dimensions": 0}, "dimensions", "from 1"),
                              ({"input": "a", "dimensions": 9999}, "dimensions", "from 1"), ({"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
                              ({"input": "a " * 300}, "input[0]", "302 tokens"), ({"input": ["a"] * 5000}, "input", "4096"), ({"input": "a", "truncate": 1}, "truncate", "true or false"),
                              ({"input": [[1] * 300]}, "input[0]", "300 tokens"), ({"input": [[]]}, "input[0]", "no tokens")]:
        e = s.json("/v1/embeddings", body, 400)["error"]
        assert e["param"] == param and word in e["message"], (body, e)
    cut = s.json("/v1/embeddings", {"input": "a " * 300, "truncate": True})
    assert cut["usage"]["total_tokens"] == 128
    for body, param in [({"documents": ["a"]}, "query"), ({"query": "a"}, "documents"), ({"query": "a", "documents": []}, "documents"), ({"query": "a", "documents": [1]}, "documents[0]"),
                        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n"), ({"query": "a", "documents": ["b"], "instruction": 5}, "instruction"), ({"query": "a", "documents": ["b"], "return_documents": "yes"}, "return_documents"),
                        ({"query": "a " * 300, "documents": ["b"]}, "documents[0]")]:
        assert s.json("/v1/rerank", body, 400)["error"]["param"] == param, body
    plain = Server(BUILD)
    for path in ("/v1/embeddings", "/v1/rerank"):
        got, _, text = plain.post(path, {"input": "a", "query": "a", "documents": ["b"]})
        assert got == 501 and ("--embedding" if path == "/v1/embeddings" else "--rerank") in text
    plain.stop()


def test_model_names(s):
    """The name and the endpoint must agree: another model's is a 400 that says where it belongs, an unknown one a 404."""
    chat = json.loads(s.get("/v1/models")[2])["data"][0]["id"]
    texts, docs = {"input": "a"}, {"query": "a", "documents": ["b"]}
    for path, body, mine, other in (("/v1/embeddings", texts, "tiny-bert", "tiny-rank"), ("/v1/rerank", docs, "tiny-rank", "tiny-bert")):
        assert s.json(path, {**body, "model": mine})["model"] == mine
        e = s.json(path, {**body, "model": other}, 400)["error"]
        assert e["param"] == "model" and ("/v1/rerank" if other == "tiny-rank" else "/v1/embeddings") in e["message"], e
        e = s.json(path, {**body, "model": chat}, 400)["error"]
        assert e["param"] == "model" and mine in e["message"], e
        e = s.json(path, {**body, "model": "gone"}, 404)["error"]
        assert e["code"] == "model_not_found" and e["param"] == "model" and "'gone' does not exist" in e["message"], e
        assert s.json(path, {**body, "model": 5}, 400)["error"]["param"] == "model"
        e = s.json("/v1/chat/completions", {"model": mine, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}, 400)["error"]
        assert e["param"] == "model" and path in e["message"], e
        got = json.loads(s.get("/v1/models/" + mine)[2])
        assert got["id"] == mine and got["object"] == "model", got
    assert s.get("/v1/models/gone")[0] == 404
    named = Server(BUILD, "--embedding", "text-embedding-3-small=" + BERT)
    assert named.json("/v1/embeddings", {**texts, "model": "text-embedding-3-small"})["model"] == "text-embedding-3-small"
    named.json("/v1/embeddings", {**texts, "model": "tiny-bert"}, 404)
    named.stop()


def test_rerank(s):
    """Jina's and Cohere's shape: sorted, cut, with documents; the command gives the same scores."""
    docs = TEXTS + [{"text": "pandas eat bamboo"}]
    r = s.json("/v1/rerank", {"model": "tiny-rank", "query": "what is a panda?", "documents": docs, "return_documents": True})
    scores = [x["relevance_score"] for x in r["results"]]
    assert sorted(x["index"] for x in r["results"]) == list(range(5)) and scores == sorted(scores, reverse=True) and all(0 <= x <= 1 for x in scores)
    assert all(x["document"]["text"] == (docs[x["index"]] if x["index"] < 4 else "pandas eat bamboo") for x in r["results"])
    assert r["usage"]["total_tokens"] > 50
    top = s.json("/rerank", {"query": "what is a panda?", "documents": docs, "top_n": 2})
    assert [x["index"] for x in top["results"]] == [x["index"] for x in r["results"]][:2] and "document" not in top["results"][0]
    raw = s.json("/v2/rerank", {"query": "what is a panda?", "documents": docs, "raw_scores": True})["results"]
    assert all(abs(1 / (1 + math.exp(-x["relevance_score"])) - scores[i]) < 1e-5 for i, x in enumerate(raw))
    cli = {int(l.split("\t")[1]): float(l.split("\t")[0]) for l in steel("rerank", RANK, "-q", "what is a panda?", text="\n".join(TEXTS)).splitlines()}
    assert all(abs(cli[x["index"]] - x["relevance_score"]) < 1e-3 for x in r["results"] if x["index"] < 4)


def test_ollama(s):
    """Both forms; long texts are cut unless that is forbidden."""
    want = s.json("/v1/embeddings", {"input": TEXTS})["data"]
    r = s.json("/api/embed", {"model": "tiny-bert", "input": TEXTS})
    assert all(close(a, b["embedding"]) for a, b in zip(r["embeddings"], want)) and r["prompt_eval_count"] > 20 and r["total_duration"] > 0
    assert close(s.json("/api/embed", {"model": "tiny-bert:latest", "input": TEXTS[0]})["embeddings"][0], want[0]["embedding"])
    assert close(s.json("/api/embeddings", {"prompt": TEXTS[0]})["embedding"], want[0]["embedding"])
    assert "does not exist" in s.json("/api/embed", {"model": "x", "input": TEXTS[0]}, 404)["error"]
    assert s.json("/api/embed", {"input": "a " * 300})["prompt_eval_count"] == 128
    assert "302 tokens" in s.json("/api/embed", {"input": "a " * 300, "truncate": False}, 400)["error"]


def test_company(s):
    """Many clients at once beside one that leaves early; every answer is its own; texts share steps."""
    alone = [d["embedding"] for d in s.json("/v1/embeddings", {"input": TEXTS})["data"]]
    wrong = []

    def client(k):
        for i in range(6):
            pick = [TEXTS[(k + i + j) % 4] for j in range(1 + (k + i) % 5)]
            got = [d["embedding"] for d in s.json("/v1/embeddings", {"input": pick})["data"]]
            if not all(close(g, alone[TEXTS.index(t)]) for g, t in zip(got, pick)) or len(got) != len(pick):
                wrong.append((k, i))

    threads = [threading.Thread(target=client, args=(k,)) for k in range(12)]
    for t in threads:
        t.start()
    for _ in range(5):
        leave(s, "/v1/embeddings", {"input": [x * 3 for x in TEXTS] * 500})
    for t in threads:
        t.join()
    assert not wrong, wrong
    assert s.json("/v1/embeddings", {"input": "a"})["data"]


def leave(s, path, body):
    """Sends a request and is gone."""
    text = json.dumps(body)
    c = s.socket()
    c.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
    c.close()


tests = [test_commands, test_broken_heads, test_hostile_pooling, test_metrics, test_openai, test_refusals, test_model_names, test_rerank, test_ollama, test_company]
server = Server(BUILD, "--embedding", BERT, "--rerank", RANK)
try:
    run_tests(tests, server)
finally:
    shutil.rmtree(WORK, ignore_errors=True)
    rc = server.stop()
    if rc != 0:
        print(server.log()[-4000:])
        print("the server exited with", rc)
        os._exit(1)

#!/usr/bin/env python3
"""Drafting tokens ahead through the binary: the server's answers with --draft are those without, alone and many at once,
streamed and not, also in a conversation's second turn; drafts from text for a model without a block; a draft model whose ids are
others; usage, /metrics and `steel run` count drafts by source; `steel bench --draft` measures them; what cannot be is said in one line."""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import mtp_toy  # noqa: E402
from gguf_tools import read_safetensors, write_safetensors  # noqa: E402
from serverlib import Server, bodies, run_tests  # noqa: E402

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
STEEL = os.path.join(BUILD, "steel")
WORK = tempfile.TemporaryDirectory(prefix="steel-draft-")
MODELS = ("qwen3_5_moe", "glm4_moe")
OTHERS = [chr(0x400 + i) for i in range(256)]
DRAFTED, ACCEPTED = "steel_draft_tokens_total", "steel_draft_tokens_accepted_total"


def toy(name):
    path = os.path.join(WORK.name, name)
    if not os.path.exists(path):
        mtp_toy.main("tests/golden/" + name, path, 1)
    return path


def reordered(name, letters=None):
    """The same model with its tokens in another order; or with other letters for tokens."""
    src, path = toy(name), os.path.join(WORK.name, name + ("-other" if letters else "-reordered"))
    if os.path.exists(path):
        return path
    shutil.copytree(src, path)
    tensors = read_safetensors(f"{path}/model.safetensors")
    tokenizer = json.load(open(f"{path}/tokenizer.json"))
    vocab = tokenizer["model"]["vocab"]
    new = [(7 * i + 3) % len(vocab) for i in range(len(vocab))]
    assert sorted(new) == list(range(len(vocab)))
    for tensor in [t for t in tensors if "embed_tokens" in t or "lm_head" in t or "shared_head.head" in t]:
        dtype, shape, data = tensors[tensor]
        row = len(data) // shape[0]
        moved = bytearray(data)
        for i, to in enumerate(new):
            moved[to * row : (to + 1) * row] = data[i * row : (i + 1) * row]
        tensors[tensor] = dtype, shape, bytes(moved)
    write_safetensors(f"{path}/model.safetensors", tensors)
    tokenizer["model"]["vocab"] = {letters[i] if letters else c: new[i] for c, i in vocab.items()}
    json.dump(tokenizer, open(f"{path}/tokenizer.json", "w"))
    return path


def steel(*args):
    return subprocess.run([STEEL, *map(str, args)], capture_output=True, text=True, errors="replace")


def answer(s, body):
    if body["seed"] % 2 and "n" not in body:
        return "".join(json.loads(e)["choices"][0]["text"] for e in s.stream("/v1/completions", body)
                       if e != "[DONE]" and json.loads(e)["choices"])
    return [(c["text"], c["finish_reason"], c.get("logprobs")) for c in s.json("/v1/completions", body)["choices"]]


def crowd(s):
    out = {}
    threads = [threading.Thread(target=lambda b=b: out.update({b["seed"]: answer(s, b)})) for b in bodies(12, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return out


def same_answers():
    for name in MODELS:
        plain = Server(BUILD, "--draft", "0", model=toy(name))
        want = {b["seed"]: answer(plain, b) for b in bodies(12, 1)}
        assert plain.metrics()[DRAFTED] == 0
        turn = {"prompt": "one two three" * 5, "max_tokens": 40, "seed": 1, "temperature": 1, "ignore_eos": True}
        first = answer(plain, dict(turn, seed=2))[0][0]
        turn["prompt"] += first + " and some more"
        second = answer(plain, dict(turn, seed=4, cache_prompt=False))
        assert plain.stop() == 0
        for flags in (["--draft", "1"], ["--draft", "3"], []):
            s = Server(BUILD, *flags, model=toy(name))
            assert {b["seed"]: answer(s, b) for b in bodies(12, 1)} == want, (name, flags)
            assert crowd(s) == want, (name, flags)
            assert answer(s, dict(turn, prompt="one two three" * 5, seed=2))[0][0] == first
            assert answer(s, dict(turn, seed=4)) == second, (name, flags)
            m = s.metrics()
            assert m[DRAFTED] > 0 and m[ACCEPTED] <= m[DRAFTED], m
            s.wait_metric('steel_kv_pages{state="held"}', 0)
            assert s.stop() == 0
        s = Server(BUILD, "--draft", "1", "--metrics-compat", "vllm", model=toy(name))
        answer(s, next(bodies(12, 1)))
        assert s.metrics()["vllm:spec_decode_num_draft_tokens_total"] > 0
        s.stop()


def constrained():
    """Answers that must fit a schema fit it, and are the same."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["xy", "zw"]}},
              "required": ["a", "b"], "additionalProperties": False}
    body = {"prompt": "go", "max_tokens": 60, "temperature": 1, "json_schema": schema}
    for name in MODELS:
        texts = []
        for draft in (0, 3):
            s = Server(BUILD, "--draft", draft and "3" or "0", model=toy(name))
            texts.append([s.json("/v1/completions", dict(body, seed=i))["choices"][0]["text"] for i in range(6)])
            s.stop()
        assert texts[0] == texts[1], (name, texts)
        for t in texts[0]:
            assert set(json.loads(t)) == {"a", "b"}, t


def from_text():
    """A model without a block repeats an answer that it gave the same client: usage says where the drafts came from."""
    body = {"prompt": "abcd efgh abcd efgh", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "seed": 1}
    plain, s = Server(BUILD, "--draft", "off", "--deterministic"), Server(BUILD, "--draft", "text", "--deterministic")
    want = plain.json("/v1/completions", body)
    assert "draft_tokens" not in str(want["usage"]), want
    for _ in range(4):
        got = s.json("/v1/completions", body)
        assert got["choices"] == want["choices"], got
    d = got["usage"]["completion_tokens_details"]
    assert 0 <= d["text_draft_tokens_accepted"] <= d["text_draft_tokens"] > 0 and "head_draft_tokens" not in d, d
    assert all(isinstance(n, int) for n in d.values()), d  # clients refuse others
    native = s.json("/completion", {"prompt": body["prompt"], "n_predict": 200, "temperature": 0, "ignore_eos": True})["timings"]
    assert native["draft_n_accepted"] <= native["draft_n"], native
    m = s.metrics()
    assert m[DRAFTED] == m['steel_draft_tokens_by_source_total{source="text"}'] > 0, m
    assert m[ACCEPTED] == m['steel_draft_tokens_accepted_by_source_total{source="text"}'] > 0, m
    assert m['steel_draft_tokens_by_source_total{source="head"}'] == 0, m
    assert s.stop() == 0 and plain.stop() == 0


def from_a_draft_model():
    """The model itself with its tokens in another order is right with every greedy token, and the answers are the same."""
    name = "glm4_moe"
    model, small = toy(name), reordered(name)
    run = ("run", model, "-p", "hello there", "--raw", "-n", 40, "--temp", 0, "--repeat-penalty", 1, "--ignore-eos", "--deterministic")
    want = steel(*run, "--draft", 0)
    for flags in (("--draft", 4), ("--draft", "model"), ()):
        got = steel(*run, *flags, "--draft-model", small)
        assert got.returncode == 0 and got.stdout == want.stdout, (flags, got.stderr)
        if flags == ("--draft", 4):
            drafted, right = map(int, re.search(r"drafted (\d+), accepted (\d+)", got.stderr).groups())
            assert right >= 0.9 * drafted > 20, got.stderr  # it may round otherwise
    plain = Server(BUILD, "--draft", "off", model=model)
    expected = {b["seed"]: answer(plain, b) for b in bodies(12, 1)}
    plain.stop()
    for flags in (("--draft", "3"), ("--draft", "model", "--draft-device", "cpu"), ()):
        s = Server(BUILD, "--draft-model", small, *flags, model=model)
        assert {b["seed"]: answer(s, b) for b in bodies(12, 1)} == expected, flags
        assert crowd(s) == expected, flags
        if flags[:2] == ("--draft", "3"):
            body = {"prompt": "abcdefgh", "max_tokens": 40, "temperature": 0, "repeat_penalty": 1, "ignore_eos": True}
            d = s.json("/v1/completions", body)["usage"]["completion_tokens_details"]
            assert d["model_draft_tokens"] >= d["model_draft_tokens_accepted"] > 20, d
            m = s.metrics()
            assert m[DRAFTED] == m['steel_draft_tokens_by_source_total{source="model"}'] > 0, m
            assert m[ACCEPTED] == m['steel_draft_tokens_accepted_by_source_total{source="model"}'] > 20, m
        assert s.stop() == 0
    got = steel("plan", model, "--no-probe", "--draft-model", small)
    assert got.returncode == 0 and "draft model " in got.stdout, got


def experts_from_the_file():
    """--expert-memory: experts that are read when drafts want them. The answers are those with all in memory, without drafts."""
    model, small = toy("glm4_moe"), reordered("glm4_moe")
    parts = json.loads(steel("plan", model, "--json", "--no-probe", "--device", "cpu").stdout)["here"]["parts"]
    some = next(p for p in parts if p["part"] == "experts")["memory"] * 2 // 3 // 1024 + 1
    run = ("run", model, "-p", "ab ab ab ab", "--raw", "-n", 60, "--ignore-eos", "--deterministic", "--device", "cpu")
    for seed, more in ((0, ("--temp", 0)), (3, ("--temp", 0.7))):
        want = steel(*run, "-s", seed, *more, "--draft", "off")
        assert want.returncode == 0, want
        for flags in (("--draft", "text"), ("--draft", 2), ("--draft", 5, "--draft-model", small), ("--draft-model", small)):
            got = steel(*run, "-s", seed, *more, "--expert-memory", f"{some}K", *flags)
            assert got.returncode == 0 and got.stdout == want.stdout, (flags, got, want)
            assert flags[1] not in (2, 5) or "drafted" in got.stderr, got


def from_the_command_line():
    model = toy("qwen3_5_moe")
    run = ("run", model, "-p", "hello there", "--raw", "-n", 40, "-s", 3, "--temp", 1, "--ignore-eos", "--deterministic")
    want = steel(*run, "--draft", 0)
    assert want.returncode == 0 and "drafted" not in want.stderr, want.stderr
    for draft in (1, 2, 8):
        got = steel(*run, "--draft", draft)
        assert got.returncode == 0 and got.stdout == want.stdout, (draft, got.stderr)
        assert int(re.search(r"drafted (\d+), accepted \d+", got.stderr).group(1)) > 0, got.stderr
    got = steel("bench", model, "-p", 0, "-n", 4, "-b", "1,3", "--draft", 2, "--skip-cost", "-r", 1)
    assert got.returncode == 0 and len(re.findall(r"drafting [12], \d sequences?: a step takes", got.stdout)) == 4, got
    got = steel("bench", model, "-p", 0, "-n", 4, "--draft", 1, "--skip-cost", "-r", 1, "--json")
    assert "pays_above" in json.loads(got.stdout.splitlines()[-1]), got


def replays():
    """bench/draft.py's texts through `steel bench --replay`: random tokens are never drafted, and broken files are refused."""
    texts = os.path.join(WORK.name, "texts.jsonl")
    subprocess.run([sys.executable, "bench/draft.py", "--write", texts, "--vocab", "140", "--answer", "40"], check=True)
    lines = [t for t in open(texts) if json.loads(t)["name"] in ("edit", "random")]
    short = [dict(json.loads(t), prompt=json.loads(t)["prompt"][:300]) for t in lines]
    open(texts, "w").write("".join(json.dumps(t) + "\n" for t in short))
    got = steel("bench", "tests/golden/qwen3", "--replay", texts, "-b", "1,2", "-r", 1, "--json")
    rows = [json.loads(line) for line in got.stdout.splitlines()]
    rows, learned = rows[:4], rows[4:]
    assert learned and all(r["step_ms"] > 0 and r["by_draft_rows"] for r in learned), got
    assert [(r["text"], r["sequences"]) for r in rows] == [(t, n) for n in (1, 2) for t in ("edit", "random")], got
    assert all(r["generated"] == 40 * r["sequences"] and r["accepted"] <= r["drafted"] for r in rows), rows
    for bad in ("", "{}", '{"name": "a", "prompt": [1], "answer": [-1]}', '{"name": "a", "prompt": [1], "answer": [1, 2]}', "[",
                '{"name": "a", "prompt": [1.5], "answer": ' + str([1] * 20) + "}",
                '{"name": "a", "prompt": [1], "answer": ' + str([999] * 20) + "}"):
        open(texts, "w").write(bad)
        r = steel("bench", "tests/golden/qwen3", "--replay", texts)
        assert r.returncode == 1 and len(r.stderr.splitlines()) == 1 and "texts.jsonl" in r.stderr, r


def refusals():
    for args, what in ((("run", "tests/golden/qwen3", "-p", "a", "--raw", "--draft", 1), "has no block that drafts"),
                       (("run", "tests/golden/qwen3", "-p", "a", "--raw", "--draft", "head"), "has no block that drafts"),
                       (("run", "tests/golden/qwen3", "-p", "a", "--raw", "--draft", "txt"), "auto, text, head, model, off"),
                       (("run", "tests/golden/qwen3", "-p", "a", "--raw", "--draft", "model"), "no draft model is given"),
                       (("run", toy("glm4_moe"), "-p", "a", "--draft-model", "/none.gguf"), "--draft-model: /none.gguf"),
                       (("run", toy("glm4_moe"), "-p", "a", "--draft-model", "tests/golden/bert"), "makes embeddings"),
                       (("run", toy("glm4_moe"), "-p", "a", "--draft-model", "tests/golden/qwen3"), "cannot be compared"),
                       (("run", toy("glm4_moe"), "-p", "a", "--draft-model", reordered("glm4_moe", OTHERS)), "of the model's 144 tokens"),
                       (("run", toy("glm4_moe"), "-p", "a", "--draft", "text", "--draft-model", toy("glm4_moe")), "excludes it"),
                       (("run", toy("glm4_moe"), "-p", "a", "--draft", "off", "--draft-model", toy("glm4_moe")), "excludes it"),
                       (("run", toy("glm4_moe"), "-p", "a", "--draft-device", "cpu"), "there is no --draft-model"),
                       (("serve", toy("glm4_moe"), toy("qwen3_5_moe"), "--port", 1, "--draft-model", toy("glm4_moe")), "with several models"),
                       (("plan", toy("glm4_moe"), "--tp", "2", "--draft-model", toy("glm4_moe")), "one process"),
                       (("run", toy("glm4_moe"), "-p", "a", "--raw", "--draft", 9), "--draft")):
        r = steel(*args)
        assert r.returncode != 0 and what in r.stderr and len(r.stderr.splitlines()) <= 3, r
    assert "multi-token prediction" not in steel("show", "--brief", "tests/golden/qwen3_5").stdout


run_tests([same_answers, constrained, from_text, from_a_draft_model, experts_from_the_file, from_the_command_line, replays, refusals])

#!/usr/bin/env python3
"""Drafting tokens ahead through the binary: the server's answers with --draft are those without, alone and many at once,
streamed and not, also in a conversation's second turn; drafts from text for a model without a block; usage, /metrics and `steel
run` count drafts by source; `steel bench --draft` measures them; what cannot be is said in one line."""
import json
import os
import re
import subprocess
import sys
import tempfile
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import mtp_toy  # noqa: E402
from serverlib import Server, bodies, run_tests  # noqa: E402

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
STEEL = os.path.join(BUILD, "steel")
WORK = tempfile.TemporaryDirectory(prefix="steel-draft-")
MODELS = ("qwen3_5_moe", "glm4_moe")
DRAFTED, ACCEPTED = "steel_draft_tokens_total", "steel_draft_tokens_accepted_total"


def toy(name):
    path = os.path.join(WORK.name, name)
    if not os.path.exists(path):
        mtp_toy.main("tests/golden/" + name, path, 1)
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
    assert got.returncode == 0 and len(re.findall(r"drafting 2, \d sequences?: a step takes", got.stdout)) == 2, got
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
                       (("run", "tests/golden/qwen3", "-p", "a", "--raw", "--draft", "txt"), "auto, text, head, off"),
                       (("run", toy("glm4_moe"), "-p", "a", "--raw", "--draft", 9), "--draft")):
        r = steel(*args)
        assert r.returncode != 0 and what in r.stderr and len(r.stderr.splitlines()) <= 3, r
    assert "multi-token prediction" not in steel("show", "--brief", "tests/golden/qwen3_5").stdout


run_tests([same_answers, constrained, from_text, from_the_command_line, replays, refusals])

"""Fields of requests: what each does to an answer, in every API, and that none is ignored in silence."""
import json
import os
import re
import subprocess
import sys

sys.path.insert(0, os.path.dirname(__file__))
from gguf_tools import Gguf, write_gguf
from serverlib import Server, fim_model, run_tests

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
DEMO = os.path.join(os.path.dirname(__file__), "..", "demo", "steel-demo.gguf")
CHAT, COMP, RESP, MSG = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ASK = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0, "max_tokens": 120}
WHY = "budget for thinking is used up"


def thought_of(s, body, path=CHAT):
    """(thinking, text) of an answer."""
    r = s.json(path, body)
    if path == CHAT:
        m = r["choices"][0]["message"]
        return m.get("reasoning_content") or "", m["content"] or ""
    if path == MSG:
        return tuple("".join(b.get(k, "") for b in r["content"]) for k in ("thinking", "text"))
    if path == RESP:
        parts = {"reasoning": "", "message": ""}
        for item in r["output"]:
            parts[item["type"]] += "".join(p["text"] for p in item.get("content") or item.get("summary") or [])
        return parts["reasoning"], parts["message"]
    return r["message"].get("thinking", ""), r["message"]["content"]


def responses(**more):
    return {"input": ASK["messages"][0]["content"], "temperature": 0, "max_output_tokens": 120, **more}


def ollama(**more):
    return {"messages": ASK["messages"], "stream": False, "options": {"temperature": 0, "num_predict": 120}, **more}


def test_thinking_budget(s, _):
    whole, answer = thought_of(s, ASK)
    assert len(whole) > 40 and answer and WHY not in whole, (whole, answer)
    for body, path in [
            (dict(ASK, reasoning_budget=4), CHAT), (dict(ASK, thinking_token_budget=4), CHAT),
            (dict(ASK, thinking_budget_tokens=4), CHAT), (dict(ASK, thinking_budget=4), CHAT),
            (dict(ASK, thinking={"type": "enabled", "budget_tokens": 4}), CHAT),
            (dict(ASK, reasoning={"max_tokens": 4}), CHAT), (dict(ASK, reasoning_budget=4, logprobs=True), CHAT),
            (dict(ASK, thinking={"type": "enabled", "budget_tokens": 4}), MSG),
            (responses(reasoning={"max_tokens": 4}), RESP), (ollama(reasoning_budget=4), "/api/chat")]:
        thought, text = thought_of(s, body, path)
        head = thought.split(WHY)[0].rstrip()
        assert WHY in thought and text and len(head) < len(whole), (path, thought, text)
        start = head.rsplit("\n\n", 1)[0].strip()
        assert start and whole.strip().startswith(start[:8]), (start, whole)
    # a budget that is not reached changes nothing; a constraint on the text still holds behind a forced end
    assert thought_of(s, dict(ASK, reasoning_budget=100)) == (whole, answer)
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"], "additionalProperties": False}
    thought, text = thought_of(s, dict(ASK, reasoning_budget=4, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}))
    assert WHY in thought and list(json.loads(text)) == ["sum"], (thought, text)


def test_run_flags(_, __):
    """The flags of steel run, by the names of llama.cpp."""
    steel = os.path.join(BUILD, "steel")

    def run(*flags):
        r = subprocess.run([steel, "run", DEMO, "-q", "-s", "1", "-p", "What is 17 + 25?", *flags], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        return r.returncode, r.stdout, r.stderr
    code, out, err = run("--temp", "0")
    assert code == 0 and "42" in out and WHY not in err, (out, err)
    code, out, err = run("--temp", "0", "--reasoning-budget", "4")
    assert code == 0 and WHY in err and out.strip(), (out, err)
    code, out, err = run("--temp", "0", "--reasoning-budget", "0")
    assert code == 0 and WHY not in err and "ones 7" not in err and out.strip(), (out, err)
    hot = ("--temp", "3", "--top-k", "0", "--top-p", "1", "--min-p", "0", "-n", "30", "--raw")
    plain = run(*hot)[1]
    for flags in (("--typical", "0.2"), ("--top-nsigma", "0.5"), ("--xtc-probability", "1", "--xtc-threshold", "0.001"), ("--dynatemp-range", "2.9"),
                  ("--mirostat", "2", "--mirostat-ent", "1"), ("--samplers", "top_k"), ("--dry-multiplier", "50", "--dry-allowed-length", "1", "--temp", "0.1")):
        code, out, err = run(*hot, *flags)
        assert code == 0 and out != plain, (flags, err)
    code, _, err = run("--samplers", "top_k;nothing")
    assert code == 2 and "'nothing' is unknown" in err, err


def test_thinking_families(s, _):
    """The built-in model, whose tokens of thinking have other families' names; with their switches, and without any."""
    demo = Gguf(DEMO)
    whole, answer = thought_of(s, ASK)
    plain = demo.meta["tokenizer.chat_template"]
    switch = "enable_thinking is defined and enable_thinking is false"
    assert switch in plain
    budget = plain.replace(switch, "thinking_budget is defined and thinking_budget == 0")
    never = plain.replace(switch, "false")
    for opens, closes, template in [("<seed:think>", "</seed:think>", budget), ("<|START_THINKING|>", "<|END_THINKING|>", plain),
                                    ("<|inner_prefix|>", "<|inner_suffix|>", never)]:
        meta = json.loads(json.dumps(demo.meta))
        tokens = meta["tokenizer.ggml.tokens"]
        tokens[tokens.index("<think>")], tokens[tokens.index("</think>")] = opens, closes
        meta["tokenizer.chat_template"] = template.replace("</think>", closes).replace("<think>", opens)
        file = os.path.join(s.dir.name, "family.gguf")
        write_gguf(file, meta, [(name, *t) for name, t in demo.tensors.items()])
        other = Server(BUILD, model=file)
        assert thought_of(other, ASK) == (whole, answer), opens
        streamed = other.post(CHAT, dict(ASK, stream=True))[2]
        deltas = [json.loads(line[6:])["choices"] for line in streamed.splitlines() if line.startswith("data: {")]
        said = ["".join(c[0]["delta"].get(kind) or "" for c in deltas if c) for kind in ("reasoning_content", "content")]
        assert said == [whole, answer], (opens, said)
        for body, path in [(dict(ASK, reasoning_budget=4), CHAT), (dict(ASK, thinking={"type": "enabled", "budget_tokens": 4}), MSG),
                           (responses(reasoning={"max_tokens": 4}), RESP), (ollama(reasoning_budget=4), "/api/chat")]:
            thought, text = thought_of(other, body, path)
            assert WHY in thought and text and opens not in thought + text and closes not in thought + text, (path, thought, text)
        for body, path in [(dict(ASK, reasoning={"effort": "none"}), CHAT), (dict(ASK, enable_thinking=False), CHAT),
                           (dict(ASK, thinking={"type": "disabled"}), MSG), (responses(reasoning={"effort": "none"}), RESP),
                           (ollama(think=False), "/api/chat")]:
            thought, text = thought_of(other, body, path)
            assert not thought.strip() and text and opens not in text and closes not in text, (path, body, thought, text)
        schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"], "additionalProperties": False}
        thought, text = thought_of(other, dict(ASK, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}))
        assert list(json.loads(text)) == ["sum"], (thought, text)
        assert "thinking" in other.json("/api/show", {"model": "x"})["capabilities"]
        assert other.stop() == 0
        for flag, thinks in (("on", True), ("off", False)):
            r = subprocess.run([os.path.join(BUILD, "steel"), "run", file, "-q", "-s", "1", "-p", "What is 17 + 25?", "--temp", "0", "--think", flag],
                               capture_output=True, text=True, stdin=subprocess.DEVNULL)
            assert r.returncode == 0 and r.stdout.strip() and (whole[:12] in r.stderr) == thinks and closes not in r.stdout, (opens, flag, r)


def test_search(_, s):
    """xAI's search_parameters: a search that must be made is refused, one that may be made is left out, and the log says so."""
    for value in ({"mode": "off"}, None, {}):
        s.json(CHAT, dict(ASK, max_tokens=1, search_parameters=value))
    assert "search_parameters" not in s.log()
    for value in ({"mode": "auto"}, {"sources": [{"type": "web"}]}):
        s.json(CHAT, dict(ASK, max_tokens=1, search_parameters=value))
    assert "left out" in s.wait_line("search_parameters") and s.log().count("search_parameters") == 1
    for value in ({"mode": "on"}, {"mode": 1}, {"mode": ""}, ["x"], "auto"):
        r = s.json(CHAT, dict(ASK, search_parameters=value), status=400)
        assert r["error"]["param"] == "search_parameters", r


def test_thinking_off(s, _):
    for body, path in [
            (dict(ASK, enable_thinking=False), CHAT), (dict(ASK, reasoning={"effort": "none"}), CHAT),
            (dict(ASK, reasoning={"enabled": False}), CHAT), (dict(ASK, thinking={"type": "disabled"}), CHAT),
            (dict(ASK, reasoning_budget=0), CHAT), (dict(ASK, reasoning_effort="none"), CHAT),
            (dict(ASK, thinking={"type": "disabled"}), MSG), (dict(ASK, enable_thinking=False), MSG),
            (responses(reasoning={"effort": "none"}), RESP), (responses(enable_thinking=False), RESP),
            (responses(thinking={"type": "disabled"}), RESP),
            (ollama(think=False), "/api/chat"), (ollama(enable_thinking=False), "/api/chat"),
            (ollama(thinking={"type": "disabled"}), "/api/chat")]:
        thought, text = thought_of(s, body, path)
        assert not thought.strip() and text, (path, body, thought, text)
    for field, value, param in [("thinking", {"type": "perhaps"}, "thinking.type"), ("thinking", 3, "thinking"),
                                ("reasoning", "much", "reasoning"), ("reasoning_budget", "4", "reasoning_budget"),
                                ("thinking", {"type": "enabled", "budget_tokens": 1.5}, "thinking.budget_tokens"),
                                ("reasoning", {"max_tokens": -2}, "reasoning.max_tokens")]:
        r = s.json(CHAT, dict(ASK, **{field: value}), status=400)
        assert r["error"]["param"] == param, r


def test_tokens(_, s):
    text = lambda **more: s.json(COMP, dict({"prompt": "ab", "max_tokens": 20, "temperature": 0}, **more))["choices"][0]
    ids = lambda t: s.json("/tokenize", {"content": t})["tokens"]
    plain = text(logprobs=0)
    tokens = [t for t in plain["logprobs"]["tokens"]]
    assert len(tokens) == 20
    at = next(i for i in range(3, 20) if tokens[i] not in tokens[:i] and len(ids(tokens[i])) == 1)
    stop = ids(tokens[at])[0]
    cut = text(stop_token_ids=[stop])
    assert cut["text"] == "".join(tokens[:at]) and cut["finish_reason"] == "stop", (cut, tokens)
    kept = text(stop_token_ids=[stop], include_stop_str_in_output=True)
    assert kept["text"] == "".join(tokens[:at + 1]), kept
    assert text(stop=tokens[at], include_stop_str_in_output=True)["text"] == kept["text"]
    later = text(stop_token_ids=[stop], min_tokens=at + 3, logprobs=0)
    assert len(later["logprobs"]["tokens"]) >= at + 3 and tokens[at] not in later["logprobs"]["tokens"][:at + 2]
    # words that must not appear, one token and several
    assert tokens[at] not in text(bad_words=[tokens[at]])["text"]
    pair = tokens[at - 1] + tokens[at]
    assert pair in plain["text"] and pair not in text(bad_words=[pair])["text"]
    allowed = ids("abc")
    assert set(text(allowed_token_ids=allowed)["text"]) <= set("abc")
    # of a prompt its last tokens
    long = s.json(COMP, {"prompt": "xyzxyz" * 10 + "ab", "max_tokens": 20, "temperature": 0, "truncate_prompt_tokens": 2})
    assert long["choices"][0]["text"] == text(prompt=ids("ab")[-2:])["text"] and long["usage"]["prompt_tokens"] == 2


def test_sampling(_, s):
    body = {"prompt": "ab", "max_tokens": 24, "temperature": 1.5, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 5}
    plain = s.json(COMP, body)["choices"][0]["text"]
    for more in ({"typical_p": 0.3}, {"top_n_sigma": 0.5}, {"xtc_probability": 1, "xtc_threshold": 0.01},
                 {"dynatemp_range": 1.4}, {"mirostat": 1, "mirostat_tau": 1}, {"mirostat": 2, "mirostat_tau": 1},
                 {"dry_multiplier": 50, "dry_allowed_length": 1, "dry_sequence_breakers": []}, {"samplers": ["top_k"]},
                 {"samplers": "kt", "top_k": 1}):
        got = s.json(COMP, dict(body, **more))["choices"][0]["text"]
        again = s.json(COMP, dict(body, **more))["choices"][0]["text"]
        assert got == again and (got != plain or "samplers" in more), more
    greedy = s.json(COMP, dict(body, temperature=0))["choices"][0]["text"]
    assert s.json(COMP, dict(body, samplers=["top_k", "temperature"], top_k=1))["choices"][0]["text"] == greedy
    for field, value in [("samplers", ["top_k", "top_k"]), ("samplers", ["none"]), ("samplers", "zz"), ("mirostat", 3),
                         ("dry_sequence_breakers", [""]), ("dry_base", 0), ("bad_words", [3]), ("allowed_token_ids", []),
                         ("stop_token_ids", [10**6]), ("truncate_prompt_tokens", 0), ("typical_p", 2)]:
        r = s.json(COMP, dict(body, **{field: value}), status=400)
        assert r["error"]["param"] == field, r


def table():
    """{(field, API): use} of docs/server.md, and of the server."""
    docs, source = {}, {}
    for line in open("docs/server.md"):
        m = re.match(r"\| `([\w.]+)` \| ([A-Zo]+) \| (read|not used|refused) \| \S", line)
        for api in m.group(2) if m else "":
            docs[m.group(1), api] = {"read": "READ", "not used": "UNUSED", "refused": "REFUSED"}[m.group(3)]
    for m in re.finditer(r'^    \{"([\w.]+)",\s*"([A-Zo]+)",\s*(\w+),', open("src/server/api/fields.c").read(), re.M):
        for api in m.group(2):
            source[m.group(1), api] = m.group(3)
    return docs, source


def test_table(_, s):
    docs, source = table()
    assert len(source) > 300 and docs == source, set(docs.items()) ^ set(source.items())
    # what the server reads by name is in the table
    known = {name for name, _ in source}
    for file in ("params", "prepare_chat", "constraint", "thinking", "anthropic", "responses", "ollama", "functions", "llamacpp"):
        for m in re.finditer(r'\b(?:api_\w+|read_\w+)\((?:body|o), "(\w+)"', open(f"src/server/api/{file}.c").read()):
            assert m.group(1) in known or m.group(1) in ("include_usage", "num_ctx"), (file, m.group(1))
    # each row, with a value of the wrong kind: what is read or refused says so
    bodies = {"C": (CHAT, ASK), "P": (COMP, {"prompt": "a"}), "M": (MSG, ASK), "R": (RESP, {"input": "a"}),
              "O": ("/api/chat", ollama()), "o": ("/api/chat", ollama()),
              "L": ("/completion", {"prompt": "a"}), "I": ("/infill", {"input_prefix": "a", "input_suffix": "b"})}
    free = {"model", "lora", "images"}  # any name; per message
    wrong = []
    names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    fim = Server(BUILD, model=fim_model(s, os.path.join(s.dir.name, "fim.gguf"), names))
    for (name, api), use in source.items():
        path, body = bodies[api]
        body = dict(json.loads(json.dumps(body)), max_tokens=1)
        where = body["options"] if api == "o" else body
        if name in ("prompt", "suffix", "raw", "system", "template", "images", "context") and api == "O":
            path, body["prompt"] = "/api/generate", "a"
        if (name, api) == ("top_logprobs", "R"):
            body["include"] = ["message.output_text.logprobs"]
        if name == "function_call":
            body["functions"] = [{"name": "f", "parameters": {}}]
        for value in ({"?": [{}]}, [["x"]], 7.5):
            where[name] = value
            status, _, text = (fim if api == "I" else s).post(path, body)
            if status != 200:
                break
        if status != (200 if use == "UNUSED" else 400) and name not in free:
            wrong.append((name, api, use, status, text[:200]))
    assert not wrong, wrong
    fim.stop()
    # what llama.cpp's API has by other names, and what says nothing
    for body in ({"min_keep": 0}, {"image_data": []}, {"logprobs": 0}, {"n_cmpl": 1}, {"adaptive_target": -1}, {"grammar_lazy": False}):
        assert s.json("/completion", dict(body, prompt="a", n_predict=2))["tokens_predicted"] <= 2
    assert len(s.json("/completion", {"prompt": "a", "n_predict": 2, "n_cmpl": 3})) == 3


def test_unknown(_, s):
    for _ in range(3):
        s.json(CHAT, dict(ASK, max_tokens=1, no_such_field=1))
    s.wait_line("no_such_field")
    assert s.log().count("no_such_field") == 1
    for path, body, name in [(MSG, dict(ASK, mcp_servers=[{"url": "x"}]), "mcp_servers"), (COMP, {"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
                             ("/api/generate", {"prompt": "a", "context": [1]}, "context")]:
        text = s.post(path, body)
        assert text[0] == 400 and name in text[2], text
    s.json(MSG, dict(ASK, max_tokens=1, mcp_servers=[]))


def test_ollama(_, s):
    r = s.json("/api/chat", ollama(options={"num_ctx": 64, "temperature": 0}))
    assert r["prompt_eval_count"] + r["eval_count"] == 64 and r["done_reason"] == "length", r
    assert "num_ctx" in s.json("/api/chat", ollama(options={"num_ctx": 2}), status=400)["error"]
    ask = ollama(logprobs=True, top_logprobs=2, options={"num_predict": 6, "temperature": 0})
    whole = s.json("/api/chat", ask)["logprobs"]
    assert len(whole) == 6 and all(len(t["top_logprobs"]) == 2 and t["logprob"] <= 0 for t in whole)
    lines = [json.loads(l) for l in s.post("/api/chat", dict(ask, stream=True))[2].splitlines()]
    assert [t for l in lines for t in l.get("logprobs", [])] == whole
    raw = s.json("/api/generate", {"prompt": "ab", "raw": True, "stream": False, "logprobs": True, "options": {"num_predict": 3}})
    assert len(raw["logprobs"]) == 3
    plain = s.json("/api/chat", ollama(options={"num_predict": 6}))
    assert "logprobs" not in plain


demo, toy = Server(BUILD, model=DEMO), Server(BUILD)
try:
    run_tests([test_search, test_thinking_budget, test_thinking_families, test_thinking_off, test_tokens, test_sampling, test_run_flags, test_table,
               test_unknown, test_ollama],
              demo, toy)
finally:
    assert demo.stop() == 0 and toy.stop() == 0

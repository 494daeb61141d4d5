"""Fields of requests: what each does to an answer, in every API, and that none is ignored in silence."""
import json
import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
from serverlib import Server, run_tests

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


demo, toy = Server(BUILD, model=DEMO), Server(BUILD)
try:
    run_tests([test_thinking_budget, test_thinking_off, test_tokens, test_sampling],
              demo, toy)
finally:
    assert demo.stop() == 0 and toy.stop() == 0

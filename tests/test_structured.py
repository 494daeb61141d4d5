"""Answers that fit, over every API that can ask for it: schemas, regular expressions, grammars, choices."""
import json
import os
import re
import sys
import tempfile

sys.path.insert(0, os.path.dirname(__file__))
import script_model
from serverlib import Server, run_tests

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Tell me about Jana."}], "max_tokens": 2000, "temperature": 1}
PERSON = {"type": "object", "additionalProperties": False, "required": ["name", "age", "tags"],
          "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 18, "maximum": 99},
                         "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}


def is_person(text):
    v = json.loads(text)
    return (list(v) == ["name", "age", "tags"] and isinstance(v["name"], str) and len(v["name"]) <= 12
            and isinstance(v["age"], int) and 18 <= v["age"] <= 99 and len(v["tags"]) <= 3 and set(v["tags"]) <= {"a", "b"})


def content(r):
    return r["choices"][0]["message"]["content"]


def test_schema(s):
    """Whatever is drawn, it fits; whole and streamed alike; every choice of several."""
    for seed in range(12):
        r = s.json(CHAT, dict(ASK, seed=seed, temperature=0.5 + seed / 4, response_format=FORMAT))
        assert r["choices"][0]["finish_reason"] == "stop" and is_person(content(r)), content(r)
    body = dict(ASK, seed=3, response_format=FORMAT)
    events = [json.loads(e) for e in s.stream(CHAT, body)[:-1]]
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == content(s.json(CHAT, body))
    many = s.json(CHAT, dict(ASK, seed=5, n=4, logprobs=True, response_format=FORMAT))["choices"]
    assert all(is_person(c["message"]["content"]) for c in many) and len({c["message"]["content"] for c in many}) > 1
    cut = s.json(CHAT, dict(ASK, max_tokens=3, response_format=FORMAT))
    assert cut["choices"][0]["finish_reason"] == "length"


def test_kinds(s):
    def one(**kw):
        return s.json(CHAT, dict(ASK, enable_thinking=False, **kw))
    assert re.fullmatch(r"[0-9]{3}-[a-z]{2}", content(one(guided_regex="[0-9]{3}-[a-z]{2}")))
    assert content(one(guided_choice=["yes", "no"])) in ("yes", "no")
    assert content(one(structured_outputs={"choice": ["maybe"]})) == "maybe"
    assert re.fullmatch(r"x[0-9]y", content(one(grammar='root ::= "x" [0-9] "y"')))
    assert is_person(content(one(json_schema=PERSON))) and is_person(content(one(guided_json=json.dumps(PERSON))))
    r = s.json("/v1/completions", {"prompt": "Age:", "guided_regex": " [1-9][0-9]", "temperature": 1})
    assert re.fullmatch(r" [1-9][0-9]", r["choices"][0]["text"]) and r["choices"][0]["finish_reason"] == "stop"
    for seed in range(4):  # any object: it ends when the tokens do
        r = one(response_format={"type": "json_object"}, seed=seed, max_tokens=60)
        assert r["choices"][0]["finish_reason"] == "stop" and isinstance(json.loads(content(r)), dict), r["choices"]


def test_apis(s):
    """The same through the other APIs."""
    r = s.json("/v1/responses", {"input": "Hello", "seed": 1, "text": {"format": {"type": "json_schema", "name": "p", "schema": PERSON}}})
    assert is_person("".join(p["text"] for i in r["output"] if i["type"] == "message" for p in i["content"])), r["output"]
    r = s.json("/v1/messages", {"messages": ASK["messages"], "max_tokens": 2000, "output_config": {"format": {"type": "json_schema", "schema": PERSON}}})
    assert is_person("".join(b["text"] for b in r["content"] if b["type"] == "text"))
    assert is_person(s.json("/api/chat", {"messages": ASK["messages"], "stream": False, "options": {"seed": 1}, "format": PERSON})["message"]["content"])


def test_thinking(s):
    """Thinking is free, then the constraint holds."""
    body = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0, "guided_regex": "[0-9]+"}
    prompt = s.json("/apply-template", body)
    r = s.json(CHAT, body)
    assert re.fullmatch(r"[0-9]+", content(r).strip())
    if prompt["thinking"]:
        assert "carry" in r["choices"][0]["message"]["reasoning_content"] and content(r).strip() == "42"


SEND = {"type": "function", "function": {"name": "send", "description": "Sends a letter", "parameters": {
    "type": "object", "additionalProperties": False, "required": ["to", "copies"],
    "properties": {"to": {"type": "string", "maxLength": 8}, "copies": {"type": "integer", "minimum": 1, "maximum": 5}, "urgent": {"type": "boolean"}}}}}
PING = {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}}
STRICT = {"type": "function", "function": dict(SEND["function"], strict=True)}


def is_send(name, args):
    v = json.loads(args) if isinstance(args, str) else args
    return (name == "send" and set(v) <= {"to", "copies", "urgent"} and isinstance(v["to"], str) and len(v["to"]) <= 8
            and v["copies"] in range(1, 6) and isinstance(v.get("urgent", True), bool))


def calls_of(r):
    assert r["choices"][0]["finish_reason"] == "tool_calls", r["choices"][0]
    return [(c["function"]["name"], c["function"]["arguments"]) for c in r["choices"][0]["message"]["tool_calls"]]


def test_forced_calls(s):
    """A call that is asked for comes, whole and valid, whatever the model would rather do, thinking or not."""
    named = {"type": "function", "function": {"name": "send"}}
    for seed in range(6):
        ask = dict(ASK, seed=seed, temperature=0.3 + seed, max_tokens=150, enable_thinking=seed % 2 == 0, tools=[PING, SEND])
        assert all(n == "ping" or is_send(n, a) for n, a in calls_of(s.json(CHAT, dict(ask, tool_choice="required"))))
        calls = calls_of(s.json(CHAT, dict(ask, tool_choice=named)))
        assert len(calls) == 1 and is_send(*calls[0]), calls
        calls = calls_of(s.json(CHAT, dict(ask, tool_choice="required", parallel_tool_calls=False)))
        assert len(calls) == 1 and (calls[0][0] == "ping" or is_send(*calls[0])), calls
    ask = {"messages": ASK["messages"], "max_tokens": 200, "temperature": 2}
    tool = {"name": "send", "input_schema": SEND["function"]["parameters"]}
    r = s.json("/v1/messages", dict(ask, tools=[tool], tool_choice={"type": "tool", "name": "send", "disable_parallel_tool_use": True}))
    used = [b for b in r["content"] if b["type"] == "tool_use"]
    assert r["stop_reason"] == "tool_use" and len(used) == 1 and is_send("send", used[0]["input"]), r
    r = s.json("/v1/messages", dict(ask, tools=[tool], tool_choice={"type": "any"}))
    assert all(is_send(b["name"], b["input"]) for b in r["content"] if b["type"] == "tool_use") and r["stop_reason"] == "tool_use"
    flat = dict(SEND["function"], type="function", strict=True)
    r = s.json("/v1/responses", {"input": "Hello", "seed": 3, "temperature": 2, "max_output_tokens": 200, "tools": [flat], "tool_choice": "required"})
    used = [i for i in r["output"] if i["type"] == "function_call"]
    assert used and all(is_send(i["name"], i["arguments"]) for i in used) and r["status"] == "completed", r["output"]


def test_free_calls(s):
    """Nothing is asked for: text is free; a call that was begun is one, and by its schema."""
    begin = [{"role": "user", "content": "Send a letter to Jana."}, {"role": "assistant", "content": "<tool_call>\n{\"name\": \""}]
    n_calls = 0
    for seed in range(10):
        r = s.json(CHAT, dict(ASK, seed=seed, temperature=1.5, max_tokens=150, tools=[PING, STRICT]))["choices"][0]
        assert r["finish_reason"] in ("stop", "tool_calls", "length")
        for c in r["message"].get("tool_calls", []):
            n_calls += 1
            assert c["function"]["name"] == "ping" and isinstance(json.loads(c["function"]["arguments"]), dict) or is_send(
                c["function"]["name"], c["function"]["arguments"]), c
    r = s.json("/api/chat", {"messages": begin[:1], "stream": False, "options": {"seed": 2, "temperature": 2, "num_predict": 150}, "tools": [STRICT]})
    assert all(is_send(c["function"]["name"], c["function"]["arguments"]) for c in r["message"].get("tool_calls", [])), r
    none = s.json(CHAT, dict(ASK, seed=1, max_tokens=60, tools=[SEND], tool_choice="none"))["choices"][0]
    assert "tool_calls" not in none["message"] and none["finish_reason"] in ("stop", "length")


def test_lazy_schemas(_):
    """Nothing is required: a call that was begun follows its tool's schema, strict or not, in streams as well; inside thinking
    nothing is a call."""
    thought = "\nI could write <tool_call>\n{\"name\": \"ping\"}\n</tool_call> here. But first I think.\n"
    with tempfile.TemporaryDirectory() as d:
        script_model.build(d + "/m.gguf", "send", '{"to":5,"copies":"many","more":[1]}', thought=thought)
        s = Server(BUILD, "-c", "32768", model=d + "/m.gguf")
        # not to be enforced as it is: loosened, no error; and a large one
        odd = {"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}}}
        huge = {"type": "function", "function": {"name": "huge", "parameters": {"type": "object", "properties": {f"p{i}": {"enum": [f"{i}-{k}" for k in range(40)]} for i in range(40)}}}}
        for tools in ([PING, SEND], [SEND, odd], [odd, odd | {"function": odd["function"] | {"name": "odd2"}}, SEND], [SEND, PING, huge]):
            ask = {"messages": ASK["messages"], "max_tokens": 200, "temperature": 0, "tools": tools}
            r = s.json(CHAT, ask)
            (call,) = calls_of(r)
            assert is_send(*call), (call, [t["function"]["name"] for t in tools])
            assert r["choices"][0]["message"]["reasoning_content"].strip() == thought.strip()
            parts = [json.loads(e)["choices"][0]["delta"] for e in s.stream(CHAT, ask)[:-1]]
            assert "".join(c["function"].get("arguments", "") for p in parts for c in p.get("tool_calls", [])) == call[1]
        s.json(CHAT, dict(ask, tools=[{"type": "function", "function": dict(odd["function"], strict=True)}]), 400)
        s.stop()


def test_call_or_answer(s):
    """Tools and a format: the answer is either."""
    kinds = set()
    for seed in range(16):
        r = s.json(CHAT, dict(ASK, seed=seed, temperature=2.5, max_tokens=200, tools=[STRICT], response_format=FORMAT))["choices"][0]
        calls = r["message"].get("tool_calls", [])
        kinds.add(bool(calls))
        assert all(is_send(c["function"]["name"], c["function"]["arguments"]) for c in calls) if calls else is_person(r["message"]["content"]), r
    assert len(kinds) == 2, "only one kind was ever seen"


def test_random_model(_):
    """The same from random weights, which want nonsense."""
    toy = Server(BUILD)
    try:
        test_forced_calls(toy)
        test_free_calls(toy)
        for seed in range(6):
            r = toy.json(CHAT, dict(ASK, seed=seed, max_tokens=300, temperature=1 + seed, response_format=FORMAT))
            assert r["choices"][0]["finish_reason"] == "stop" and is_person(content(r)), content(r)
    finally:
        toy.stop()


def test_every_form(_):
    """Calls in the form of every family, forced on random weights: whole, valid, as many as were asked for."""
    for form in ("hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "deepseek_r1", "gpt_oss", "glm45", "minimax_m2", "kimi_k2", "gemma4",
                 "seed_oss", "command_a", "apertus", "hunyuan3", "solar_open", "muse", "minimax_m3", "nemotron_nano", "granite3", "tool_calls", "lfm2",
                 "deepseek_v32", "deepseek_v4", "inkling"):
        toy = Server(BUILD, "--chat-format", form)
        try:
            for seed in range(3):
                most = 600 if form in ("hunyuan3", "minimax_m3", "deepseek_v32", "deepseek_v4") else 200  # its tags are long, and here each byte is a token
                ask = dict(ASK, seed=seed, temperature=1 + seed, max_tokens=most, tools=[PING, SEND])
                calls = calls_of(toy.json(CHAT, dict(ask, tool_choice="required", parallel_tool_calls=seed == 0)))
                assert all(n == "ping" or is_send(n, a) for n, a in calls) and (seed == 0 or len(calls) == 1), (form, calls)
                calls = calls_of(toy.json(CHAT, dict(ask, tools=[PING, STRICT], tool_choice={"type": "function", "function": {"name": "send"}})))
                assert len(calls) == 1 and is_send(*calls[0]), (form, calls)
        finally:
            toy.stop()


def test_templates(_):
    """The template of a family, its form found in it: a forced call fits its schema, whole and streamed, after thinking too, and it can be answered."""
    step = {"type": "object", "properties": {"do": {"type": "string"}, "n": {"type": "integer"}}, "required": ["do", "n"]}
    plan = {"type": "function", "function": {"name": "plan", "description": "Plans.", "parameters": {"type": "object", "required": ["steps", "note"], "properties": {
        "steps": {"type": "array", "items": step, "minItems": 1, "maxItems": 2}, "note": {"type": "string", "enum": ["5", "x"]}}}}}
    for name in ("Cohere2MoE", "CohereForAI-c4ai-command-r7b-12-2024-tool_use", "Apertus-8B-Instruct", "tencent-Hy3", "muse-glimmer", "MiniMax-M3",
                 "NVIDIA-Nemotron-Nano-v2", "LFM2.5-8B-A1B"):
        template = f"../shared/golden/templates/{name}.jinja"
        if not os.path.exists(template):
            print(f"skipped: {template} is not here")
            continue
        toy = Server(BUILD, "--chat-template", template, "-c", "16384")
        try:
            for effort in ("none", "medium"):
                ask = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Plan it."}], "seed": 1, "temperature": 2, "max_tokens": 900,
                       "tools": [plan], "tool_choice": "required", "reasoning_effort": effort, "thinking_token_budget": 20}
                m = toy.json(CHAT, ask)["choices"][0]["message"]
                args = json.loads(m["tool_calls"][0]["function"]["arguments"])
                assert not m["content"] and args["note"] in ("5", "x") and 1 <= len(args["steps"]) <= 2, (name, m)
                assert all(isinstance(x["do"], str) and isinstance(x["n"], int) for x in args["steps"]), (name, args)
                deltas = [d for line in toy.post(CHAT, dict(ask, stream=True))[2].split("\n") if line.startswith("data: {")
                          for c in json.loads(line[6:])["choices"] for d in c["delta"].get("tool_calls", [])]
                assert "".join(d["function"].get("arguments", "") for d in deltas if d["index"] == 0) == m["tool_calls"][0]["function"]["arguments"], name
                results = [{"role": "tool", "tool_call_id": c["id"], "content": "done"} for c in m["tool_calls"]]
                toy.json(CHAT, dict(ask, messages=[*ask["messages"], m, *results], tool_choice="auto", max_tokens=4))
        finally:
            toy.stop()


def test_refused(s):
    for kw, param in [({"response_format": 5}, "response_format"), ({"response_format": {}}, "response_format.type"), ({"response_format": {"type": 1}}, "type"),
                      ({"response_format": {"type": "xml"}}, "response_format.type"),
                      ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
                      ({"guided_regex": "("}, "guided_regex"), ({"guided_regex": 5}, "guided_regex"),
                      ({"guided_choice": "x"}, "guided_choice"), ({"guided_choice": []}, "guided_choice"),
                      ({"grammar": "root ::= nothing"}, "grammar"), ({"structured_outputs": 5}, "structured_outputs"),
                      ({"guided_regex": "a", "grammar": 'root ::= "a"'}, "grammar"),
                      ({"guided_json": {"$ref": "http://x"}}, "guided_json"), ({"guided_json": {"type": "objekt"}}, "guided_json"),
                      ({"guided_regex": "(a{1000}){1000}{1000}"}, "guided_regex"), ({"guided_regex": "a", "min_tokens": 5}, "messages"),
                      ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object", "uniqueItems": 5, "properties": {
                          "a": {"type": "array", "uniqueItems": True}}}}}]}, "tools"),
                      ({"tools": [SEND], "tool_choice": "required", "min_tokens": 5}, "messages")]:
        e = s.json(CHAT, dict(ASK, **kw), 400)["error"]
        assert e["param"] == param and e["message"], (kw, e)
    e = s.json(CHAT, dict(ASK, response_format={"type": "json_schema", "json_schema": {"schema": {
        "type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=x)y"}}}}}), 400)["error"]
    assert "#/properties/a/pattern" in e["message"]


PIECES = []


def bans(s, wanted):
    """A logit_bias that bans every token whose text is wanted."""
    if not PIECES:
        n = json.loads(s.get("/v1/models")[2])["data"][0]["meta"]["n_vocab"]
        PIECES.extend(s.json("/detokenize", {"tokens": [i]})["content"] for i in range(n))
    return {str(i): -100 for i, text in enumerate(PIECES) if wanted(text)}


def test_bans(s):
    """What a bias forbids and the constraint needs: refused before it begins where that can be known, and else the
    answer ends with an error of the request. Never with a 5xx, with what is banned, or with what does not fit."""
    digits = bans(s, lambda t: any("0" <= ch <= "9" for ch in t))
    quick = dict(ASK, enable_thinking=False, logit_bias=digits)
    # the first token, one that must come some tokens later
    for kw, field in (({"guided_regex": "[0-9]"}, "guided_regex"), ({"guided_choice": ["1", "2"]}, "guided_choice"), ({"grammar": 'root ::= "abc" [0-9]'}, "grammar"),
                      ({"structured_outputs": {"regex": "-?[0-9]+"}, "logit_bias": dict(digits, **bans(s, lambda t: "-" in t))}, "structured_outputs")):
        for stream in (False, True):
            e = s.json(CHAT, dict(quick, stream=stream, **kw), 400)["error"]
            assert e["param"] == "logit_bias" and e["type"] == "invalid_request_error" and "bans every token that fits" in e["message"], (kw, e)
            assert field in e["message"], e
    # one that is needed when much was chosen already
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    e = s.json(CHAT, dict(quick, response_format=form), 400)["error"]
    assert e["type"] == "invalid_request_error" and e["code"] == "constraint_failed" and re.search("bans every token that fits .* after [1-9][0-9]* tokens", e["message"]), e
    events = s.stream(CHAT, dict(quick, response_format=form))
    e = json.loads(events[-2])["error"]
    assert events[-1] == "[DONE]" and e["type"] == "invalid_request_error" and e["code"] == "constraint_failed", events[-2:]
    said = "".join(json.loads(d)["choices"][0]["delta"].get("content", "") for d in events[:-2])
    assert said.strip().startswith("{") and not any("0" <= ch <= "9" for ch in said), said
    e = s.json("/v1/completions", {"prompt": "Age:", "guided_regex": " *[a-z]{2,3}[0-9]", "logit_bias": digits}, 400)["error"]
    assert e["code"] == "constraint_failed", e
    ask = {"input": "Hello", "logit_bias": digits, "reasoning": {"effort": "none"}, "text": {"format": {"type": "json_schema", "name": "p", "schema": PERSON}}}
    assert s.json("/v1/responses", ask, 400)["error"]["type"] == "invalid_request_error"
    status, _, text = s.post("/v1/responses", dict(ask, stream=True))
    assert status == 200 and "event: response.failed" in text and '"code":"invalid_prompt"' in text and "server_error" not in text, text
    # Anthropic's and Ollama's APIs obey a bias, too
    e = s.json("/v1/messages", {"messages": ASK["messages"], "max_tokens": 2000, "logit_bias": digits, "output_config": {"format": {"type": "json_schema", "schema": PERSON}}}, 400)["error"]
    assert e["type"] == "invalid_request_error" and "bans every token that fits" in e["message"], e
    e = s.json("/api/chat", {"messages": ASK["messages"], "stream": False, "options": {"seed": 1, "logit_bias": digits}, "format": PERSON}, 400)["error"]
    assert "bans every token that fits" in e, e
    # what is left is chosen, also where the tokens run low
    for seed in range(4):
        r = s.json(CHAT, dict(quick, seed=seed, guided_regex="[0-9a-c]{20}"))["choices"][0]
        assert r["finish_reason"] == "stop" and re.fullmatch("[a-c]{20}", r["message"]["content"]), r
        r = s.json(CHAT, dict(quick, seed=seed, max_tokens=16, guided_regex="x[a-c]{4,60}([0-9]|[a-c]{9}y)"))["choices"][0]
        assert r["finish_reason"] in ("stop", "length") and re.fullmatch("x[a-cy]*", r["message"]["content"]), r
    # an answer that may not end
    end = bans(s, lambda t: t.startswith("<|"))
    e = s.json(CHAT, dict(ASK, guided_regex="a", logit_bias=end), 400)["error"]
    assert e["param"] == "logit_bias" and "ends an answer" in e["message"], e
    r = s.json(CHAT, dict(ASK, max_tokens=30, tools=[SEND], logit_bias=end))["choices"][0]  # nothing is asked for: text without end
    assert r["finish_reason"] in ("length", "tool_calls"), r
    e = s.json(CHAT, dict(ASK, logit_bias=bans(s, lambda t: True)), 400)["error"]
    assert e["param"] == "logit_bias", e
    assert s.get("/health")[0] == 200


server = Server(BUILD, model="demo/steel-demo.gguf")
try:
    run_tests([test_schema, test_kinds, test_apis, test_thinking, test_forced_calls, test_free_calls, test_lazy_schemas, test_call_or_answer, test_random_model, test_every_form, test_templates, test_refused, test_bans], server)
finally:
    server.stop()

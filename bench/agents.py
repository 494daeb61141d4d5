"""How much of an agent's prompts comes from the prefix cache, turn by turn.

    python3 bench/agents.py [build/steel] [--model MODEL | --like tests/golden/qwen3_5] [--agents claude,pi] [--json]
    python3 bench/agents.py record AGENT VERSION LOG_FOLDER OUT.json

bench/agents/*.json are loops that real agents ran: which messages each request had, their roles and lengths, the tools, and
what changed from one request to the next. All words are made up. Every dialect is kept as messages of chat completions.

For each request it prints the prompt's tokens, the longest prefix in common with an earlier prompt of the same run, and the
tokens from the cache. `record` makes such a file from the .req files of a logging proxy.

--like takes the network of a small model, such as those of tests/golden, with the vocabulary and the template of the built-in model.
The exit status is 1 if less than 98 % of what can be cached came from the cache: only whole pages and checkpoints of
recurrent states can, so a prompt may miss up to SLACK tokens."""
import argparse
import atexit
import concurrent.futures
import copy
import glob
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading

HERE = os.path.dirname(os.path.abspath(__file__))
AIM = 0.98
SLACK = 16  # tokens of a page: the last token of a prompt is always computed, and the page it is on
WORDS = ("time year people way day man thing world life hand part child eye work week case point home water room area money story "
         "fact month right study book word side kind head house line power hour game end city name").split()


# Recording: only lengths, roles and equality leave this part.

class Recorder:
    """Texts become lists of [seed, start, length]. Equal texts get equal lists; a changed text keeps what did not change."""

    def __init__(self):
        self.known, self.last, self.tools, self.names, self.calls, self.messages = {}, {}, [], {}, {}, []

    @staticmethod
    def cut(segments, a, b):
        out = []
        for seed, start, n in segments:
            lo, hi = max(a, 0), min(b, n)
            if lo < hi:
                out.append([seed, start + lo, hi - lo])
            a, b = a - n, b - n
        return out

    def text(self, place, s):
        if s not in self.known:
            old = self.last.get(place, "")
            head = len(os.path.commonprefix([old, s]))
            tail = len(os.path.commonprefix([old[head:][::-1], s[head:][::-1]]))
            if head + tail < len(s) / 2:
                head = tail = 0
            before = self.known.get(old, [])
            new = [[len(self.known), 0, len(s) - head - tail]] if head + tail < len(s) else []
            self.known[s] = self.cut(before, 0, head) + new + self.cut(before, len(old) - tail, len(old))
        self.last[place] = s
        return self.known[s]

    def number(self, table, key):
        return table.setdefault(key, len(table))

    def pooled(self, pool, item):
        if item not in pool:
            pool.append(item)
        return pool.index(item)

    def tool(self, t):
        f = t.get("function", t)
        schema = json.dumps(f.get("parameters") or f.get("input_schema") or f.get("format") or {})
        name = self.number(self.names, f.get("name") or f["type"])
        return self.pooled(self.tools, [name, self.text(("tool", name), f.get("description") or ""), len(schema)])

    def message(self, place, m):
        out = {"role": m["role"]}
        for field, key in [("text", "content"), ("thinking", "reasoning_content")]:
            v = m.get(key)
            v = "".join(p.get("text", "") for p in v) if isinstance(v, list) else v
            if v:
                out[field] = self.text((place, field), v)
        calls = [[self.number(self.names, c["function"]["name"]), self.number(self.calls, c["id"]),
                  self.text((place, "call", i), c["function"]["arguments"])] for i, c in enumerate(m.get("tool_calls") or [])]
        if calls:
            out["calls"] = calls
        if m["role"] == "tool":
            out["call"] = self.number(self.calls, m["tool_call_id"])
        return self.pooled(self.messages, out)

    def request(self, body):
        messages = (from_responses if "input" in body else from_anthropic if "system" in body else from_chat)(body)
        return {"tools": [self.tool(t) for t in body.get("tools") or []], "messages": [self.message(i, m) for i, m in enumerate(messages)]}


def from_chat(body):
    for m in body["messages"]:
        if m.get("reasoning"):
            m["reasoning_content"] = m["reasoning"]
    return body["messages"]


def call(identity, name, arguments):
    return {"id": identity, "function": {"name": name, "arguments": arguments}}


def from_anthropic(body):
    def words(v):
        return v if isinstance(v, str) else "".join(b.get("text", "") for b in v or [])
    blocks = [{"text": body["system"]}] if isinstance(body["system"], str) else body["system"]
    out = [{"role": "system", "content": "\n".join(b["text"] for b in blocks if not b["text"].startswith("x-anthropic-billing-header"))}]
    for m in body["messages"]:
        parts = [{"type": "text", "text": m["content"]}] if isinstance(m["content"], str) else m["content"]
        for p in parts:
            if p["type"] == "tool_result":
                out.append({"role": "tool", "tool_call_id": p["tool_use_id"], "content": words(p.get("content"))})
        one = {"role": m["role"], "content": "".join(p["text"] for p in parts if p["type"] == "text"),
               "reasoning_content": "".join(p["thinking"] for p in parts if p["type"] == "thinking"),
               "tool_calls": [call(p["id"], p["name"], json.dumps(p["input"])) for p in parts if p["type"] == "tool_use"]}
        if any(one[k] for k in ["content", "reasoning_content", "tool_calls"]):
            out.append(one)
    return out


def from_responses(body):
    out = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    for item in body["input"]:
        kind = item.get("type", "message")
        if kind == "message":
            out.append({"role": item["role"], "content": item["content"]})
        elif kind == "reasoning":
            out.append({"role": "assistant", "reasoning_content": item.get("content") or item.get("summary") or []})
        elif kind == "function_call":
            if not (out[-1]["role"] == "assistant" and not out[-1].get("content")):
                out.append({"role": "assistant"})
            out[-1].setdefault("tool_calls", []).append(call(item["call_id"], item["name"], item["arguments"]))
        elif kind == "function_call_output":
            v = item["output"]
            out.append({"role": "tool", "tool_call_id": item["call_id"], "content": v if isinstance(v, str) else json.dumps(v)})
    return out


def record(agent, version, folder, path):
    r, requests = Recorder(), []
    for f in sorted(glob.glob(os.path.join(folder, "*.req"))):
        head, _, body = open(f, encoding="utf-8").read().split("\n", 2)
        if re.match(r"POST /v1/(messages|responses|chat/completions)(\?\S*)?$", head):
            requests.append(r.request(json.loads(body)))
    with open(path, "w", encoding="utf-8") as f:
        f.write('{"agent": %s, "version": %s,\n "tools": %s,\n "messages": [\n  %s],\n "requests": [\n  %s]}\n' % (
            json.dumps(agent), json.dumps(version), json.dumps(r.tools), ",\n  ".join(map(json.dumps, r.messages)),
            ",\n  ".join(map(json.dumps, requests))))


# Replay

def made_up(segments):
    out = []
    for seed, start, n in segments:
        rng, text = random.Random(seed), ""
        while len(text) < start + n:
            text += rng.choice(WORDS) + (".\n" if rng.random() < 0.08 else " ")
        out.append(text[start:start + n])
    return "".join(out)


def tool_body(tool):
    name, description, schema = tool
    about = made_up([[1000 + name, 0, max(schema - 90, 1)]])
    return {"type": "function", "function": {"name": "tool_%d" % name, "description": made_up(description) or "a tool", "parameters": {
        "type": "object", "properties": {"a": {"type": "string", "description": about}}}}}


def message_body(m, thinking=True):
    out = {"role": m["role"], "content": made_up(m.get("text", []))}
    if thinking and m.get("thinking"):
        out["reasoning_content"] = made_up(m["thinking"])
    if m.get("calls"):
        out["tool_calls"] = [{"id": "call_%d" % i, "type": "function", "function": {
            "name": "tool_%d" % name, "arguments": json.dumps({"a": made_up(args)})}} for name, i, args in m["calls"]]
    if m["role"] == "tool":
        out["tool_call_id"] = "call_%d" % m["call"]
    return out


def bodies(loop, thinking=True):
    return [{"messages": [message_body(loop["messages"][i], thinking) for i in r["messages"]],
             **({"tools": [tool_body(loop["tools"][i]) for i in r["tools"]]} if r["tools"] else {})} for r in loop["requests"]]


def variant_recorded(loop):
    return bodies(loop)


def variant_no_thinking(loop):
    """The client sends no thinking back."""
    return bodies(loop, thinking=False)


def variant_tool_added(loop):
    """From the middle on there is another tool at the end of the list."""
    out = bodies(loop)
    for b in out[len(out) // 2:]:
        if "tools" in b:
            b["tools"].append(tool_body([99, [[99, 0, 300]], 400]))
    return out


def variant_turn_edited(loop):
    """The last request again, with a message in its middle changed, as after /rewind or a compaction of one result."""
    out = bodies(loop)
    last = copy.deepcopy(out[-1])
    m = last["messages"][len(last["messages"]) // 2]
    m["content"] = made_up([[77, 0, max(len(m["content"] or ""), 20)]])
    return out + [last]


def variant_two_agents(loop):
    """Two agents of one task take turns: the same beginning, other words of the user."""
    first, second = bodies(loop), bodies(loop)
    for b in second:
        user = [m for m in b["messages"] if m["role"] == "user"][-1:]
        for m in user:
            m["content"] += " The second agent does the other half."
    return [b for pair in zip(first, second) for b in pair]


def variant_at_once(loop):
    """The same two agents, whose requests arrive in pairs."""
    return variant_two_agents(loop)


VARIANTS = [variant_recorded, variant_no_thinking, variant_tool_added, variant_turn_edited, variant_two_agents, variant_at_once]


class Server:
    def __init__(self, steel, model, flags):
        cmd = [steel, "serve", *([model] if model else []), "--port", "0", *flags]
        self.proc = subprocess.Popen(cmd, stderr=subprocess.PIPE, text=True)
        atexit.register(self.proc.kill)
        self.port, log = None, []
        for line in self.proc.stderr:
            log.append(line)
            found = re.search(r"://[^ \"]*:(\d+)", line)
            self.port = int(found.group(1)) if found and "listening" in line else self.port
            if "ready" in line:
                break
        else:
            sys.exit("the server did not start:\n" + "".join(log))
        threading.Thread(target=lambda: [None for _ in self.proc.stderr], daemon=True).start()

    def post(self, path, body):
        c = http.client.HTTPConnection("127.0.0.1", self.port)
        c.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        r = c.getresponse()
        text = r.read().decode()
        c.close()
        if r.status != 200:
            sys.exit("%s: %d %s" % (path, r.status, text[:500]))
        return json.loads(text)

    def stop(self):
        self.proc.send_signal(signal.SIGTERM)
        self.proc.wait()


def with_vocabulary(steel, folder, out):
    """The model in `folder` with the vocabulary and the template of the built-in one, and a long context."""
    sys.path.insert(0, os.path.join(os.path.dirname(HERE), "tests"))
    from gguf_tools import Gguf, write_gguf
    subprocess.run([steel, "convert", folder, out, "--type", "f32"], check=True, capture_output=True)
    model, demo = Gguf(out), Gguf(os.path.join(os.path.dirname(HERE), "demo/steel-demo.gguf")).meta
    small, n = model.tensors["token_embd.weight"][0][1], len(demo["tokenizer.ggml.tokens"])
    meta = {k: v for k, v in model.meta.items() if not k.startswith("tokenizer.")}
    meta.update((k, v) for k, v in demo.items() if k.startswith("tokenizer."))
    meta[meta["general.architecture"] + ".context_length"] = 65536
    meta[meta["general.architecture"] + ".vocab_size"] = n
    tensors = []
    for name, (dims, kind, data) in model.tensors.items():
        if name in ("token_embd.weight", "output.weight"):  # the same rows again and again
            dims, data = (dims[0], n), (data * (n // small + 1))[:len(data) // small * n]
        tensors.append((name, dims, kind, data))
    write_gguf(out, meta, tensors)


def tokens(server, body):
    return server.post("/apply-template", body)["tokens"]


def common(a, b):
    n = min(len(a), len(b))
    lo = 0
    while lo < n:  # by halves: slices compare quickly
        hi = (lo + n + 1) // 2
        if a[lo:hi] == b[lo:hi]:
            lo = hi
        else:
            n = hi - 1
    return lo


def replay(prompts, ask, together):
    """A row for each prompt: tokens, common prefix with an earlier one, from the cache."""
    rows = []
    for at in range(0, len(prompts), together):
        with concurrent.futures.ThreadPoolExecutor(together) as pool:
            usages = [r["usage"] for r in pool.map(ask, range(at, at + together))]
        for i, usage in enumerate(usages, at):
            p = prompts[i]
            assert usage["prompt_tokens"] == len(p), (usage, len(p))
            shared = max([common(p, q) for q in prompts[:i]], default=0)
            rows.append((len(p), shared, (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)))
    return rows


def main():
    if sys.argv[1:2] == ["record"]:
        return record(*sys.argv[2:6])
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("steel", nargs="?", default="build/steel")
    a.add_argument("--model", help="a model with a vocabulary (default: the built-in one)")
    a.add_argument("--agents", default="claude,codex,opencode,qwen,pi")
    a.add_argument("--variants", default=",".join(v.__name__[8:] for v in VARIANTS))
    a.add_argument("--like", help="the folder of a small model, which gets the vocabulary of the built-in one")
    a.add_argument("--flags", default="-c 65536", help="of the server")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end, too
    a.add_argument("--json", action="store_true", help="print one line of JSON for each loop")
    o = a.parse_args()
    missed = False
    salt = 0
    work = tempfile.TemporaryDirectory(prefix="steel-agents-")
    if o.like:
        o.model = os.path.join(work.name, "model.gguf")
        with_vocabulary(o.steel, o.like, o.model)
    server = Server(o.steel, o.model, o.flags.split())
    try:
        for agent in o.agents.split(","):
            loop = json.load(open(os.path.join(HERE, "agents", agent + ".json"), encoding="utf-8"))
            for variant in [v for v in VARIANTS if v.__name__[8:] in o.variants.split(",")]:
                salt += 1
                sent = variant(loop)
                prompts = [tokens(server, b) for b in sent]
                extra = {"max_tokens": 1, "temperature": 0, "cache_salt": "loop %d" % salt}
                rows = replay(prompts, lambda i: server.post("/v1/chat/completions", dict(extra, **sent[i])),
                              2 if variant is variant_at_once else 1)
                shared, cached = sum(r[1] for r in rows), sum(r[2] for r in rows)
                able = sum(max(r[1] - SLACK, 0) for r in rows)
                missed |= cached < AIM * able
                if o.json:
                    print(json.dumps({"agent": agent, "variant": variant.__name__[8:], "turns": rows}), flush=True)
                    continue
                print("%-9s %-12s of prompts %5.1f %%, of common prefixes %5.1f %%%s" % (
                    agent, variant.__name__[8:].replace("_", " "), 100 * cached / sum(r[0] for r in rows), 100 * cached / max(shared, 1),
                    "  MISSED" if cached < AIM * able else ""), flush=True)
                print("    " + "  ".join("%d/%d/%d" % (r[2], r[1], r[0]) for r in rows), flush=True)
    finally:
        server.stop()
    return missed


if __name__ == "__main__":
    sys.exit(main())

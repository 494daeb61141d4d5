"""Tools of MCP servers: GET /mcp/tools, POST /mcp/call and tools of type mcp in /v1/responses, against tests/mcp_server.py,
which also misbehaves."""
import atexit
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(__file__))
import script_model
from serverlib import Server, run_tests

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
SERVER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "mcp_server.py")
TMP = tempfile.TemporaryDirectory(prefix="steel-mcp-")


def program(*args, **more):
    return {"command": sys.executable, "args": [SERVER, *args], **more}


def config(servers, name="mcp.json"):
    path = os.path.join(TMP.name, name)
    with open(path, "w") as f:
        f.write(servers if isinstance(servers, str) else json.dumps({"mcpServers": servers}))
    return path


def start(servers, *flags, **kw):
    return Server(BUILD, "--mcp-config", config(servers), *flags, **kw)


def state(s, name):
    """(state, error) of an MCP server."""
    return next((v["state"], v.get("error")) for v in json.loads(s.get("/mcp/tools")[2])["servers"] if v["name"] == name)


def wait_state(s, name, wanted="running"):
    while state(s, name)[0] != wanted:
        time.sleep(0.02)
    return state(s, name)[1]


def tools(s, server):
    return [t["name"] for t in json.loads(s.get("/mcp/tools")[2])["tools"] if t["server"] == server]


def call(s, server, tool, args=None, error=False):
    r = s.json("/mcp/call", {"server": server, "name": tool, "arguments": args or {}})
    assert set(r) == {"content", "isError"} and r["isError"] is error and [c["type"] for c in r["content"]] == ["text"], r
    return r["content"][0]["text"]


def alive(pid):
    try:
        with open("/proc/%d/stat" % pid) as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_tools(s, _):
    wait_state(s, "t")
    status, headers, text = s.get("/mcp/tools")
    r = json.loads(text)
    assert status == 200 and set(r) == {"tools", "servers"} and headers["content-type"] == "application/json"
    assert r["tools"][0] == {"server": "t", "name": "echo", "description": "Says the text again.",
                             "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}, r["tools"][0]
    assert r["servers"] == [{"name": "t", "state": "running"}]
    assert call(s, "t", "echo", {"text": "wörd \"x\" \n"}) == 'echo: wörd "x" \n'
    assert call(s, "t", "fail", {"text": "x"}, error=True) == "it failed: x"
    assert call(s, "t", "error", error=True) == "no such thing"
    assert call(s, "t", "image") == "a picture:\n[image: image/png]\ninside\n[resource_link: file:///b]"
    answers = json.loads(call(s, "t", "ask"))
    assert answers[0] == {"id": "ask-0", "result": {}} and [a["error"]["code"] for a in answers[1:]] == [-32601] * 3
    call(s, "t", "more")
    while "added0" not in tools(s, "t"):
        time.sleep(0.02)
    assert call(s, "t", "added0", {"text": "new"}) == "echo: new"


def test_refused(s, bare):
    for body, status, param in [({}, 400, "server"), ({"server": "t"}, 400, "name"), ({"server": 1, "name": "x"}, 400, "server"),
                                ({"server": "t", "name": "echo", "arguments": []}, 400, "arguments"), ({"server": "x", "name": "echo"}, 404, "server"),
                                ({"server": "t", "name": "nothing"}, 404, "name"),
                                ({"server": "t", "name": "echo", "arguments": {"text": "x" * (1 << 20)}}, 400, "arguments")]:
        assert s.json("/mcp/call", body, status)["error"]["param"] == param, body
    assert json.loads(bare.get("/mcp/tools")[2]) == {"tools": [], "servers": []}
    got = bare.post("/mcp/call", {"server": "t", "name": "echo"})
    assert got[0] == 404 and "--mcp-config" in json.loads(got[2])["error"]["message"], got
    page = {"Origin": "http://elsewhere.example"}
    assert s.post("/mcp/call", {"server": "t", "name": "echo"}, headers=page)[0] == 403


def test_environment(s, _):
    e = json.loads(call(s, "t", "environment"))
    assert e["env"]["GIVEN"] == "yes" and e["env"]["PATH"] and "SECRET" not in e["env"] and "STEEL_CONFIG" not in e["env"]
    assert len([f for f in e["fds"] if f > 2]) <= 1, e["fds"]  # that of listdir
    assert e["cwd"] == os.path.realpath(TMP.name) and e["argv"] == ["ok"] and e["group"] == e["pid"]


def test_hostile_calls(s, _):
    assert call(s, "t", "garbage") == "after garbage"
    big = call(s, "t", "huge", {"bytes": 3 << 20})
    assert big.startswith("xxx") and big.endswith("bytes]") and len(big) < (1 << 20) + 100
    # a client that leaves: the call is cancelled
    c = s.socket()
    body = json.dumps({"server": "t", "name": "hang"}).encode()
    c.sendall(b"POST /mcp/call HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    while json.loads(call(s, "t", "calls")).get("hang", 0) < 1:
        time.sleep(0.02)
    c.close()
    while len(json.loads(call(s, "t", "cancelled"))) < 1:
        time.sleep(0.02)
    # many at once
    out = []
    threads = [threading.Thread(target=lambda: out.append(call(s, "t", "slow", {"seconds": 0.3}))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert out == ["slow"] * 8
    body = json.dumps({"server": "t", "name": "hang"}).encode()
    held = [s.socket() for _ in range(33)]
    for h in held:
        h.sendall(b"POST /mcp/call HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    refused, = select.select(held, [], [])[0]
    assert b"32 calls already, 32 of this client" in refused.recv(65536)
    for h in held:
        h.close()
    while s.json("/mcp/call", {"server": "t", "name": "echo"})["isError"]:
        time.sleep(0.02)
    assert "exit code 3" in call(s, "t", "die", error=True)
    wait_state(s, "t")
    # too long a message, and a flood of them: the server is given up, and starts again
    for tool, args, why in (("huge", {"bytes": 20 << 20}, "too long"), ("flood", {}, "floods")):
        said = call(s, "t", tool, args, error=True)
        assert why in said, said[:300]
        wait_state(s, "t")
    assert call(s, "t", "echo", {"text": "still here"}) == "echo: still here"
    call(s, "t", "stderr", {"text": "on \x1b[31mstderr"})
    assert "\x1b" not in s.wait_line("[31mstderr") and "server=t" in s.wait_line("[31mstderr")


def test_late(*_):
    s = start({"t": program()}, "--mcp-timeout", "1")
    wait_state(s, "t")
    assert call(s, "t", "hang", error=True) == call(s, "t", "wrong_id", error=True) == "the MCP server t did not reply within 1 s"
    cancelled = lambda: s.json("/mcp/call", {"server": "t", "name": "cancelled"})["content"][0]["text"]
    while not re.fullmatch(r"\[\d+, \d+\]", cancelled()):  # late itself on a busy machine
        time.sleep(0.02)
    assert s.stop() == 0


def test_modes(*_):
    modes = ["old", "dies", "silent", "badversion", "banner", "flood", "pages", "endless", "many", "longline", "notools"]
    s = start({m: program(m) for m in modes} | {"gone": {"command": "no-such-program"}, "nowhere": program(cwd="/no/such/folder")})
    for mode in ("old", "banner", "pages", "endless", "many", "notools"):
        wait_state(s, mode)
    assert tools(s, "pages") == tools(s, "old") == tools(s, "banner") and len(tools(s, "old")) > 10
    assert len(tools(s, "many")) == 256 and len(tools(s, "endless")) == 64 and tools(s, "notools") == []
    assert call(s, "old", "echo", {"text": "a"}) == "echo: a"
    for mode, why in [("dies", "exit code 7"), ("badversion", "'1999-01-01'"), ("flood", "floods"), ("longline", "too long"),
                      ("gone", "no-such-program"), ("nowhere", "/no/such/folder")]:
        assert why in wait_state(s, mode, "failed"), (mode, state(s, mode))
        assert "is not running" in call(s, mode, "echo", error=True)
    assert state(s, "silent")[0] == "starting"
    s.wait_line("no reason to live")
    s.wait_count('server=dies why="the process ended', 2)  # and again
    s.json("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert s.stop() == 0


def test_shutdown(*_):
    s = start({"t": program()})
    wait_state(s, "t")
    pid = json.loads(call(s, "t", "environment"))["pid"]
    child = int(call(s, "t", "child"))
    assert alive(pid) and alive(child)
    c = s.socket()
    body = json.dumps({"server": "t", "name": "hang"}).encode()
    c.sendall(b"POST /mcp/call HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    while "hang" not in json.loads(call(s, "t", "calls")):
        time.sleep(0.02)
    s.proc.send_signal(signal.SIGINT)
    s.wait_line("shutting down")
    assert s.stop(signal.SIGINT) == 130
    c.close()
    assert not alive(pid)
    while alive(child):  # it is in the group
        time.sleep(0.02)


def http_server(*mode):
    p = subprocess.Popen([sys.executable, SERVER, "--http", *mode], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    atexit.register(p.kill)
    return p, "http://127.0.0.1:%d/mcp" % int(p.stdout.readline())


def test_http(*_):
    key = {"headers": {"X-Test": "secret"}}
    (a, url), (b, plain), (c, moved) = http_server(), http_server("nosse"), http_server("redirect")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = closed.getsockname()[1]
    s = start({"web": {"url": url, **key}, "plain": {"type": "http", "url": plain, **key}, "moved": {"url": moved, **key}, "nokey": {"url": url},
               "dead": {"url": "http://127.0.0.1:%d/" % dead}})
    for name in ("web", "plain"):
        wait_state(s, name)
        assert call(s, name, "echo", {"text": "ä"}) == "echo: ä" and "no such thing" in call(s, name, "error", error=True)
        assert "status 500: broken" in call(s, name, "die", error=True)
        assert "x" * 1000 in call(s, name, "huge", {"bytes": 3 << 20})
    for name, why in (("moved", "redirects are not followed"), ("nokey", "401"), ("dead", "connect")):
        assert why in wait_state(s, name, "failed"), state(s, name)
    assert call(s, "web", "garbage") == "after garbage"
    assert "has no reply" in call(s, "web", "hang", error=True)
    assert {"id": "ask-0", "result": {}} in json.loads(call(s, "web", "ask"))
    call(s, "web", "more")  # told in the stream of the GET
    while "added0" not in tools(s, "web"):
        time.sleep(0.02)
    assert "forgotten" in call(s, "web", "forget", error=True)
    wait_state(s, "web")
    assert call(s, "web", "echo", {"text": "again"}) == "echo: again"
    assert s.stop() == 0
    while "deleted True" not in (line := a.stderr.readline()):  # a connection may break before, and say so
        assert line, "no session was deleted"
    for p in (a, b, c):
        p.kill()
        p.communicate()


def test_config(*_):
    steel = os.path.join(BUILD, "steel")

    def refused(text, *why, flags=()):
        path = config(text, "bad.json") if text is not None else os.path.join(TMP.name, "missing.json")
        r = subprocess.run([steel, "serve", "--port", "0", "--mcp-config", path, *flags], capture_output=True, text=True)
        assert r.returncode == 1 and "listening" not in r.stderr and all(w in r.stderr for w in ("--mcp-config", *why)), r.stderr
    refused(None, "missing.json")
    refused("{", "line 1")
    refused('{"mcpServers": {}, "more": 1}', "more is not a field")
    refused('{"mcpServers": []}', "mcpServers must be an object")
    refused('{"mcpServers": {"a": {"command": "x"}, "a": {"command": "y"}}}', "duplicate")
    for server, why in [({}, "either command or url"), ({"command": "x", "url": "http://x"}, "either command or url"), ({"command": 1}, "s.command must"),
                        ({"command": "x", "args": "y"}, "s.args must"), ({"command": "x", "args": ["y", 1]}, "s.args[1] must"),
                        ({"command": "x", "env": {"A": 1}}, "s.env.A must"), ({"command": "x", "env": {"A=B": "1"}}, "s.env.A=B is no name"),
                        ({"command": "x", "headers": {}}, "s.headers is not a field"), ({"url": "http://x", "env": {}}, "s.env is not a field"),
                        ({"url": "ftp://x"}, "s.url must"), ({"url": "http://x", "headers": {"A": "b\r\nC: d"}}, "s.headers.A must"),
                        ({"url": "http://x", "type": "sse"}, "s.type must"), ({"command": "x", "cwd": ""}, "s.cwd must"), ("x", "s must be an object")]:
        refused({"s": server}, why)
    refused({"a" * 65: program()}, "1 to 64")
    refused({"s": program()}, "0.0.0.0", "--api-key", flags=("--host", "0.0.0.0"))
    s = start('{"servers": {"t": %s}}' % json.dumps(program(type="stdio")), "--host", "0.0.0.0", "--api-key", "k")
    assert s.get("/mcp/tools")[0] == 401 and s.post("/mcp/call", {"server": "t", "name": "echo"})[0] == 401
    assert s.get("/mcp/tools", headers={"Authorization": "Bearer k"})[0] == 200
    assert s.stop() == 0


# Responses: the model calls t__echo({"text": "hello"}), then says ANSWER

RESP = "/v1/responses"


def mcp(label="t", tools=["echo"], approval="never", **more):
    return {"type": "mcp", "server_label": label, **({"allowed_tools": tools} if tools else {}),
            **({"require_approval": approval} if approval else {}), **more}


def scripted(tool, args, servers, *flags, **kw):
    path = os.path.join(TMP.name, tool + ".gguf")
    script_model.build(path, tool, json.dumps(args, separators=(",", ":")), **kw)
    s = start(servers, "-c", "8192", *flags, model=path)
    wait_state(s, "t")
    return s


def ask(s, status=200, tools=None, **body):
    return s.json(RESP, {"input": "go", "tools": [mcp()] if tools is None else tools, **body}, status)


def events_of(s, **body):
    body = {"input": "go", "tools": [mcp()], **body, "stream": True}
    status, _, text = s.post(RESP, body)
    assert status == 200, text
    out = [json.loads(b.split("\n")[1][6:]) for b in text.strip().split("\n\n") if not b.startswith(":")]
    assert [e["sequence_number"] for e in out] == list(range(len(out)))
    return out


def kinds(r):
    return [i["type"] for i in r["output"]]


def plain(v):
    """Without what differs from response to response."""
    if isinstance(v, dict):
        return {k: plain(x) for k, x in v.items() if k not in ("id", "created_at", "completed_at", "cached_tokens") and "draft_tokens" not in k}
    return [plain(x) for x in v] if isinstance(v, list) else v


def test_rounds(s):
    r = ask(s)
    assert r["status"] == "completed" and kinds(r) == ["mcp_list_tools", "reasoning", "mcp_call", "message"], r
    listed, _, call_item, message = r["output"]
    assert listed["server_label"] == "t" and [t["name"] for t in listed["tools"]] == ["echo"] and listed["tools"][0]["input_schema"]["type"] == "object"
    assert call_item == {"id": call_item["id"], "type": "mcp_call", "status": "completed", "approval_request_id": None, "server_label": "t", "name": "echo",
                         "arguments": '{"text":"hello"}', "error": None, "output": "echo: hello"}
    assert message["content"][0]["text"] == script_model.ANSWER
    u = r["usage"]
    items = [dict(type="function_call", call_id="c", name="t__echo", arguments=call_item["arguments"]), dict(type="function_call_output", call_id="c", output="echo: hello")]
    tool = {"type": "function", "name": "t__echo", "description": "Says the text again.", "parameters": listed["tools"][0]["input_schema"]}
    count = lambda more: s.json(RESP + "/input_tokens", {"input": [{"role": "user", "content": "go"}] + more, "tools": [tool]})["input_tokens"]
    thought = [i for i in r["output"] if i["type"] == "reasoning"]
    assert u["input_tokens"] == count([]) + count(thought + items), u  # the rounds, summed
    assert u["total_tokens"] == u["input_tokens"] + u["output_tokens"] and u["output_tokens_details"]["reasoning_tokens"] > 0
    assert u["input_tokens_details"]["cached_tokens"] > 0
    # kept, and continued: the lists are not sent again
    assert json.loads(s.get(RESP + "/" + r["id"])[2]) == r
    more = ask(s, previous_response_id=r["id"], input="again")
    assert kinds(more) == ["reasoning", "mcp_call", "message"]
    # of the client's own history
    assert kinds(ask(s, input=[{"role": "user", "content": "go"}] + r["output"] + [{"role": "user", "content": "again"}], store=False)) == kinds(more)


def test_stream(s):
    whole, ev = ask(s), events_of(s)
    assert plain(ev[-1]["response"]) == plain(whole) and ev[-1]["type"] == "response.completed"
    names = [e["type"].replace("response.", "") for e in ev if not re.search("reasoning|content_part|output_text", e["type"])]
    assert names == ["created", "in_progress", "output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done",
                     "output_item.added", "output_item.done", "output_item.added", "mcp_call.in_progress", *["mcp_call_arguments.delta"] * names.count("mcp_call_arguments.delta"),
                     "mcp_call_arguments.done", "mcp_call.completed", "output_item.done", "output_item.added", "output_item.done", "completed"], names
    of = lambda i: [e for e in ev if e.get("output_index") == i]
    assert "".join(e["delta"] for e in of(2) if e["type"].endswith("arguments.delta")) == '{"text":"hello"}'
    for i, item in enumerate(ev[-1]["response"]["output"]):
        assert {e["item_id"] for e in of(i) if "item_id" in e} == {item["id"]} and [e["item"] for e in of(i) if e["type"].endswith("item.done")] == [item]
    assert of(2)[0]["item"]["arguments"] == "" and of(2)[0]["item"]["output"] is None


def test_approval(s):
    for approval in ("always", None, {"always": {"tool_names": ["echo"]}}, {"never": {"tool_names": ["fail"]}}, {"never": {"read_only": False}}):
        tools = [mcp(approval=approval)]
        before = json.loads(call(s, "t", "calls")).get("echo", 0)
        r = ask(s, tools=tools)
        assert kinds(r) == ["mcp_list_tools", "reasoning", "mcp_approval_request"] and r["status"] == "completed", (approval, r)
        asked = r["output"][-1]
        assert asked == {"id": asked["id"], "type": "mcp_approval_request", "server_label": "t", "name": "echo", "arguments": '{"text":"hello"}'}
        assert json.loads(call(s, "t", "calls")).get("echo", 0) == before
    for approval in ({"never": {"tool_names": ["echo"]}}, {"never": {"read_only": True}}):
        assert "mcp_call" in kinds(ask(s, tools=[mcp(approval=approval)]))
    ev = events_of(s, tools=tools)
    assert [e["type"] for e in ev[-3:]] == ["response.output_item.added", "response.output_item.done", "response.completed"]
    assert ev[-3]["item"] == ev[-2]["item"] and ev[-2]["item"]["type"] == "mcp_approval_request"
    say = lambda yes, **more: {"type": "mcp_approval_response", "approval_request_id": asked["id"], "approve": yes, **more}
    for body in (dict(previous_response_id=r["id"], input=[say(True)]), dict(input=[{"role": "user", "content": "go"}, *r["output"], say(True)], store=False)):
        done = ask(s, tools=tools, **body)
        assert kinds(done) == ["mcp_call", "message"] and done["output"][0]["output"] == "echo: hello", done
        assert done["output"][0]["approval_request_id"] == asked["id"]
        ev = events_of(s, tools=tools, **body)
        assert plain(ev[-1]["response"]["output"]) == plain(done["output"])
        assert [e["type"] for e in ev[2:7]] == ["response.output_item.added", "response.mcp_call.in_progress", "response.mcp_call_arguments.delta",
                                                "response.mcp_call_arguments.done", "response.mcp_call.completed"]
    # arguments with line breaks, and some that are no object
    for text, result in (('{\n "text":\r\n "a\\nb"}', ("output", "echo: a\nb")), ("[1]", ("error", "not run: the arguments are no JSON object"))):
        items = [{"role": "user", "content": "go"}, dict(asked, arguments=text), say(True)]
        assert ask(s, tools=tools, input=items)["output"][1][result[0]] == result[1]
    # it has run: later turns do not run it again
    done = ask(s, tools=tools, previous_response_id=r["id"], input=[say(True)])
    after = ask(s, tools=tools, previous_response_id=done["id"], input="more")
    assert kinds(after) == ["reasoning", "mcp_approval_request"]
    calls = json.loads(call(s, "t", "calls"))["echo"]
    no = ask(s, tools=tools, previous_response_id=r["id"], input=[say(False, reason="too risky")])
    assert kinds(no) == ["message"] and json.loads(call(s, "t", "calls"))["echo"] == calls
    for item, param in ((dict(say(True), approval_request_id="mcpr_x_1"), "input[0].approval_request_id"), (dict(say(1)), "input[0]")):
        assert ask(s, 400, tools=tools, previous_response_id=r["id"], input=[item])["error"]["param"] == param
    for other in ([], [mcp(tools=["fail"])]):  # a call that this request would not allow
        assert ask(s, 400, tools=other, previous_response_id=r["id"], input=[say(True)])["error"]["param"] == "tools"


def test_mcp_refused(s):
    for tool, param in [(mcp("nobody"), "server_label"), ({"type": "mcp"}, "server_label"), (mcp(server_url="http://127.0.0.1/"), "server_url"),
                        (mcp(connector_id="x"), "connector_id"), (mcp(headers={"a": "b"}), "headers"), (mcp(authorization="x"), "authorization"),
                        (mcp(approval="perhaps"), "require_approval"), (mcp(approval={"never": 1}), "require_approval"), (mcp(tools=[1]), "allowed_tools")]:
        assert ask(s, 400, tools=[tool])["error"]["param"] == "tools[0]." + param, tool
    assert ask(s, 400, tools=[mcp(), mcp()])["error"]["param"] == "tools[1].server_label"
    assert ask(s, 400, max_tool_calls="x")["error"]["param"] == "max_tool_calls"
    assert ask(s, 400, tool_choice={"type": "mcp", "server_label": "t"})["error"]["param"] == "tool_choice.name"
    assert "t__nothing" in ask(s, 400, tool_choice={"type": "mcp", "server_label": "t", "name": "nothing"})["error"]["message"]
    chat = {"messages": [{"role": "user", "content": "go"}], "tools": [mcp()]}
    assert s.json("/v1/chat/completions", chat, 400)["error"]["param"] == "tools[0].type"
    for choice in ({"type": "mcp", "server_label": "t", "name": "echo"}, "required", {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "t"}]}):
        assert kinds(ask(s, tool_choice=choice)) == ["mcp_list_tools", "reasoning", "mcp_call", "message"], choice
    assert "mcp_call" not in kinds(ask(s, tool_choice="none"))
    hidden = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "t", "name": "echo"}]}
    tokens = lambda **more: s.json(RESP + "/input_tokens", {"input": "go", **more})["input_tokens"]
    assert tokens(tools=[mcp(tools=None)], tool_choice=hidden) == tokens(tools=[mcp()]) < tokens(tools=[mcp(tools=None)])
    assert tokens(tools=[mcp(tools={"read_only": True})]) == tokens(tools=[mcp(tools=["echo", "calls"])])


def test_items(s):
    """Calls of one round are one message of the model, as they were."""
    tokens = lambda items: s.json(RESP + "/input_tokens", {"input": [{"role": "user", "content": "go"}, *items]})["input_tokens"]
    done = lambda id, **more: dict({"type": "mcp_call", "id": id, "server_label": "t", "name": "echo", "arguments": "{}", "output": "out"}, **more)
    ran = lambda id: {"type": "function_call", "call_id": id, "name": "t__echo", "arguments": "{}"}
    out = lambda id: {"type": "function_call_output", "call_id": id, "output": "out"}
    one = tokens([ran("a"), ran("b"), out("a"), out("b")])
    two = tokens([ran("a"), out("a"), ran("b"), out("b")])
    assert one < two
    assert tokens([done("mcp_x_1r1"), done("mcp_x_2r1")]) == one and tokens([done("mcp_x_1r1"), done("mcp_x_2r2")]) == two
    assert tokens([done("a"), done("b")]) == two == tokens([done("mcp_x_1r1"), done("mcp_y_1r1")])
    assert tokens([done("a", output=None, error="out"), done("b")]) == two
    for bad in (done(1), done("a", server_label=None), done("a", output=3), done("a", arguments={})):
        assert s.json(RESP, {"input": [bad]}, 400)["error"]["param"] == "input[0]", bad


def test_mixed(s):
    own = {"type": "function", "name": "t__echo", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}
    for tools in ([own, mcp()], [mcp(), own]):
        r = ask(s, 200 if tools[0] is own else 400, tools=tools)
        if tools[0] is own:  # the model calls the client's, which has the name
            assert kinds(r) == ["mcp_list_tools", "reasoning", "function_call"] and r["output"][-1]["name"] == "t__echo", r
        else:
            assert "t__echo" in r["error"]["message"]
    ask_id = ask(s, background=True)["id"]
    while json.loads(s.get(RESP + "/" + ask_id)[2])["status"] in ("queued", "in_progress"):
        time.sleep(0.02)
    r = json.loads(s.get(RESP + "/" + ask_id)[2])
    assert r["status"] == "completed" and kinds(r) == ["mcp_list_tools", "reasoning", "mcp_call", "message"], r


def test_conversation(s):
    conv = s.json("/v1/conversations", {})["id"]
    tools = [mcp(approval="always")]
    asked = ask(s, tools=tools, conversation=conv)["output"][-1]
    yes = {"type": "mcp_approval_response", "approval_request_id": asked["id"], "approve": True}
    assert kinds(ask(s, tools=tools, conversation=conv, input=[yes])) == ["mcp_call", "message"]
    assert kinds(ask(s, tools=tools, conversation=conv, input="more")) == ["reasoning", "mcp_approval_request"]
    items = json.loads(s.get("/v1/conversations/%s/items?limit=100&order=asc" % conv)[2])["data"]
    assert [i["type"] for i in items] == ["message", "mcp_list_tools", "reasoning", "mcp_approval_request", "mcp_approval_response", "mcp_call", "message",
                                          "message", "reasoning", "mcp_approval_request"], items
    s.json("/v1/conversations/%s/items" % conv, {"items": [dict(yes, approval_request_id=items[-1]["id"])]})
    assert kinds(ask(s, tools=tools, conversation=conv, input="go on")) == ["mcp_call", "message"]


def test_bounds(*_):
    s = scripted("t__echo", {"text": "hello"}, {"t": program(), "dead": {"command": "no-such-program"}}, "--mcp-max-rounds", "3", thinks=script_model.THINKS_AGAIN)
    wait_state(s, "dead", "failed")
    r = ask(s)
    calls = [i for i in r["output"] if i["type"] == "mcp_call"]
    assert [c["status"] for c in calls] == ["completed"] * 3 + ["failed"] and "--mcp-max-rounds 3" in calls[3]["error"], r
    assert r["status"] == "incomplete" and r["incomplete_details"] == {"reason": "mcp_max_rounds"} and r["output"][-1] is calls[3]
    ev = events_of(s)
    assert ev[-1]["type"] == "response.incomplete" and plain(ev[-1]["response"]["output"]) == plain(r["output"])
    assert [e["type"] for e in ev].count("response.mcp_call.failed") == 1
    for most in (0, 2):
        calls = [i for i in ask(s, max_tool_calls=most)["output"] if i["type"] == "mcp_call"]
        assert [c["status"] for c in calls[:most + 1]] == ["completed"] * most + ["failed"] and "max_tool_calls" in calls[most]["error"], calls
    each = ask(s, max_tool_calls=0)["usage"]["output_tokens"] // 4
    r = ask(s, max_output_tokens=each * 2 + 3)
    assert r["status"] == "incomplete" and r["incomplete_details"] == {"reason": "max_output_tokens"} and r["usage"]["output_tokens"] == each * 2 + 3, r
    r = ask(s, max_output_tokens=each * 2)
    assert r["status"] == "incomplete" and r["usage"]["output_tokens"] == each * 2 and kinds(r)[-1] == "mcp_call" and r["output"][-1]["status"] == "completed"
    r = ask(s, max_output_tokens=each - 3)  # in the middle of the arguments
    assert kinds(r) == ["mcp_list_tools", "reasoning", "message"] and "<tool_call>" in r["output"][-1]["content"][0]["text"]
    ev = events_of(s, max_output_tokens=each - 3)  # a stream has begun the call
    cut = ev[-1]["response"]["output"][2]
    assert cut["type"] == "mcp_call" and cut["status"] == "incomplete" and cut["output"] is None and "incomplete" in cut["error"], cut
    assert ev[-1]["type"] == "response.incomplete" and "response.mcp_call.failed" in [e["type"] for e in ev]
    r = ask(s, tools=[mcp("dead", tools=None)])
    assert r["output"][0]["type"] == "mcp_list_tools" and "no-such-program" in r["output"][0]["error"] and r["output"][0]["tools"] == []
    assert "response.mcp_list_tools.failed" in [e["type"] for e in events_of(s, tools=[mcp("dead", tools=None)])]
    assert s.stop() == 0


def test_bad_tools(*_):
    """A tool that fails, a server that dies, a result that exceeds the context."""
    for tool, args, why in (("fail", {"text": "x"}, "it failed: x"), ("error", {}, "no such thing"), ("die", {}, "exit code 3")):
        s = scripted("t__" + tool, args, {"t": program()})
        r = ask(s, tools=[mcp(tools=[tool])])
        item = r["output"][2]
        assert item["status"] == "failed" and why in item["error"] and item["output"] is None and r["output"][3]["content"][0]["text"] == script_model.ANSWER, r
        wait_state(s, "t")
        assert "response.mcp_call.failed" in [e["type"] for e in events_of(s, tools=[mcp(tools=[tool])])]
        assert s.stop() == 0
    s = scripted("t__huge", {"bytes": 500000}, {"t": program()})
    assert ask(s, 400, tools=[mcp(tools=["huge"])])["error"]["code"] == "context_length_exceeded"
    ev = events_of(s, tools=[mcp(tools=["huge"])])
    assert [e["type"] for e in ev[-2:]] == ["error", "response.failed"] and ev[-1]["response"]["error"]["code"] == "context_length_exceeded"
    assert s.stop() == 0


def test_full(*_):
    """Other requests fill the queue during a call: the next round waits until there is room."""
    s = scripted("t__wait", {}, {"t": program()}, "-np", "1", "--max-queue", "1", "--log-level", "debug", "-c", "65536")
    out = []
    t = threading.Thread(target=lambda: out.append(ask(s, tools=[mcp(tools=["wait"])])))
    t.start()
    while "wait" not in json.loads(call(s, "t", "calls")):
        time.sleep(0.02)
    body = json.dumps({"prompt": "a", "max_tokens": 60000, "ignore_eos": True}).encode()
    others = []
    for key, value in (("steel_requests_running", 1), ("steel_requests_waiting", 1)):
        others.append(s.socket())
        others[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        s.wait_metric(key, value)
    call(s, "t", "go")
    s.wait_line("a round waits for the queue")
    assert not out
    for o in others:
        o.close()
    t.join()
    assert kinds(out[0]) == ["mcp_list_tools", "reasoning", "mcp_call", "message"]
    assert s.stop() == 0


def test_left(*_):
    s = scripted("t__hang", {}, {"t": program()})
    for stream in (False, True):
        n = len(json.loads(call(s, "t", "cancelled")))
        c = s.socket()
        body = json.dumps({"input": "go", "stream": stream, "tools": [mcp(tools=["hang"])]}).encode()
        c.sendall(b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        while json.loads(call(s, "t", "calls")).get("hang", 0) <= n:
            time.sleep(0.02)
        c.close()
        while len(json.loads(call(s, "t", "cancelled"))) <= n:
            time.sleep(0.02)
        s.wait_count("client left", n + 1)
    c = s.socket()
    c.sendall(b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    while json.loads(call(s, "t", "calls"))["hang"] < 3:
        time.sleep(0.02)
    s.proc.send_signal(signal.SIGINT)  # in the middle of a call
    s.wait_line("shutting down")
    assert s.stop(signal.SIGINT) == 130
    c.close()


def on_loop(f):
    """A test of Responses."""
    def run(*_):
        f(loop)
    run.__name__ = f.__name__
    return run


bare = Server(BUILD)
s = start({"t": program("ok", env={"GIVEN": "yes"}, cwd=TMP.name)}, env=dict(os.environ, SECRET="hidden"))
loop = scripted("t__echo", {"text": "hello"}, {"t": program()})
try:
    run_tests([test_tools, test_refused, test_environment, test_hostile_calls, test_late, test_modes, test_shutdown, test_http, test_config,
               *map(on_loop, [test_rounds, test_stream, test_approval, test_mcp_refused, test_items, test_mixed, test_conversation]), test_bounds, test_bad_tools, test_full, test_left],
              s, bare)
finally:
    assert s.stop() == 0 and bare.stop() == 0 and loop.stop() == 0

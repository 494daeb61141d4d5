"""Tools of MCP servers: GET /mcp/tools, POST /mcp/call and tools of type mcp in /v1/responses, against tests/mcp_server.py,
which also misbehaves."""
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(__file__))
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
    s.proc.send_signal(2), s.proc.send_signal(2)
    assert s.stop() == 130
    c.close()
    assert not alive(pid)
    while alive(child):  # it is in the group
        time.sleep(0.02)


def http_server(*mode):
    p = subprocess.Popen([sys.executable, SERVER, "--http", *mode], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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
    assert json.loads(call(s, "web", "ask"))[0] == {"id": "ask-0", "result": {}}
    call(s, "web", "more")  # told in the stream of the GET
    while "added0" not in tools(s, "web"):
        time.sleep(0.02)
    assert "forgotten" in call(s, "web", "forget", error=True)
    wait_state(s, "web")
    assert call(s, "web", "echo", {"text": "again"}) == "echo: again"
    assert s.stop() == 0
    assert "deleted True" in a.stderr.readline()
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


bare = Server(BUILD)
s = start({"t": program("ok", env={"GIVEN": "yes"}, cwd=TMP.name)}, env=dict(os.environ, SECRET="hidden"))
try:
    run_tests([test_tools, test_refused, test_environment, test_hostile_calls, test_late, test_modes, test_shutdown, test_http, test_config], s, bare)
finally:
    assert s.stop() == 0 and bare.stop() == 0

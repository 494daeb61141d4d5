#!/usr/bin/env python3
"""A small MCP server for tests, which also knows how to misbehave.

usage: mcp_server.py [MODE]          over stdin and stdout
       mcp_server.py --http [MODE]   over HTTP; prints its port
MODE: ok (default), old, dies, silent, badversion, banner, flood, pages, endless, many, longline, notools, nosse, redirect
"""
import http.server
import json
import os
import sys
import threading
import time

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOLS = {
    "echo": "Says the text again.", "fail": "Fails.", "slow": "Takes `seconds`.", "huge": "A result of `bytes`.",
    "image": "An image.", "environment": "Variables and descriptors.", "die": "Ends the process.", "hang": "Never replies.",
    "garbage": "Invalid JSON before the reply.", "wrong_id": "Replies with another id.", "flood": "Endless messages.",
    "ask": "Asks the client first.", "more": "Adds a tool.", "cancelled": "Which calls were cancelled.", "calls": "How often each tool was called.",
    "forget": "Forgets the session.", "error": "A protocol error.", "stderr": "Writes to stderr.", "child": "Starts a process that stays.",
    "wait": "Waits for `go`.", "go": "Lets `wait` return.",
}
READ_ONLY = ("echo", "calls")


class Session:
    """What a server knows of its client. send: writes a message to it."""

    def __init__(self, mode):
        self.mode, self.extra, self.cancelled, self.answers, self.calls = mode, [], [], [], {}
        self.lock = threading.Condition()

    def tools(self):
        names = list(TOOLS) + self.extra
        if self.mode == "many":
            names = ["tool%d" % i for i in range(1000)]
        return [{"name": n, "description": TOOLS.get(n, "one more"), "inputSchema": SCHEMA,
                 "annotations": {"readOnlyHint": n in READ_ONLY}} for n in names]

    def list(self, params):
        tools = self.tools()
        if self.mode == "endless":
            n = int(params.get("cursor", 0))
            return {"tools": [dict(tools[0], name="t%d" % n)], "nextCursor": str(n + 1)}
        if self.mode != "pages":
            return {"tools": tools}
        at = int(params.get("cursor", 0))
        page = {"tools": tools[at:at + 3]}
        if at + 3 < len(tools):
            page["nextCursor"] = str(at + 3)
        return page

    def call(self, name, args, send, id):
        """The result, or None if there is none."""
        text = lambda t, **more: {"content": [{"type": "text", "text": t}], **more}
        with self.lock:
            self.calls[name] = self.calls.get(name, 0) + 1
        if name == "echo" or name in self.extra:
            return text("echo: " + str(args.get("text", "")))
        if name == "fail":
            return text("it failed: " + str(args.get("text", "")), isError=True)
        if name == "slow":
            time.sleep(args.get("seconds", 0.2))
            return text("slow")
        if name == "wait":
            with self.lock:
                self.lock.wait_for(lambda: self.calls.get("go"))
            return text("waited")
        if name == "go":
            with self.lock:
                self.lock.notify_all()
            return text("gone")
        if name == "huge":
            return text("x" * args["bytes"])
        if name == "image":
            return {"content": [{"type": "text", "text": "a picture:"}, {"type": "image", "data": "AAAA", "mimeType": "image/png"},
                                {"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}},
                                {"type": "resource_link", "uri": "file:///b", "name": "b"}]}
        if name == "environment":
            return text(json.dumps({"env": dict(os.environ), "fds": sorted(int(f) for f in os.listdir("/proc/self/fd")),
                                    "cwd": os.getcwd(), "argv": sys.argv[1:], "pid": os.getpid(), "group": os.getpgid(0)}))
        if name == "die":
            os._exit(3)
        if name == "hang":
            return None
        if name == "garbage":
            send("this is { not JSON")
            send('{"jsonrpc":"2.0","id":{},"result":5}')
            send("[1,2,[3]]")
            return text("after garbage")
        if name == "wrong_id":
            send({"jsonrpc": "2.0", "id": id + 1000000, "result": text("for nobody")})
            send({"jsonrpc": "2.0", "id": str(id), "result": text("for nobody")})
            return None
        if name == "flood":
            while True:
                send({"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": "x" * 100}})
        if name == "ask":
            with self.lock:
                for i, method in enumerate(["ping", "sampling/createMessage", "roots/list", "elicitation/create"]):
                    send({"jsonrpc": "2.0", "id": "ask-%d" % i, "method": method, "params": {}})
                self.lock.wait_for(lambda: len(self.answers) >= 4)
            return text(json.dumps(self.answers))
        if name == "more":
            self.extra.append("added%d" % len(self.extra))
            self.announce(send)
            return text("added")
        if name == "cancelled":
            return text(json.dumps(self.cancelled))
        if name == "calls":
            return text(json.dumps(self.calls))
        if name == "stderr":
            sys.stderr.write(str(args.get("text", "")) + "\n")
            sys.stderr.flush()
            return text("written")
        if name == "child":
            pid = os.fork()
            if not pid:
                for fd in (0, 1, 2):
                    os.close(fd)
                time.sleep(3600)
            return text(str(pid))
        return text("?")

    def announce(self, send):
        send({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})

    def handle(self, m, send):
        """Takes a message; sends the reply, if there is one."""
        method, id, params = m.get("method"), m.get("id"), m.get("params") or {}
        reply = lambda result: send({"jsonrpc": "2.0", "id": id, "result": result})
        if method is None:
            with self.lock:
                self.answers.append({k: m[k] for k in ("id", "result", "error") if k in m})
                self.lock.notify_all()
        elif method == "initialize":
            if self.mode == "silent":
                return
            assert params["protocolVersion"] == "2025-06-18" and params["clientInfo"]["name"] == "steel", params
            version = {"old": "2024-11-05", "badversion": "1999-01-01"}.get(self.mode, "2025-06-18")
            reply({"protocolVersion": version, "capabilities": {} if self.mode == "notools" else {"tools": {"listChanged": True}},
                   "serverInfo": {"name": "test", "version": "1"}})
        elif method == "notifications/cancelled":
            self.cancelled.append(params["requestId"])
        elif method == "tools/list":
            reply(self.list(params))
        elif method == "tools/call" and params["name"] == "error":
            send({"jsonrpc": "2.0", "id": id, "error": {"code": -32602, "message": "no such thing"}})
        elif method == "tools/call":
            result = self.call(params["name"], params.get("arguments", {}), send, id)
            if result is not None:
                reply(result)


def stdio(mode):
    lock = threading.Lock()

    def send(m):
        with lock:
            sys.stdout.write((m if isinstance(m, str) else json.dumps(m)) + "\n")
            sys.stdout.flush()
    if mode == "dies":
        sys.stderr.write("no reason to live\n")
        sys.exit(7)
    if mode == "banner":
        send("Welcome to the test server!")
    session = Session(mode)
    while mode == "flood":
        send({"jsonrpc": "2.0", "method": "notifications/message"})
    if mode == "longline":
        while True:
            sys.stdout.write("x" * 65536)
    for line in sys.stdin:
        m = json.loads(line)
        if m.get("method") == "tools/call":  # calls run side by side
            threading.Thread(target=session.handle, args=(m, send), daemon=True).start()
        else:
            session.handle(m, send)


class Http(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    sessions, streams, seen, mode = {}, [], [], "ok"

    def log_message(self, *args):
        pass

    def reply(self, status, body=b"", **headers):
        self.send_response(status)
        for k, v in headers.items():
            self.send_header(k.replace("_", "-"), v)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def session(self):
        return self.sessions.get(self.headers.get("Mcp-Session-Id"))

    def do_DELETE(self):
        known = self.sessions.pop(self.headers.get("Mcp-Session-Id"), None)
        sys.stderr.write("deleted %s\n" % bool(known))
        sys.stderr.flush()
        self.reply(200 if known else 404)

    def do_GET(self):
        if self.mode == "nosse" or not self.session():
            return self.reply(405)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b": hello\n\n")
        self.wfile.flush()
        self.streams.append(self.wfile)
        while self.wfile in self.streams:
            time.sleep(0.05)

    def do_POST(self):
        m = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        session = self.session()
        if self.mode == "redirect":
            return self.reply(307, Location="http://127.0.0.1:1/elsewhere")
        if self.headers.get("X-Test") != "secret":
            return self.reply(401, b"no key")
        assert "application/json" in self.headers["Accept"] and "text/event-stream" in self.headers["Accept"]
        if m.get("method") == "initialize":
            session = Session(self.mode)
            id = "session-%d" % len(self.sessions)
            self.sessions[id] = session
            out = []
            session.handle(m, out.append)
            return self.reply(200, json.dumps(out[0]).encode(), Content_Type="application/json", Mcp_Session_Id=id)
        if not session:
            return self.reply(404, b"no such session")
        assert self.headers["MCP-Protocol-Version"] == "2025-06-18", self.headers
        if m.get("method") == "notifications/initialized":
            time.sleep(0.2)
            session.initialized = True
        elif not getattr(session, "initialized", False):
            return self.reply(400, b"not initialized yet")
        if "id" not in m or "method" not in m:
            session.handle(m, None)
            return self.reply(202)
        if m["method"] == "tools/call" and m["params"]["name"] == "forget":
            self.sessions.clear()
            return self.reply(404, b"forgotten")
        if m["method"] == "tools/call" and m["params"]["name"] == "die":
            return self.reply(500, b"broken")
        if self.mode == "nosse":
            out = []
            session.handle(m, out.append)
            return self.reply(200, json.dumps(out[-1] if out else {}).encode(), Content_Type="application/json; charset=utf-8")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        lock = threading.Lock()

        def send(message):
            text = message if isinstance(message, str) else json.dumps(message)
            with lock:
                for piece in ("event: message\r\n", "data: " + text[:7], text[7:] + "\r\n\r\n"):
                    self.wfile.write(piece.encode())
                    self.wfile.flush()
        session.announce = lambda _: [w.write(b'data: {"jsonrpc":"2.0","method":"notifications/tools/list_changed"}\n\n') and w.flush() for w in self.streams]
        session.handle(m, send)
        self.close_connection = True


def serve(mode):
    Http.mode = mode
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Http)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    args = sys.argv[1:]
    web = args[:1] == ["--http"]
    (serve if web else stdio)((args[web:] or ["ok"])[0])

"""A server that plays the Hub for tests: lists of files, redirects to a file store, and what can go wrong."""
import hashlib
import http.server
import json
import re
import socket
import threading
import urllib.parse

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """The Hub on one port and its file store on another; `plan` says what goes wrong, by path."""

    def __init__(self):
        self.repos, self.log, self.plan, self.token = {}, [], {}, None
        self.sent = 0  # bytes of heads
        self.stalled, self.go_on = threading.Event(), threading.Event()
        self.api, self.store = [self.serve(h) for h in (self.answer, self.give)]
        self.url = f"http://127.0.0.1:{self.api}"

    def serve(self, handle):
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                handle(self)

            def log_message(self, *a):
                pass
        s = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        s.daemon_threads = True
        s.handle_error = lambda *a: None  # a client that leaves is no news
        threading.Thread(target=s.serve_forever, daemon=True).start()
        return s.server_address[1]

    def add(self, repo, files, small=()):
        self.repos[repo] = dict(files)
        self.small = set(small)

    def reply(self, h, status, body=b"", **headers):
        h.send_response(status)
        for k, v in headers.items():
            h.send_header(k.replace("_", "-"), v)
        h.send_header("Content-Length", str(len(body)))
        h.end_headers()
        h.wfile.write(body)

    def entry(self, name, data):
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        e = {"rfilename": name, "size": len(data), "blobId": blob}
        if name.endswith((".gguf", ".safetensors")):
            e["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return e

    def misbehave(self, h, kind):
        """Whether the next thing planned for this kind of request was done."""
        todo = self.plan.get(kind)
        if not todo:
            return None
        what = todo.pop(0)
        if isinstance(what, int):
            self.reply(h, what, b"refused", **({"Retry_After": "1"} if what == 429 else {}))
            return True
        return what

    def answer(self, h):
        path = urllib.parse.urlparse(h.path).path
        self.log.append((path, h.headers.get("Range"), h.headers.get("Authorization")))
        if self.token and h.headers.get("Authorization") != "Bearer " + self.token:
            return self.reply(h, 401)
        m = re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path)
        if m:
            if self.misbehave(h, "api"):
                return None
            files = self.repos.get(m.group(1))
            if files is None or m.group(2) not in ("main", SHA):
                return self.reply(h, 404)
            siblings = [self.entry(n, d) for n, d in files.items()] + self.plan.get("more", [])
            return self.reply(h, 200, json.dumps({"id": m.group(1), "sha": SHA, "siblings": siblings}).encode())
        m = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if not m or m.group(2) != SHA:
            return self.reply(h, 404)
        return self.reply(h, 302, Location=f"http://127.0.0.1:{self.store}/{m.group(1)}/{m.group(3)}?signed=1")

    def give(self, h):
        path = urllib.parse.unquote(urllib.parse.urlparse(h.path).path)
        self.log.append(("store " + path, h.headers.get("Range"), h.headers.get("Authorization")))
        owner, name, file = path[1:].split("/", 2)
        data = self.repos[owner + "/" + name][file]
        wrong = self.misbehave(h, "store")
        if wrong is True:
            return None
        if wrong == "bytes":
            data = data[:-1] + bytes([data[-1] ^ 1])
        if wrong == "more":
            data += b"x"
        head = re.fullmatch(r"bytes=0-(\d+)", h.headers.get("Range") or "")
        if head and wrong != "no range":
            part = data[:int(head.group(1)) + 1]
            self.sent += len(part)
            return self.reply(h, 206, part, Content_Range=f"bytes 0-{len(part) - 1}/{len(data)}")
        begin = re.fullmatch(r"bytes=(\d+)-", h.headers.get("Range") or "")
        at = int(begin.group(1)) if begin and wrong != "no range" else 0
        h.send_response(206 if at else 200)
        if at:
            h.send_header("Content-Range", f"bytes {at}-{len(data) - 1}/{len(data)}")
        h.send_header("Content-Length", str(len(data) - at))
        h.end_headers()
        if wrong == "cut":
            h.wfile.write(data[at:at + (len(data) - at) // 2])
            h.wfile.flush()
            h.close_connection = True
            h.connection.shutdown(socket.SHUT_RDWR)
            return None
        if wrong == "stall":
            h.wfile.write(data[:1000])
            h.wfile.flush()
            self.stalled.set()
            return self.go_on.wait()
        h.wfile.write(data[at:])
        return None

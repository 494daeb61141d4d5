#!/usr/bin/env python3
"""Images at http URLs (--allow-image-origins): fetched from allowed origins alone, with the answer that the same bytes give; refused
in words: other origins, redirects to them, names with private addresses, broken answers, too many bytes, endless redirects."""
import base64
import http.server
import os
import select
import socket
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from serverlib import Server, http_request, run_tests  # noqa
from vision_model import make  # noqa

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
FOLDER = make(os.path.join(BUILD, "tests/vision-model-fetch"))
PNG = open("tests/golden_images/qwen3_vl/a.png", "rb").read()
SAME = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
asked = []
go = threading.Event()  # /slow waits for it


class Web(http.server.BaseHTTPRequestHandler):
    """Pictures, and answers that are none."""

    def do_GET(self):
        asked.append((self.path, dict(self.headers)))
        to = {"/away": "http://example.invalid/a.png", "/here": f"http://{self.headers['Host']}/a.png", "/round": "/round",
              "/file": "file:///etc/passwd", "/inside": f"http://{NAME}:{PORT}/a.png"}.get(self.path)
        if to:
            self.send_response(302)
            self.send_header("Location", to)
            self.end_headers()
        elif self.path == "/slow":
            go.wait(300)
            self.send_response(404)
            self.end_headers()
        elif self.path == "/half":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(bytes(17 << 20))
        elif self.path == "/large":
            self.send_response(200)
            self.send_header("Content-Length", str(100 << 20))
            self.end_headers()
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(bytes(1 << 20))
            except OSError:
                pass
        else:
            ok = self.path == "/a.png"
            self.send_response(200 if ok else 404)
            self.end_headers()
            self.wfile.write(PNG if ok else b"no")

    def log_message(self, *args):
        pass


web = http.server.ThreadingHTTPServer(("", 0), Web)
PORT = web.server_address[1]
threading.Thread(target=web.serve_forever, daemon=True).start()
ORIGIN = f"http://127.0.0.1:{PORT}"
NAME = socket.gethostname()  # of a private address, on most machines


def ask(s, url, status=200):
    r = s.json("/v1/chat/completions", {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]}], **SAME}, status)
    return r["choices"][0]["message"]["content"] if status == 200 else r["error"]["message"]


def refuse(s, url, words, n_asked):
    del asked[:]
    said = ask(s, url, 400)
    assert said.startswith("messages[0].content[0]: ") and words in said, said
    assert len(asked) == n_asked, (url, asked)


def test_fetch(s):
    want = ask(s, "data:image/png;base64," + base64.b64encode(PNG).decode())
    for path in "/a.png", "/here":
        del asked[:]
        assert ask(s, ORIGIN + path) == want
        for name in "Cookie", "Authorization", "Referer":
            assert name not in asked[0][1], asked
    r = s.json("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": ORIGIN + "/a.png"}]}],
                                 "max_output_tokens": 16})
    assert r["usage"]["input_tokens"] > 20
    r = s.json("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "url", "url": ORIGIN + "/a.png"}}]}]})
    assert r["usage"]["input_tokens"] + r["usage"]["cache_read_input_tokens"] > 20


def test_refused(s):
    refuse(s, "http://example.org/a.png", "http://example.org is not one of --allow-image-origins", 0)
    refuse(s, f"https://127.0.0.1:{PORT}/a.png", "is not one of --allow-image-origins", 0)
    refuse(s, f"http://127.0.0.1:{PORT + 1}/a.png", "is not one of --allow-image-origins", 0)
    for bad in (f"http://user@127.0.0.1:{PORT}/a.png", f"http://127.0.0.1:{PORT}\\@x/a.png", "ftp://127.0.0.1/a.png", "file:///etc/passwd",
                "http:///a.png", f"http://127.0.0.1:{PORT}/a b.png"):
        refuse(s, bad, "the image's URL is not http://host/... or https://host/...", 0)
    refuse(s, ORIGIN + "/away", "the image was redirected: http://example.invalid is not one of --allow-image-origins", 1)
    refuse(s, ORIGIN + "/file", "the image's URL is not http://host/... or https://host/...", 1)
    refuse(s, ORIGIN + "/round", "the image was redirected more than 3 times", 4)
    refuse(s, ORIGIN + "/none", "it answers 404", 1)
    refuse(s, ORIGIN + "/large", "has more than 33554432 bytes", 1)
    refuse(s, ORIGIN + "/endless", "has more than 33554432 bytes", 1)


def test_together(s):
    """The images of a request share one bound of bytes."""
    part = {"type": "image_url", "image_url": {"url": ORIGIN + "/half"}}
    r = s.json("/v1/chat/completions", {"messages": [{"role": "user", "content": [part, part]}], **SAME}, 400)["error"]["message"]
    assert r.startswith("messages[0].content[1]: ") and "and those before it have more than 33554432 bytes" in r, r


def test_slow(s):
    """Whose images do not come waits alone: not the text of his own, and another client's images have workers, too."""
    def begin(body, source):
        c = socket.create_connection(("127.0.0.1", s.port), source_address=(source, 0))
        c.sendall(http_request("/v1/chat/completions", {**body, **SAME}, "Connection: close\r\n"))
        return c
    picture = lambda url: {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    data = "data:image/png;base64," + base64.b64encode(PNG).decode()
    for _ in range(5):  # a fetch ends after 20 s in any case: a try that took longer tells nothing
        del asked[:]
        start = time.monotonic()
        waiting = [begin(picture(ORIGIN + "/slow"), "127.0.0.2") for _ in range(20)]
        while not asked:
            time.sleep(0.01)
        for body, source in (({"messages": [{"role": "user", "content": "text"}]}, "127.0.0.2"), ({"messages": [{"role": "user", "content": "text"}]}, "127.0.0.3"),
                             (picture(data), "127.0.0.3"), (picture(ORIGIN + "/a.png"), "127.0.0.3")):
            with begin(body, source) as c:
                assert c.recv(15) == b"HTTP/1.1 200 OK"
        n_slow, ended = sum(path == "/slow" for path, _ in asked), select.select(waiting, [], [], 0)[0]
        for c in waiting[10:]:  # these leave
            c.close()
        if time.monotonic() - start < 15:
            break
        for c in waiting:
            c.close()
    assert n_slow < 20 and not ended, (n_slow, ended)
    go.set()
    for c in waiting[:10]:
        reply = c.makefile("rb").read()
        assert b"it answers 404" in reply or b"takes more than 20 s" in reply, reply
        c.close()
    s.wait_metric('steel_jobs{state="slow"}', 0)


def test_private(s):
    """A name of the list whose address is private is refused when the connection is made; so is a redirect there."""
    address = socket.gethostbyname(NAME)
    if not address.startswith(("127.", "10.", "192.168.", "172.")):
        print(f"skipped: {NAME} has the address {address}")
        return
    refuse(s, f"http://{NAME}:{PORT}/a.png", "has a private address", 0)
    refuse(s, ORIGIN + "/inside", "has a private address", 1)


def test_options(s):
    for bad in "example.org", "http://*", "http://a b", "http://a/":
        p = subprocess.run([BUILD + "/steel", "serve", FOLDER, "--allow-image-origins", bad], capture_output=True, text=True)
        assert p.returncode == 2 and "--allow-image-origins " + bad in p.stderr, p
    assert s.stop() == 0, s.log()[-2000:]


run_tests([test_fetch, test_refused, test_together, test_slow, test_private, test_options],
          Server(BUILD, "--allow-image-origins", ORIGIN.upper().replace("HTTP", "http"), "--allow-image-origins", f"http://{NAME}:{PORT}",
                 model=FOLDER))

"""Hostile clients that try to cause much work with little data. Each of these requests once stopped the server. They come from
127.0.0.2, so that the server can separate them from others. Used by bench/load.py --hostile."""
import json
import random
import socket
import struct
import threading
import time

CHAT, COMP, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
FROM = "127.0.0.2"


def request(path, body, extra=""):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n{extra}\r\n").encode() + data


def bodies():
    """Names and bytes of requests that are sent whole."""
    user = {"role": "user", "content": "hi"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": "x"}
    letters = "".join(chr(97 + i * 7 % 26) for i in range(5000))
    close = "Connection: close\r\n"
    return {
        "65,536 system messages": request(CHAT, {"messages": [{"role": "system", "content": "x"}] * 65536 + [user], "max_tokens": 1}, close),
        "16,384 tool calls": request(CHAT, {"messages": [user, {"role": "assistant", "content": None, "tool_calls": [call] * 16384}]
                                            + [result] * 16384, "max_tokens": 1}, close),
        "1.4 MB of text": request(TOKENIZE, {"content": letters * 280}, close),
        "30 MB of {},": request(CHAT, b'{"messages":[' + b"{}," * 10000000 + b"{}]}", close),
        "30 MB of text": request(TOKENIZE, {"content": letters * 6000}, close),
        "64 answers with log-probabilities": request(CHAT, {"messages": [user], "n": 64, "max_tokens": 200, "ignore_eos": True,
                                                             "logprobs": True, "top_logprobs": 20}, close),
        "logit_bias": request(COMP, {"prompt": "x", "n": 64, "max_tokens": 200, "ignore_eos": True,
                                     "logit_bias": {str(i): 1 for i in range(280)}}, close),
        "another host": request(COMP, {"prompt": "x"}, close).replace(b"localhost", b"evil.example"),
        "junk after a chunk size": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5 x\r\n",
    }


class Guest(threading.Thread):
    def __init__(self, port, number, stop, ready, counts, lock):
        super().__init__()
        self.port, self.stop, self.ready, self.counts, self.lock = port, stop, ready, counts, lock
        self.rng, self.held = random.Random(number), []

    def dial(self):
        c = socket.create_connection(("127.0.0.1", self.port), source_address=(FROM, 0))
        c.settimeout(max(0.1, self.stop - time.time()))
        return c

    def whole(self, data):
        """Sends a request and reads the response; one client in three leaves in the middle."""
        with self.dial() as c:
            c.sendall(data)
            if self.rng.random() < 0.33:
                c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            while c.recv(1 << 20):
                pass

    def half_body(self):
        c = self.dial()
        self.held = self.held[-3:] + [c]
        c.sendall(request(CHAT, b"x" * (30 << 20))[: 8 << 20])

    def trickle(self):
        with self.dial() as c:
            c.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
            for _ in range(50):
                c.sendall(b"x")
                time.sleep(0.02)

    def ahead(self):
        with self.dial() as c:
            c.sendall(request(COMP, {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}))
            c.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5000)

    def unread(self):
        c = self.dial()
        c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        self.held = self.held[-3:] + [c]
        c.sendall(self.ready["64 answers with log-probabilities"])

    def run(self):
        acts = [(name, lambda d=data: self.whole(d)) for name, data in self.ready.items()]
        acts += [("half a body", self.half_body), ("a trickle", self.trickle), ("much sent ahead", self.ahead), ("replies left unread", self.unread)]
        while time.time() < self.stop:
            name, act = self.rng.choice(acts)
            try:
                act()
            except OSError:
                pass  # the server may disconnect any client
            with self.lock:
                self.counts[name] = self.counts.get(name, 0) + 1
        for c in self.held:
            c.close()


def main(port, n, seconds, seed, counts):
    ready, lock = bodies(), threading.Lock()
    stop, mine = time.time() + seconds, {}
    guests = [Guest(port, seed * 1000 + i, stop, ready, mine, lock) for i in range(n)]
    for g in guests:
        g.start()
    for g in guests:
        g.join()
    counts.update(mine)

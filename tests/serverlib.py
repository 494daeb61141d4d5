"""A running `steel serve` for tests, and small HTTP clients over bare sockets."""
import atexit
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time


# Seconds after which a wait is taken for a hang. No assertion in the tests is about speed: machines may be busy.
HANG = 300
HEALTHY = b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\nContent-Type: application/json\r\n\r\n{"status":"ok"}'


def sanitized(build):
    """Whether the binary has a sanitizer, which keeps what is freed: its memory says nothing."""
    with open(os.path.join(build, "steel"), "rb") as f:
        return bool(re.search(rb"__[at]san_init", f.read()))


def leak_env():
    """What a program's environment has for its leaks to be told at its end, with exit code 99. None without LeakSanitizer."""
    found = subprocess.run(["gcc", "-print-file-name=liblsan.so"], capture_output=True, text=True).stdout.strip() if shutil.which("gcc") else ""
    if not os.path.isfile(found):
        return None
    rules = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lsan.supp")
    return {"LD_PRELOAD": found, "LSAN_OPTIONS": f"exitcode=99:suppressions={rules}:print_suppressions=0"}


class Server:
    def __init__(self, build, *flags, model=None, env=None, wait=True, launch=(), steel=None):
        """launch: what starts it, as mpirun and its options. steel: what stands for the program."""
        self.dir = tempfile.TemporaryDirectory(prefix="steel-test-")
        if model is None:
            model = os.path.join(self.dir.name, "toy.gguf")
            subprocess.run([os.path.join(build, "tests/toy_gguf"), model], check=True)
        # STEEL_TEST_DEVICE=cuda: the same tests on a GPU, which does not promise the same bytes in any company.
        device = os.environ.get("STEEL_TEST_DEVICE")
        cmd = [*launch, steel or os.path.join(build, "steel"), "serve", model, "--port", "0", "-t", "1",
               *(["--device", device] if device else ["--deterministic"]), *flags]
        self._start(cmd, env, wait)

    def _start(self, cmd, env, wait):
        self.proc = subprocess.Popen(cmd, stderr=subprocess.PIPE, text=True, env=env)
        atexit.register(self.proc.kill)  # a test that failed leaves it running
        self.lines, self.cond = [], threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        self.port = int(re.search(r"://[^ \"]*:(\d+)", self.wait_line("listening")).group(1))
        if wait:
            self.wait_line("ready")

    def _read(self):
        for line in self.proc.stderr:
            with self.cond:
                self.lines.append(line.rstrip("\n"))
                self.cond.notify_all()
        with self.cond:
            self.lines.append(None)
            self.cond.notify_all()

    def wait_line(self, text):
        """The first log line that contains text."""
        with self.cond:
            at = 0
            while True:
                while at < len(self.lines):
                    if self.lines[at] is None:
                        raise AssertionError("the server ended:\n" + self.log())
                    if text in self.lines[at]:
                        return self.lines[at]
                    at += 1
                assert self.cond.wait(HANG), f"no line with '{text}':\n{self.log()}"

    def wait_count(self, text, n):
        """Until n log lines contain text."""
        with self.cond:
            while sum(text in l for l in self.lines if l) < n:
                assert self.cond.wait(HANG), f"not {n} lines with '{text}':\n{self.log()}"

    def log(self):
        """What has been read so far: a line may come later than the reply that it is about."""
        return "\n".join(l for l in self.lines if l is not None)

    def whole_log(self):
        """Of a server that has ended."""
        with self.cond:
            while self.lines[-1:] != [None]:
                assert self.cond.wait(HANG), self.log()
        return self.log()

    def request(self, method, path, body=None, headers=None):
        """(status, headers, text) of one request on a connection of its own."""
        c = http.client.HTTPConnection("127.0.0.1", self.port)
        if isinstance(body, (dict, list)):
            body = json.dumps(body)
        c.request(method, path, body, headers or {})
        r = c.getresponse()
        text = r.read().decode()
        c.close()
        return r.status, dict((k.lower(), v) for k, v in r.getheaders()), text

    def get(self, path, **kw):
        return self.request("GET", path, **kw)

    def post(self, path, body, **kw):
        return self.request("POST", path, body, **kw)

    def json(self, path, body, status=200, **kw):
        got, _, text = self.post(path, body, **kw)
        assert got == status, f"{path} {str(body)[:200]}: {got}, wanted {status}: {text[:500]}"
        return json.loads(text)

    def stream(self, path, body):
        """The data of each event of a stream, '[DONE]' included."""
        body = dict(body, stream=True)
        status, headers, text = self.post(path, body)
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), text
        assert text.endswith("\n\n")
        return [e[6:] for e in text[:-2].split("\n\n") if not e.startswith(":")]

    def socket(self):
        s = socket.create_connection(("127.0.0.1", self.port))
        return s

    def send(self, data, read=True):
        """Raw bytes; all that comes back until the server closes."""
        s = self.socket()
        s.sendall(data)
        out = b""
        while read:
            try:
                piece = s.recv(65536)
            except ConnectionResetError:
                break
            if not piece:
                break
            out += piece
        s.close()
        return out

    def metrics(self):
        out = {}
        for line in self.get("/metrics")[2].splitlines():
            if not line.startswith("#"):
                key, value = line.rsplit(" ", 1)
                out[re.sub(r'\{\}$', "", re.sub(r'model_name="[^"]*",?', "", key))] = float(value)
        return out

    def wait_metric(self, key, value):
        """Until a metric has a value; a wrong value for ever is a hang, seen by the runner."""
        while self.metrics()[key] != value:
            time.sleep(0.01)

    def rss_kb(self):
        with open(f"/proc/{self.proc.pid}/status") as f:
            return int(re.search(r"VmRSS:\s+(\d+)", f.read()).group(1))

    def stop(self, sig=signal.SIGTERM):
        self.proc.send_signal(sig)
        rc = self.proc.wait()
        self.dir.cleanup()
        return rc


class Gateway(Server):
    """A running `steel route` in front of servers (or ports)."""

    def __init__(self, build, upstreams, *flags, env=None, wait=True):
        self.dir = tempfile.TemporaryDirectory(prefix="steel-test-")
        urls = [u if isinstance(u, str) else f"http://127.0.0.1:{getattr(u, 'port', u)}" for u in upstreams]
        cmd = [os.path.join(build, "steel"), "route", "--port", "0"]
        for url in urls:
            cmd += ["--upstream", url]
        self._start(cmd + list(flags), env, wait)

    def stop(self, sig=signal.SIGTERM):
        rc = super().stop(sig)
        assert rc == (130 if sig == signal.SIGINT else 0), (rc, self.log()[-3000:])
        return rc


class Fake:
    """A server of one's own. answer(request, conn) returns bytes to send (then the connection is closed unless
    keep), or has sent what it wanted and returns None. A GET of a quiet path gets `healthy` and is not recorded."""

    def __init__(self, answer, healthy=HEALTHY, keep=False,
                 quiet=(b"/health", b"/v1/models", b"/metrics")):
        self.answer, self.healthy, self.keep, self.quiet, self.seen, self.lock = answer, healthy, keep, quiet, [], threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                c, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(c,), daemon=True).start()

    def _serve(self, c):
        try:
            data = b""
            while True:
                while b"\r\n\r\n" not in data:
                    piece = c.recv(65536)
                    if not piece:
                        return
                    data += piece
                head, _, data = data.partition(b"\r\n\r\n")
                m = re.search(rb"(?i)content-length: *(\d+)", head)
                n = int(m.group(1)) if m else 0
                while len(data) < n:
                    data += c.recv(65536)
                body, data = data[:n], data[n:]
                if head.startswith(tuple(b"GET %s " % path for path in self.quiet)):
                    c.sendall(self.healthy)
                    continue
                with self.lock:
                    self.seen.append((head, body))
                out = self.answer(head, c)
                if out is not None:
                    c.sendall(out)
                if not self.keep:
                    return
        except OSError:
            pass
        finally:
            c.close()

    def close(self):
        self.listener.close()


def http_request(path, body, extra=""):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n{extra}\r\n").encode() + data


def bodies(n, longer):
    """Completions of n kinds; the prompts of some are longer."""
    for i in range(n):
        body = {"prompt": "the quick brown fox %d jumps over" % i * (1 + longer * (i % 3)), "max_tokens": 20 + 3 * i, "seed": i,
                "temperature": i % 3 * 0.7, "ignore_eos": True}
        if i % 4 == 1:
            body["stop"] = ["a", "e"]
        if i % 4 == 2:
            body["logprobs"] = 2
        if i % 4 == 3:
            body.update(n=2, frequency_penalty=0.5)
        yield body


def fim_model(server, path, names, keys=()):
    """The toy of a server with tokens 264, 265, ... renamed; keys: metadata that names them instead."""
    from gguf_tools import Gguf, write_gguf
    toy = Gguf(os.path.join(server.dir.name, "toy.gguf"))
    for i, name in enumerate(names):
        toy.meta["tokenizer.ggml.tokens"][264 + i] = name
    for i, key in enumerate(keys):
        toy.meta[f"tokenizer.ggml.{key}_token_id"] = 264 + i
    write_gguf(path, toy.meta, [(name, *t) for name, t in toy.tensors.items()])
    return path


def run_tests(functions, *args):
    failed = 0
    for f in functions:
        t = time.time()
        try:
            f(*args)
            print(f"ok    {f.__name__}  {time.time() - t:.2f}s", flush=True)
        except Exception:
            import traceback
            traceback.print_exc()
            print(f"FAIL  {f.__name__}", flush=True)
            failed += 1
    print(f"{len(functions) - failed} of {len(functions)} passed")
    sys.exit(1 if failed else 0)

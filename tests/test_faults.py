#!/usr/bin/env python3
"""Everything fails once: the k-th allocation (alone, and eight in a row), read, write, accept or thread start
(tests/faults.c), with k walked through a run, a server's start and shutdown, a chat and a stream. A run ends with
code 0 or with 1 and one line; a server ends likewise while it starts, and later goes on: the request gets its whole
answer, an error in words, or a connection that is cut, never a wrong or half answer that looks whole; the next
request is served as ever. Then a server is starved of memory.
usage: test_faults.py BUILD [all]: without "all" a sample of each walk."""
import ctypes, json, mmap, os, re, resource, signal, socket, subprocess, sys, tempfile, threading, time

sys.path.insert(0, os.path.dirname(__file__))
from serverlib import HANG, Server

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
ALL = len(sys.argv) > 2
STEEL = os.path.join(BUILD, "steel")
KINDS = ["alloc", "read", "write", "accept", "thread"]
SAMPLE = {"run": 20, "serve": 20, "chat": 50, "stream": 50}  # of allocations; a quarter of that of the others
WORDS = {"temperature": 0, "max_tokens": 12, "messages": [{"role": "user", "content": "Tell me a story, and a joke."}]}


class Control(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("at", ctypes.c_int), ("row", ctypes.c_int), ("n_failed", ctypes.c_int),
                ("count", ctypes.c_int * len(KINDS))]


class Faults:
    """The memory shared with tests/faults.so."""

    def __init__(self, folder):
        self.path = os.path.join(folder, "faults")
        open(self.path, "wb").write(bytes(4096))
        self.file = open(self.path, "r+b")
        self.control = Control.from_buffer(mmap.mmap(self.file.fileno(), 4096))
        asan = "verify_asan_link_order=0:allocator_may_return_null=1:exitcode=99"
        self.env = dict(os.environ, STEEL_FAULTS=self.path, LD_PRELOAD=os.path.abspath(BUILD + "/tests/faults.so"),
                        ASAN_OPTIONS=asan, TSAN_OPTIONS="exitcode=99")

    def arm(self, kind, at):
        c = self.control
        c.at = c.n_failed = 0
        c.row = 7 if kind == "allocs" else 0
        c.kind = KINDS.index(kind.removesuffix("s"))
        for i in range(len(KINDS)):
            c.count[i] = 0
        c.at = at

    def disarm(self):
        self.control.at = 0
        return self.control.n_failed

    def counts(self):
        return dict(zip(KINDS, self.control.count))


def ks(what, kind, n):
    """Which of n faults to try."""
    most = n if ALL else SAMPLE[what] if kind == "alloc" else SAMPLE[what] // 4
    return range(1, n + 1) if n <= most else sorted({1 + i * n // most for i in range(most)})


def walk(faults, what, once, counts):
    """once(kind, k): what came of it, or an AssertionError."""
    counts["allocs"] = counts["alloc"]
    for kind in [*KINDS, "allocs"]:
        seen = {}
        tried = hit = 0
        for k in ks(what, kind, counts[kind]):
            faults.arm(kind, k)
            outcome = once(kind, k)
            hit += faults.disarm()
            tried += 1
            seen[outcome] = seen.get(outcome, 0) + 1
        if tried:
            print(f"{what}: {tried} of {counts[kind]} x {kind} ({hit} failed): {seen}", flush=True)


def describe(what, kind, k, text):
    return f"{what}: {kind} {k} failed: {text}"


def is_sanitizers_own(text):
    """Its threads allocate before they are anybody's."""
    return "Sanitizer: CHECK failed" in text and "pthread_getattr_np" in text


# A run

def walk_run(faults, model):
    cmd = [STEEL, "run", model, "-p", "Once", "-n", "5", "-t", "2", "--temp", "0", "--device", "cpu"]

    def run():
        p = subprocess.run(cmd, env=faults.env, capture_output=True, timeout=HANG)
        return p.returncode, p.stdout.decode(), p.stderr.decode()

    faults.arm("alloc", 0)
    code, good, err = run()
    assert code == 0, err
    counts = faults.counts()

    def once(kind, k):
        code, out, err = run()
        where = describe("run", kind, k, f"exit {code}\n{out}\n{err}")
        if is_sanitizers_own(err):
            return "the sanitizer's own"
        assert code in (0, 1), where
        if code == 0:
            assert out == good, where
            return "all the same"
        told = [l for l in err.splitlines() if l.startswith("steel: ")]
        assert len(told) == 1 or (kind == "write" and not told), where
        return "exit 1"

    walk(faults, "run", once, counts)


# A server's start and end

def walk_serve(faults, model):
    cmd = [STEEL, "serve", model, "--port", "0", "-t", "2", "--device", "cpu", "--grace", "1"]

    def serve():
        """Starts one, asks it to stop once it is ready; (code, stderr)."""
        p = subprocess.Popen(cmd, env=faults.env, stderr=subprocess.PIPE, text=True)
        timer = threading.Timer(HANG, p.kill)
        timer.start()
        lines, asked = [], False
        late = threading.Timer(5, p.terminate)  # its words may be what failed
        late.start()
        for line in p.stderr:
            lines.append(line.rstrip())
            if not asked and "ready" in line:
                asked = True
                p.terminate()
        code = p.wait()
        late.cancel()
        assert timer.is_alive(), "it hangs"
        timer.cancel()
        return code, lines

    faults.arm("alloc", 0)
    code, lines = serve()
    assert code == 0, lines
    counts = faults.counts()

    def once(kind, k):
        code, lines = serve()
        where = describe("serve", kind, k, f"exit {code}\n" + "\n".join(lines))
        if is_sanitizers_own(where):
            return "the sanitizer's own"
        assert code in (0, 1), where
        told = [l for l in lines if l.startswith("steel: ")]
        assert len(told) == code or kind == "write", where
        return "served and ended" if code == 0 else "exit 1"

    walk(faults, "serve", once, counts)


# Requests

def exchange(port, path, body):
    """What comes back on a connection of its own, head and body; None: nothing, or it was cut."""
    text = json.dumps(body)
    s = socket.socket()
    s.settimeout(HANG)
    try:
        s.connect(("127.0.0.1", port))
        s.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                  f"Connection: close\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        data = b""
        while True:
            piece = s.recv(65536)
            if not piece:
                break
            data += piece
    except ConnectionError:
        return None
    finally:
        s.close()
    head, sep, rest = data.partition(b"\r\n\r\n")
    if not sep:
        return None
    status = int(head.split()[1])
    length = re.search(rb"Content-Length: (\d+)", head)
    if length:
        return (status, rest.decode()) if len(rest) == int(length.group(1)) else None
    out = b""
    while True:  # chunks
        size, sep, rest = rest.partition(b"\r\n")
        if not sep or len(rest) < int(size, 16) + 2:
            return None
        if int(size, 16) == 0:
            return status, out.decode()
        out += rest[:int(size, 16)]
        rest = rest[int(size, 16) + 2:]


def read_answer(got, stream):
    """("whole", text), or how it ended."""
    if got is None:
        return "cut", None
    status, text = got
    if status != 200:
        assert json.loads(text)["error"]["message"], got
        return f"{status}", None
    if not stream:
        return "whole", json.loads(text)["choices"][0]["message"]["content"]
    events = [e[6:] for e in text.split("\n\n") if e.startswith("data: ")]
    said = ""
    for e in events[:-1]:
        e = json.loads(e)
        if "error" in e:
            return "error event", None
        said += e["choices"][0]["delta"].get("content") or ""
    if events and events[-1] == "[DONE]":
        return "whole", said
    assert events and "error" in json.loads(events[-1]), got
    return "error event", None


def walk_requests(faults, model):
    s = Server(BUILD, "--device", "cpu", model=model, env=faults.env)
    path = "/v1/chat/completions"
    try:
        for what, stream in (("chat", False), ("stream", True)):
            body = dict(WORDS, stream=stream)
            faults.arm("alloc", 0)
            how, good = read_answer(exchange(s.port, path, body), stream)
            assert how == "whole" and good, how
            time.sleep(0.2)  # what is left to do after the reply
            counts = faults.counts()

            def once(kind, k):
                try:
                    how, text = read_answer(exchange(s.port, path, body), stream)
                except (OSError, AssertionError, ValueError) as e:
                    raise AssertionError(describe(what, kind, k, repr(e)) + "\n" + s.log())
                faults.disarm()
                # and it is as good as ever
                again, after = read_answer(exchange(s.port, path, body), stream)
                where = describe(what, kind, k, f"{how}, then {again}\n{s.log()}")
                assert s.proc.poll() is None, where
                assert how != "whole" or text == good, where
                assert again == "whole" and after == good, where
                return how

            walk(faults, what, once, counts)
        assert s.get("/health")[0] == 200
        s.proc.send_signal(signal.SIGTERM)
        assert s.proc.wait(HANG) == 0, s.log()  # with a sanitizer: nothing leaked
    finally:
        if s.proc.poll() is None:
            s.proc.kill()


def starve(model):
    """A limit on memory that large requests run into: they get errors, and nothing else happens."""
    s = Server(BUILD, "--device", "cpu", model=model)
    path = "/v1/chat/completions"
    try:
        good = read_answer(exchange(s.port, path, WORDS), False)
        large = dict(WORDS, messages=[{"role": "user", "content": "word " * 3200000}])  # its tokens alone are more than an arena of malloc reserves
        vm = int(re.search(r"VmSize:\s+(\d+) kB", open(f"/proc/{s.proc.pid}/status").read()).group(1)) << 10
        unlimited = resource.prlimit(s.proc.pid, resource.RLIMIT_AS)
        ends = {}
        for spare in range(64, -512, -32):  # below 0: malloc's arenas have reserved more than they use
            if "503" in ends:
                break
            resource.prlimit(s.proc.pid, resource.RLIMIT_AS, (vm + (spare << 20), unlimited[1]))
            results = []
            threads = [threading.Thread(target=lambda: results.append(read_answer(exchange(s.port, path, large), False)))
                       for _ in range(12)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert s.proc.poll() is None, s.log()
            assert len(results) == 12, results
            for how, _ in results:
                ends[how] = ends.get(how, 0) + 1
        print(f"starved of memory: {ends}")
        assert "503" in ends and "whole" not in ends, ends
        resource.prlimit(s.proc.pid, resource.RLIMIT_AS, unlimited)
        assert read_answer(exchange(s.port, path, WORDS), False) == good
        s.proc.send_signal(signal.SIGTERM)
        assert s.proc.wait(HANG) == 0, s.log()
    finally:
        if s.proc.poll() is None:
            s.proc.kill()


def main():
    if "tsan" in BUILD:
        print("not run under ThreadSanitizer, which allocates for itself")
        sys.exit(77)
    with tempfile.TemporaryDirectory() as tmp:
        model = os.path.join(tmp, "toy.gguf")
        subprocess.run([os.path.join(BUILD, "tests/toy_gguf"), model], check=True)
        faults = Faults(tmp)
        walk_run(faults, model)
        walk_serve(faults, model)
        walk_requests(faults, model)
        if "san" not in BUILD:  # they reserve address space
            starve(model)


main()

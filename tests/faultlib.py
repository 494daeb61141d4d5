"""Calls of a GPU's library that fail on purpose: walking through the calls of a run and of a server's requests. Used by
test_cuda_faults.py and test_vulkan_faults.py, whose libraries share memory with the test (struct Control)."""
import ctypes, json, mmap, os, signal, subprocess, sys, threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from serverlib import HANG, Server, leak_env

TEXT = {"prompt": "Once upon a time there was", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


class Faults:
    """The memory shared with the library. env: the variable that names it. every: walk through every call. leaks: the
    device's driver leaks nothing itself, so that LeakSanitizer can watch."""

    def __init__(self, build, steel, device, kinds, path, env, every, leaks=True):
        class Control(ctypes.Structure):
            _fields_ = [(n, ctypes.c_int) for n in ("call", "at", "lost", "n_failed")] + [("count", ctypes.c_int * len(kinds))]
        self.build, self.steel, self.device, self.kinds, self.path, self.every = build, steel, device, kinds, path, every
        with open(self.path, "wb") as f:
            f.write(bytes(4096))
        self.file = open(self.path, "r+b")
        self.control = Control.from_buffer(mmap.mmap(self.file.fileno(), 4096))
        preload = leak_env() if leaks else None
        self.env = dict(os.environ, STEEL_CONFIG="", **(preload or {}))
        self.env[env] = self.path
        if leaks and not preload:
            print(f"skipped: leaks after {device} faults: no liblsan.so")

    def arm(self, kind, at, lost=False):
        c = self.control
        c.at = 0
        c.n_failed = c.lost = 0
        c.call = self.kinds.index(kind)
        for i in range(len(self.kinds)):
            c.count[i] = 0
        c.lost = lost
        c.at = at

    def disarm(self):
        self.control.at = 0
        return self.control.n_failed

    def counts(self):
        return dict(zip(self.kinds, self.control.count))


def cases(faults, counts, most, kinds=None):
    """(kind, k, lost): each kind's calls in turn, then devices lost at a call of any kind."""
    for kind in kinds or faults.kinds:
        n, lost = counts[kind], kind == "any"
        some = range(1, n + 1) if faults.every or n <= most else sorted({1 + i * n // most for i in range(most)})
        for k in some:
            yield kind, k, lost


class Tally(dict):
    def add(self, kind, outcome):
        self[kind, outcome] = self.get((kind, outcome), 0) + 1

    def show(self, what):
        print(f"{what}: " + ", ".join(f"{kind} {n} x {outcome}" for (kind, outcome), n in self.items()), flush=True)


def one_line(err):
    return len([l for l in err.splitlines() if l.startswith("steel: ")]) == 1


def walk_run(faults, what, cmd, most):
    cmd = [faults.steel, *cmd, "-t", "1", "--device", faults.device]

    def run():
        p = subprocess.run(cmd, env=faults.env, capture_output=True, timeout=HANG)
        return p.returncode, p.stdout, p.stderr.decode(errors="replace")

    faults.arm("any", 0)
    code, good, err = run()
    assert code == 0, err
    tally = Tally()
    for kind, k, lost in cases(faults, faults.counts(), most):
        faults.arm(kind, k, lost)
        code, out, err = run()
        hit = faults.disarm()
        where = f"{what}: {kind} {k} failed ({hit}): exit {code}\n{out}\n{err}"
        assert code in (0, 1), where
        assert code == 1 or out == good, where
        assert code == 0 or one_line(err), where
        tally.add(kind, "exit 1" if code else "the same" if hit else "not reached")
    tally.show(what)


def ask(s, body, stream):
    """The text, or ("error", words)."""
    if not stream:
        status, _, text = s.post("/v1/completions", body)
        reply = json.loads(text)
        if status != 200:
            assert reply["error"]["message"], text
            return "error", reply["error"]["message"]
        return [c["text"] for c in reply["choices"]], reply["choices"][0].get("logprobs")
    said = ""
    status, _, text = s.post("/v1/completions", dict(body, stream=True))
    events = [e[6:] for e in text.split("\n\n") if e.startswith("data: ")]
    if status != 200:
        return "error", json.loads(text)["error"]["message"]
    for e in events:
        if e == "[DONE]":
            return [said], None
        e = json.loads(e)
        if "error" in e:
            assert e["error"]["message"], e
            return "error", e["error"]["message"]
        said += "".join(c["text"] for c in e["choices"])
    raise AssertionError(f"the stream ends without a word: {events}")


def crowd(s, requests):
    got = [None] * len(requests)

    def one(i):
        try:
            got[i] = ask(s, *requests[i])
        except BaseException as e:  # told below
            got[i] = e
    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(requests))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return got


def walk_server(faults, what, flags, model, requests, most):
    """Each fault meets a server of its own, as a step that fails is the engine's end."""
    def start():
        return Server(faults.build, "--max-num-seqs", "4", *flags, model=model, env=faults.env, steel=faults.steel)

    def end(s, where):
        s.proc.send_signal(signal.SIGTERM)
        assert s.proc.wait(HANG) == 0, where + s.log()

    faults.arm("any", 0)
    s = start()
    good = [ask(s, *r) for r in requests]
    faults.arm("any", 0)
    crowd(s, requests)
    counts = faults.counts()
    end(s, "no fault")
    assert not [g for g in good if g[0] == "error"], good
    tally = Tally()
    s = None
    for kind, k, lost in cases(faults, counts, most):
        s = s or start()
        faults.arm(kind, k, lost)
        got = crowd(s, requests)
        hit = faults.disarm()
        where = f"{what}: {kind} {k} failed ({hit}): {got}\n"
        assert s.proc.poll() is None, where + s.log()
        for g, want in zip(got, good):
            # on a GPU a text may differ beside others, but it has as many tokens
            assert not isinstance(g, BaseException) and (g[0] == "error" or len(g[0]) == len(want[0])), where + s.log()
        failed = [g for g in got if g[0] == "error"]
        assert hit or not failed, where
        status = s.get("/health")[0]
        assert (status == 503) if lost and hit else status in (200, 503), where + s.log()
        after = ask(s, *requests[0])
        assert (after == good[0]) if status == 200 else after[0] == "error", (where, after, good[0])
        tally.add(kind, f"{len(failed)} errors" if failed else "whole")
        if status == 503:
            end(s, where)
            s = None
    if s:
        end(s, what)
    tally.show(what)

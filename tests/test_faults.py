#!/usr/bin/env python3
"""Everything fails once: the k-th allocation, read, write, accept or thread start (tests/faults.c), with k walked
through a run, which ends with code 0 and its whole answer, or with 1 and one line.
usage: test_faults.py BUILD [all]: without "all" a sample of each walk."""
import ctypes, mmap, os, subprocess, sys, tempfile

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
ALL = len(sys.argv) > 2
STEEL = os.path.join(BUILD, "steel")
KINDS = ["alloc", "read", "write", "accept", "thread"]
SAMPLE = {"run": 20}  # of allocations; a quarter of that of the others
HANG_S = 60


class Control(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("at", ctypes.c_int), ("n_failed", ctypes.c_int),
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
        c.kind = KINDS.index(kind)
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
    for kind in KINDS:
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


# A run

def walk_run(faults, model):
    cmd = [STEEL, "run", model, "-p", "Once", "-n", "5", "-t", "2", "--temp", "0", "--device", "cpu"]

    def run():
        p = subprocess.run(cmd, env=faults.env, capture_output=True, timeout=HANG_S)
        return p.returncode, p.stdout.decode(), p.stderr.decode()

    faults.arm("alloc", 0)
    code, good, err = run()
    assert code == 0, err
    counts = faults.counts()

    def once(kind, k):
        code, out, err = run()
        where = describe("run", kind, k, f"exit {code}\n{out}\n{err}")
        assert code in (0, 1), where
        if code == 0:
            assert out == good, where
            return "all the same"
        told = [l for l in err.splitlines() if l.startswith("steel: ")]
        assert len(told) == 1 or (kind == "write" and not told), where
        return "exit 1"

    walk(faults, "run", once, counts)


def main():
    with tempfile.TemporaryDirectory() as tmp:
        model = os.path.join(tmp, "toy.gguf")
        subprocess.run([os.path.join(BUILD, "tests/toy_gguf"), model], check=True)
        faults = Faults(tmp)
        walk_run(faults, model)


main()

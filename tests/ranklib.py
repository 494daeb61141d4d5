"""Several ranks of `steel serve`, as mpirun starts them, for tests."""
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from gguf_tools import read_logits
from serverlib import HANG, Server, run_tests

# --bind-to none: ranks may share cores. As root only tests run. One machine: what else there is takes long to begin.
BARE = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
MPIRUN = [*BARE, "--mca", "pml", "ob1"]
NEAR = ["--mca", "btl", "self,vader"]
TCP = ["--mca", "btl", "self,tcp"]
# The launcher's own shared memory has a lock that a killed process may hold for ever.
os.environ.setdefault("PMIX_MCA_gds", "hash")
# A sanitizer's build: whole stacks, by which MPI's own leaks are told from ours.
for _name, _more in (("ASAN_OPTIONS", "fast_unwind_on_malloc=0"), ("LSAN_OPTIONS", "print_suppressions=0:suppressions=" + os.path.join(
        os.path.dirname(os.path.abspath(__file__)), "lsan.supp"))):
    os.environ[_name] = ":".join(filter(None, (os.environ.get(_name), _more)))
DEMO = "demo/steel-demo.gguf"
ALL = bool(os.environ.get("RANKS_ALL"))


def skip_without_mpi(build):
    if not shutil.which("mpirun") or not os.path.exists(os.path.join(build, "steel-mpi.so")):
        print("skipped: ranks: mpirun or steel-mpi.so is not here")
        sys.exit(77)
    probe = subprocess.run([*MPIRUN, *NEAR, "-n", "2", "true"], capture_output=True, text=True)
    if probe.returncode:
        print("skipped: ranks: mpirun starts nothing here:", " ".join(probe.stderr.split())[:200])
        sys.exit(77)


def mpirun(ranks, *command, over=NEAR, env=None):
    return subprocess.run([*MPIRUN, *over, "-n", str(ranks), *command], capture_output=True, text=True, timeout=HANG,
                          env=dict(os.environ, **(env or {})))


def rank_logits(build, model, ranks=1, args=(), ids=None, kernels=None, kv="f32", check=True):
    """The logits of a golden's ids, or of others, and the run; no logits: it failed."""
    with tempfile.NamedTemporaryFile() as out:
        cmd = [os.path.join(build, "steel"), "logits", model, "--device", "cpu", "-t", "1", "--kv-type", kv, "--ids", ids or f"{model}/golden.bin",
               "--out", out.name, *args]
        r = subprocess.run([*MPIRUN, *NEAR, "-n", str(ranks), *cmd] if ranks > 1 else cmd, capture_output=True, text=True, timeout=HANG,
                           env=dict(os.environ, **({"STEEL_ISA": kernels} if kernels else {})))
        assert r.returncode == 0 or not check, f"{model} {ranks} {args}: {r.stderr[-4000:]}"
        return (read_logits(out.name) if r.returncode == 0 else None), r


def run_rank_tests(build, names, work=None):
    """Those of a file, or those with a text of the command line in their names; work: a folder that goes then."""
    skip_without_mpi(build)
    only = sys.argv[2:] or [""]
    try:
        run_tests([v for k, v in sorted(names.items()) if k.startswith("test_") and any(o in k for o in only)])
    finally:
        if work:
            shutil.rmtree(work, ignore_errors=True)


def said(stderr):
    """What ranks said, without the launcher's own words."""
    return [line for line in stderr.splitlines() if line.startswith("steel: ") or " error " in line]


def wait_until(what, why="waited in vain"):
    end = time.time() + HANG
    while not what():
        assert time.time() < end, why
        time.sleep(0.02)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def launcher_end(proc, pids):
    """The exit status of a launcher whose ranks end. None: it does not end. Open MPI 4.1's mpirun may wait for ever for a mutex
    of its own (PMIx_server_finalize) when a rank was killed while it connected."""
    wait_until(lambda: proc.poll() is not None or not any(map(is_alive, pids)), "a rank is left")
    try:
        return proc.wait(30)
    except subprocess.TimeoutExpired:
        proc.kill()
        proc.wait()
        return None


def rank_pids(launcher, n):
    """The processes of a launcher, by rank: what it told them."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as f:
                parent = int(f.read().rsplit(")", 1)[1].split()[1])
            if parent != launcher:
                continue
            with open(f"/proc/{pid}/environ", "rb") as f:
                env = dict(e.split(b"=", 1) for e in f.read().split(b"\0") if b"=" in e)
            found[int(env[b"OMPI_COMM_WORLD_RANK"])] = int(pid)
        except (OSError, KeyError):
            continue
    return [found[i] for i in range(n)] if len(found) == n else None


def listeners(pid):
    """The addresses at which a process listens, as the kernel writes them."""
    fds = [f"/proc/{pid}/fd/{f}" for f in os.listdir(f"/proc/{pid}/fd")]
    sockets = {os.readlink(f) for f in fds if os.path.lexists(f)}
    found = []
    for kind in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{kind}") as f:
            rows = [line.split() for line in f.read().splitlines()[1:]]
        found += [r[1] for r in rows if r[3] == "0A" and f"socket:[{r[9]}]" in sockets]
    return found


class Ranks(Server):
    """mpirun -n N steel serve; one is by itself. bare: mpirun chooses how the ranks talk."""

    def __init__(self, build, n, *flags, model=DEMO, over=NEAR, env=None, wait=True, steel=None, bare=False):
        super().__init__(build, "--device", "cpu", *flags, model=model, wait=wait, env=dict(os.environ, **(env or {})),
                         launch=[*(BARE if bare else [*MPIRUN, *over]), "-n", str(n)] if n > 1 else [], steel=steel)
        self.pids = rank_pids(self.proc.pid, n) if n > 1 else [self.proc.pid]

    def __enter__(self):
        return self

    def __exit__(self, *what):
        self.stop()

    def stop(self):
        """Rank 0 is told to end, and all do. Launchers that are told take two seconds more, and call it a failure."""
        os.kill(self.pids[0], signal.SIGTERM)
        rc = self.wait_end()
        assert rc == 0, (rc, self.log())
        return rc

    def rss_kb(self):
        total = 0
        for pid in self.pids:
            with open(f"/proc/{pid}/status") as f:
                total += int(f.read().split("VmRSS:")[1].split()[0])
        return total

    def wait_end(self):
        """The launcher's exit status, when no rank is left. None: see launcher_end."""
        rc = launcher_end(self.proc, self.pids)
        wait_until(lambda: not any(map(is_alive, self.pids)), "a rank is left")
        self.whole_log()
        self.dir.cleanup()
        return rc

    def said(self):
        return said(self.log())


class Frozen:
    """One thread of a process stands still, the others go on."""

    def __init__(self, tid):
        self.libc, self.tid = ctypes.CDLL(None, use_errno=True), tid
        seize, interrupt = 0x4206, 0x4207
        for what in (seize, interrupt):
            if self.libc.ptrace(what, tid, None, None) != 0:
                raise PermissionError(ctypes.get_errno(), "ptrace")

    def go(self):
        os.waitpid(self.tid, 0x40000000)  # __WALL
        self.libc.ptrace(17, self.tid, None, None)

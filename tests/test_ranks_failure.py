#!/usr/bin/env python3
"""What several ranks do when something goes wrong: one is killed, stopped, hangs or was started differently; launchers that find no
MPI; an orderly end. RANKS_ALL=1: many more tries, and half a minute of being stopped."""
import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from ranklib import ALL, DEMO, HANG, MPIRUN, NEAR, TCP, Frozen, Ranks, is_alive, launcher_end, mpirun, rank_pids, run_rank_tests, said, wait_until  # noqa: E402
import vision_model  # noqa: E402

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
STEEL = os.path.join(BUILD, "steel")
WORK = tempfile.mkdtemp(prefix="steel-ranks-")
LONG = {"prompt": "Once upon a time", "max_tokens": 1800, "temperature": 0, "ignore_eos": True}


class Stream(threading.Thread):
    """A stream, read to its end: whether it began, and what came."""

    def __init__(self, server, body):
        super().__init__(daemon=True)
        self.server, self.body, self.began, self.text = server, dict(body, stream=True), threading.Event(), b""
        self.start()

    def run(self):
        c = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=HANG)
        try:
            c.request("POST", "/v1/completions", json.dumps(self.body), {"content-type": "application/json"})
            r = c.getresponse()
            while True:
                line = r.readline()
                if not line:
                    break
                self.text += line
                if b"data:" in line:
                    self.began.set()
        except (http.client.HTTPException, OSError):
            pass
        self.began.set()

    def error(self):
        self.join()
        return next((json.loads(l[6:])["error"]["message"] for l in self.text.decode().splitlines()
                     if l.startswith("data: ") and '"error"' in l), None)


def streams(server, n):
    all_of_them = [Stream(server, dict(LONG, prompt=LONG["prompt"] + " " * i)) for i in range(n)]
    for s in all_of_them:
        assert s.began.wait(HANG)
    return all_of_them


def ends(server, clients, line):
    """The job ends: one line, an error event for every stream, not 0, no process left."""
    rc = server.wait_end()
    assert rc != 0, server.log()
    assert [l for l in server.said() if line in l] == server.said() and len(server.said()) == 1, server.log()
    for c in clients:
        assert line in (c.error() or ""), (c.error(), c.text[-300:], server.log())


def test_a_rank_that_is_killed():
    """Each in turn, under load. Rank 0 says which; where it is rank 0, rank 1 does, and streams are cut."""
    for flags, n, victims in ((["--tp", "3"], 3, (0, 1, 2)), (["--pp", "2"], 2, (1,)), *(((["--ep"], 2, (0, 1)),) if ALL else ())):
        for victim in victims * (8 if ALL else 1):
            s = Ranks(BUILD, n, *flags)
            clients = streams(s, 3)
            os.kill(s.pids[victim], signal.SIGKILL)
            ends(s, clients if victim else [], f"rank {victim} has ended")


def test_killed_in_a_sum():
    """While prompts are read: one rank stops, the other computes and waits for a sum; then it is killed."""
    for victim in (1, 0, 1, 0, 1) if ALL else (1,):
        s = Ranks(BUILD, 2, "-c", "2048")
        before = s.metrics()["steel_steps_read_total"]
        clients = [Stream(s, dict(LONG, prompt=f"{i} " + "once upon a time " * 300, max_tokens=1)) for i in range(12)]
        wait_until(lambda: s.metrics()["steel_steps_read_total"] > before)
        os.kill(s.pids[victim], signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(s.pids[victim], signal.SIGKILL)
        ends(s, [], f"rank {victim} has ended")
        for c in clients:
            assert "[DONE]" in c.text.decode() or victim == 0 or f"rank {victim} has ended" in (c.error() or ""), c.text


def test_two_at_once():
    """A launcher has even less patience then."""
    for _ in range(10 if ALL else 1):
        s = Ranks(BUILD, 3)
        clients = streams(s, 2)
        for pid in s.pids[1:]:
            os.kill(pid, signal.SIGKILL)
        ends(s, clients, "has ended")


def test_killed_while_idle():
    s = Ranks(BUILD, 2)
    os.kill(s.pids[1], signal.SIGKILL)
    ends(s, [], "rank 1 has ended")


def test_killed_at_any_moment():
    """From the first instruction on: it ends, and not well."""
    codes, tries = [], 40 if ALL else 3
    for i in range(2 * tries):
        if len(codes) == tries:
            break
        job = subprocess.Popen([*MPIRUN, *NEAR, "-n", "2", STEEL, "logits", "tests/golden/qwen3moe", "--device", "cpu", "-t", "1",
                                "--ids", "tests/golden/qwen3moe/golden.bin", "--out", os.path.join(WORK, "killed.bin")],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            pids = []
            wait_until(lambda: pids.extend(rank_pids(job.pid, 2) or []) or pids or job.poll() is not None)
            time.sleep(random.Random(i).random() * 0.15)
            if pids and is_alive(pids[i % 2]):
                os.kill(pids[i % 2], signal.SIGKILL)
                code = launcher_end(job, pids)
                codes += [code] if code is not None else []
            wait_until(lambda: not any(map(is_alive, pids)), "a rank is left")
        finally:
            job.kill()
            job.wait()
    print("exit statuses:", codes)
    assert any(codes), codes  # a rank may have ended the moment before it was to be killed


def test_a_rank_that_is_stopped():
    """Back before the timeout: goes on, as if nothing had been. Not back: lost."""
    s = Ranks(BUILD, 2, "--rank-timeout", "3")
    body = dict(LONG, max_tokens=40)
    want = s.json("/v1/completions", body)["choices"][0]["text"]
    client = Stream(s, body)
    assert client.began.wait(HANG)
    os.kill(s.pids[1], signal.SIGSTOP)
    time.sleep(1)
    os.kill(s.pids[1], signal.SIGCONT)
    client.join()
    events = [json.loads(l[6:]) for l in client.text.decode().splitlines() if l.startswith("data: {")]
    assert "".join(e["choices"][0]["text"] for e in events) == want
    clients = streams(s, 2)
    os.kill(s.pids[1], signal.SIGSTOP)
    ends(s, clients, "rank 1 has not answered for 3 s")


def test_all_are_stopped():
    """As a scheduler suspends a job, for longer than the timeout: nobody was silent, and the answer is the same."""
    s = Ranks(BUILD, 2, "--rank-timeout", "1")
    body = dict(LONG, max_tokens=40)
    want = s.json("/v1/completions", body)["choices"][0]["text"]
    for first in (0, 1):
        client = Stream(s, body)
        assert client.began.wait(HANG)
        for sig in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(s.pids[first], sig)
            os.kill(s.pids[1 - first], sig)
            time.sleep(3 if sig == signal.SIGSTOP else 0)
        client.join()
        events = [json.loads(l[6:]) for l in client.text.decode().splitlines() if l.startswith("data: {")]
        assert "".join(e["choices"][0]["text"] for e in events) == want, s.log()
    s.stop()


def test_rank_0_is_stopped():
    """One of the others says it."""
    s = Ranks(BUILD, 2, "--rank-timeout", "1")
    streams(s, 1)
    os.kill(s.pids[0], signal.SIGSTOP)
    assert s.wait_end() != 0
    assert any("rank 0 has not answered for 1 s" in l for l in s.said()), s.log()


def test_stopped_for_half_a_minute():
    if not ALL:
        print("skipped: a rank stopped for half a minute: RANKS_ALL=1")
        return
    s = Ranks(BUILD, 3)
    clients = streams(s, 3)
    os.kill(s.pids[2], signal.SIGSTOP)
    threading.Timer(30, lambda: is_alive(s.pids[2]) and os.kill(s.pids[2], signal.SIGCONT)).start()
    ends(s, clients, "rank 2 has not answered for 10 s")
    s = Ranks(BUILD, 3, "--rank-timeout", "60")
    client = streams(s, 1)[0]
    os.kill(s.pids[2], signal.SIGSTOP)
    time.sleep(30)
    os.kill(s.pids[2], signal.SIGCONT)
    assert client.error() is None and b"[DONE]" in client.text
    s.stop()


def test_a_full_network():
    """Rows for a rank that does not read: more than sockets hold. It may come back; else it is lost."""
    small = [x for k, v in (("eager_limit", 4 << 20), ("sndbuf", 65536), ("rcvbuf", 65536)) for x in ("--mca", f"btl_tcp_{k}", str(v))]
    s = Ranks(BUILD, 2, "--pp", "2", "--rank-timeout", "3", "-b", "1900", over=[*TCP, *small])
    prompt = "".join(random.Random(3).choice("abcdefgh ") for _ in range(1800))
    body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "cache_prompt": False}
    want = s.json("/v1/completions", body)["choices"][0]["text"]
    os.kill(s.pids[1], signal.SIGSTOP)
    client = Stream(s, body)
    time.sleep(1)
    os.kill(s.pids[1], signal.SIGCONT)
    client.join()
    events = [json.loads(l[6:]) for l in client.text.decode().splitlines() if l.startswith("data: {")]
    assert "".join(e["choices"][0]["text"] for e in events) == want
    os.kill(s.pids[1], signal.SIGSTOP)
    client = Stream(s, body)
    ends(s, [client], "rank 1 has not answered for 3 s")


def test_a_rank_that_hangs():
    """Its process lives and beats, but what should read does not: waits have an end of their own."""
    s = Ranks(BUILD, 2, "--rank-timeout", "3")  # beats must come in time on a busy machine, too
    try:
        Frozen(s.pids[1])
    except PermissionError as e:
        print("skipped: a rank that hangs:", e)
        s.stop()
        return
    client = Stream(s, LONG)
    rc = s.proc.wait(HANG)
    assert rc != 0 and "no answer from another rank" in client.error(), (client.error(), s.log())
    assert len(s.said()) == 1, s.log()


def test_killed_over_tcp():
    """MPI itself notices that, and rank 0 still says which rank it was."""
    for flags in (["--tp", "2"], ["--pp", "2"]):
        s = Ranks(BUILD, 2, *flags, over=TCP)
        clients = streams(s, 2)
        os.kill(s.pids[1], signal.SIGKILL)
        ends(s, clients, "rank 1 has ended")


def test_without_lines():
    """Ranks that do not reach rank 0 but by MPI: a notice, and waits have an end."""
    s = Ranks(BUILD, 2, "--rank-timeout", "1", env={"STEEL_RANK_ADDRESS": "240.0.0.1"})
    s.wait_line("rank 1 does not reach rank 0 over TCP at 240.0.0.1 (STEEL_RANK_ADDRESS names this address)")
    client = streams(s, 1)[0]
    os.kill(s.pids[1], signal.SIGSTOP)
    assert s.wait_end() != 0
    assert "no answer from another rank" in client.error(), s.log()


def test_named_address():
    """Lines of ranks on one machine are where rank 0 is told to have them; what they are for works there."""
    s = Ranks(BUILD, 2, env={"STEEL_RANK_ADDRESS": "127.0.0.2"})
    assert "over TCP" not in s.log()
    inodes = set()
    with open("/proc/net/tcp") as f:
        for line in f.readlines()[1:]:
            here, state, inode = (line.split()[i] for i in (1, 3, 9))
            if here.startswith("0200007F:") and state == "01":
                inodes.add(f"socket:[{inode}]")
    fds = f"/proc/{s.pids[0]}/fd"
    assert inodes & {os.readlink(f"{fds}/{fd}") for fd in os.listdir(fds) if os.path.lexists(f"{fds}/{fd}")}
    clients = streams(s, 1)
    os.kill(s.pids[1], signal.SIGKILL)
    ends(s, clients, "rank 1 has ended")


def test_without_lines_and_idle():
    """Such ranks meet now and then while there is nothing to do: who does not come is lost, the others go on."""
    s = Ranks(BUILD, 2, "--rank-timeout", "1", env={"STEEL_RANK_ADDRESS": "240.0.0.1"})
    body = dict(LONG, max_tokens=8)
    want = s.json("/v1/completions", body)
    time.sleep(2.5)
    assert s.json("/v1/completions", body)["choices"] == want["choices"]
    os.kill(s.pids[1], signal.SIGSTOP)
    assert s.wait_end() != 0
    assert "no answer from another rank" in s.log(), s.log()


def test_ranks_that_do_not_end():
    """The server is told to end, and one of them does not hear it: it is not waited for long."""
    s = Ranks(BUILD, 2, "--rank-timeout", "1")
    try:
        Frozen(s.pids[1])
    except PermissionError as e:
        print("skipped: ranks that do not end:", e)
        s.stop()
        return
    os.kill(s.pids[0], signal.SIGTERM)
    assert s.proc.wait(HANG) != 0
    s.wait_line("shutting down")
    assert len(s.said()) == 1, s.log()


def test_mpi_that_never_begins():
    """One process is no rank: the other waits for it in MPI's own beginning."""
    if not ALL:
        print("skipped: two minutes of waiting for MPI: RANKS_ALL=1")
        return
    script = os.path.join(WORK, "sleeps.sh")
    with open(script, "w") as f:
        f.write(f'#!/bin/sh\n[ "$OMPI_COMM_WORLD_RANK" = 1 ] && exec sleep 600\nexec {os.path.abspath(STEEL)} "$@"\n')
    os.chmod(script, 0o755)
    refused(mpirun(2, *logits(steel=script)), "the ranks have not found each other in two minutes")


def test_orderly_end():
    """The launcher is told to end: streams hear that the server shuts down, nobody speaks of a lost rank."""
    for sig in (signal.SIGTERM, signal.SIGINT):
        s = Ranks(BUILD, 2)
        clients = streams(s, 1)
        s.proc.send_signal(sig)
        while s.proc.poll() is None and len(clients) < 600:  # a launcher takes its time; one stream may end before
            clients.append(Stream(s, LONG))
            time.sleep(0.1)
        s.wait_end()
        heard = {c.error() for c in clients} - {None}
        assert len(heard) == 1 and "shutting down" in heard.pop(), (heard, s.log())
        assert s.said() == [] and "shutting down" in s.log(), s.log()


def logits(model="tests/golden/qwen3", steel=STEEL, more=()):
    return [steel, "logits", model, "--device", "cpu", "--ids", "tests/golden/qwen3/golden.bin", "--out", os.path.join(WORK, "x.bin"), *more]


def differ(first, second, *texts):
    """Two ranks, started differently: refused in one line with both values."""
    r = subprocess.run([*MPIRUN, *NEAR, "-n", "1", *first, ":", "-n", "1", *second], capture_output=True, text=True, timeout=HANG)
    lines = said(r.stderr)
    assert r.returncode != 0 and len(lines) == 1 and all(t in lines[0] for t in texts), r.stderr


def patched(name, where, old, new):
    """A copy of a file with other bytes in it."""
    path = os.path.join(WORK, name)
    with open(where, "rb") as f:
        data = f.read()
    assert old in data and len(old) == len(new), (where, old)
    with open(path, "wb") as f:
        f.write(data.replace(old, new))
    shutil.copymode(where, path)
    return path


def test_other_arguments():
    differ(logits(), logits(more=["--profile"]), "the arguments differ: rank 0 has", "rank 1", "--profile")
    far = "./" * 600 + "tests/golden/qwen3"
    differ(logits(far, more=["-t", "1"]), logits(far, more=["-t", "2"]), "the arguments differ", '-t 1"', '-t 2"')


def test_other_kernels():
    """Ranks that compute otherwise may choose other experts for the same token."""
    differ(logits(), ["env", "STEEL_ISA=ref", *logits()], "the kernels (STEEL_ISA) differ: rank 0 has", 'rank 1 "ref"')


def test_other_device():
    """A GPU takes other parts of the head and of experts than a CPU does. Rank 1 only says that it has one: see tests/gpu/ranks_sim.py, too."""
    steel = patched("steel-gpu", STEEL, b"\0a CPU (--device)\0", b"\0a GPU (--device)\0")
    shutil.copy(os.path.join(BUILD, "steel-mpi.so"), WORK)
    differ(logits(), logits(steel=steel), "the devices differ: rank 0 has", '"a CPU (--device)"', 'rank 1 "a GPU (--device)"')


def test_other_version():
    with open("VERSION") as f:
        version = f.read().strip()
    other = version[:-1] + ("8" if version[-1] != "8" else "9")
    steel = patched("steel", STEEL, version.encode() + b"\0", other.encode() + b"\0")
    shutil.copy(os.path.join(BUILD, "steel-mpi.so"), WORK)
    differ(logits(), logits(steel=steel), "the programs differ", f'"steel {version} (', f'"steel {other} (')


def test_another_file():
    """By name the same: what each rank has there is not."""
    model, link = os.path.join(WORK, "there"), os.path.join(WORK, "wrapped")
    shutil.copytree("tests/golden/qwen3", model)
    with open(os.path.join(model, "model.safetensors"), "r+b") as f:
        head = f.read(8)
        f.seek(8 + int.from_bytes(head, "little"))
        f.write(b"\1\2\3\4")
    os.symlink(os.path.abspath("tests/golden/qwen3"), link)
    # rank 1 sees another file at the same path, as on another machine
    script = os.path.join(WORK, "elsewhere.sh")
    with open(script, "w") as f:
        f.write(f'#!/bin/sh\nif [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then cd {WORK}/b; else cd {WORK}/a; fi\nexec {os.path.abspath(STEEL)} "$@"\n')
    os.chmod(script, 0o755)
    os.makedirs(os.path.join(WORK, "a"))
    os.makedirs(os.path.join(WORK, "b"))
    os.symlink(os.path.abspath("tests/golden/qwen3"), os.path.join(WORK, "a/model"))
    os.symlink(model, os.path.join(WORK, "b/model"))
    ids = ["--ids", os.path.abspath("tests/golden/qwen3/golden.bin"), "--out", os.path.join(WORK, "x.bin")]
    r = mpirun(2, script, "logits", "model", "--device", "cpu", *ids)
    lines = said(r.stderr)
    assert r.returncode != 0 and len(lines) == 1 and "the model files differ: rank 0 has \"" in lines[0] and ", rank 1 \"" in lines[0], r.stderr
    os.unlink(os.path.join(WORK, "b/model"))
    r = mpirun(2, script, "logits", "model", "--device", "cpu", *ids)
    assert r.returncode != 0 and len(said(r.stderr)) == 1 and "rank 1: model: " in said(r.stderr)[0], r.stderr


def test_a_rank_that_fails():
    """Its file is cut short under it: rank 0 says what that rank found."""
    here, there, script = (os.path.join(WORK, x) for x in ("here", "other", "apart.sh"))
    for folder in (here, there):
        os.makedirs(folder)
        shutil.copy(DEMO, os.path.join(folder, "m.gguf"))
    with open(script, "w") as f:
        f.write(f'#!/bin/sh\nif [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then cd {there}; else cd {here}; fi\nexec {os.path.abspath(STEEL)} "$@"\n')
    os.chmod(script, 0o755)
    s = Ranks(BUILD, 2, "--pp", "2", "--no-repack", model="m.gguf", steel=script)
    clients = streams(s, 1)
    os.truncate(os.path.join(there, "m.gguf"), 1 << 20)
    ends(s, clients, "rank 1: ")


def refused(r, *texts):
    lines = said(r.stderr)
    assert r.returncode != 0 and len(lines) == 1 and all(t in lines[0] for t in texts), r.stderr


def test_how_many():
    refused(mpirun(3, *logits(more=["--tp", "2"])), "--tp 2 times --pp 1 are 2 ranks; 3 were started")
    refused(mpirun(3, *logits(more=["--pp", "2"])), "--pp 2", "3 were started")
    for args, how in ((["--tp", "2"], "mpirun -n 2 steel"), (["--tp", "2", "--pp", "3"], "mpirun -n 6 steel"),
                      (["--ep"], "--ep places experts on processes: mpirun -n N steel")):
        for launcher in ([], [*MPIRUN, *NEAR, "-n", "1"]):  # one process is one process
            r = subprocess.run([*launcher, *logits(more=args)], capture_output=True, text=True, timeout=HANG)
            assert r.returncode == 2 and how in r.stderr, r.stderr
    for args in (["--pp", "2"], ["--tp", "1", "--pp", "2"]):  # nobody to share experts with
        r = mpirun(2, *logits(more=[*args, "--ep"]))
        assert r.returncode == 2 and "--ep needs several --tp ranks to place experts on; there is one" in r.stderr, r.stderr
    r = mpirun(1, *logits(more=["--tp", "1", "--pp", "1"]))
    assert r.returncode == 0, r.stderr
    r = subprocess.run([x for x in MPIRUN if x != "--oversubscribe"] + ["-n", "9999", *logits()], capture_output=True, text=True, timeout=HANG)
    assert r.returncode != 0 and "slots" in r.stderr, r.stderr  # the launcher's own words


def test_no_mpi():
    steel = os.path.join(WORK, "bare", "steel")
    os.makedirs(os.path.dirname(steel))
    shutil.copy(STEEL, steel)
    refused(mpirun(2, *logits(steel=steel)), "MPI is not available", "steel-mpi.so", "make mpi")
    refused(mpirun(2, *logits(), env={"STEEL_MPI": "/nowhere/steel-mpi.so"}), "STEEL_MPI", "/nowhere/steel-mpi.so")
    lib = patched("other.so", os.path.join(BUILD, "steel-mpi.so"), b"libmpi.so.", b"libnix.so.")
    refused(mpirun(2, *logits(), env={"STEEL_MPI": lib}), "MPI is not available", "libnix.so")
    with open(os.path.join(WORK, "empty.so"), "w"):
        pass
    refused(mpirun(2, *logits(), env={"STEEL_MPI": os.path.join(WORK, "empty.so")}), "MPI is not available", "empty.so")


def test_images():
    """Several ranks do without the image tower, and say so; named, it is refused."""
    folder, image = vision_model.make(os.path.join(WORK, "sees")), ["--image", "tests/golden_images/qwen3_vl/a.png"]
    run = [STEEL, "run", folder, "-t", "1", "-n", "2", "-p", "What?"]
    assert subprocess.run([*run, *image], capture_output=True).returncode == 0
    words = "on several ranks the model reads text only, no images"
    r = mpirun(2, *run, *image)
    assert r.returncode and words in r.stderr and "this model reads text only" in r.stderr, r.stderr
    refused(mpirun(2, *run, *image, "--mmproj", f"{folder}/none.gguf"), words)
    assert mpirun(2, *run).returncode == 0


def test_flags_are_known():
    for command in ("run", "serve", "bench", "logits", "perplexity"):
        r = subprocess.run([STEEL, command, "--help"], capture_output=True, text=True)
        assert all(f in r.stdout for f in ("--tp", "--pp", "--ep", "--rank-timeout")), command
        r = subprocess.run([STEEL, "help", command, "--man"], capture_output=True, text=True)
        assert "rank-timeout" in r.stdout.replace("\\-", "-"), command
    for shell in ("bash", "zsh", "fish"):
        r = subprocess.run([STEEL, "completion", shell], capture_output=True, text=True)
        assert all(f in r.stdout for f in ("rank-timeout", "tp", "pp", "ep")), shell
    r = subprocess.run([*logits(more=["--rank-timeout", "0"])], capture_output=True, text=True)
    assert r.returncode == 2 and "--rank-timeout" in r.stderr, r.stderr


if __name__ == "__main__":
    run_rank_tests(BUILD, globals(), WORK)

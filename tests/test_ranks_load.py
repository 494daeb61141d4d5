#!/usr/bin/env python3
"""What several ranks need and stand: each has its share of the weights in memory and no more, and rough company (bench/load.py:
streams cut off at random, slow readers, a cache too small for all) gets the answers of one process: twelve clients for seconds,
with RANKS_ALL=1 64 for a minute with each arrangement."""
import ctypes
import json
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from ranklib import ALL, Ranks, run_rank_tests  # noqa: E402
from serverlib import HANG, sanitized  # noqa: E402

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
WORK = tempfile.mkdtemp(prefix="steel-ranks-")
ARRANGEMENTS = {"tp": (2, ["--tp", "2"]), "ep": (2, ["--tp", "2", "--ep"]), "pp": (2, ["--pp", "2"]),
                "ep 4": (4, ["--tp", "4", "--ep"]), "tp 3": (3, ["--tp", "3"]), "tp pp": (4, ["--tp", "2", "--pp", "2"])}
QUICK = ("tp", "ep", "pp")
MEMORY = dict(ARRANGEMENTS, **{"tp 4": (4, ["--tp", "4"]), "pp 4": (4, ["--pp", "4"])})
CONTEXT = ["-c", "512"]


def mapped(pid, path):
    """Bytes of a file that a process has in memory through its map."""
    total, inside = 0, False
    with open(f"/proc/{pid}/smaps") as f:
        for line in f:
            if "-" in line.split()[0]:
                inside = line.rstrip().endswith(path)
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total


def resident(model, n, flags):
    """Bytes in memory of each rank that has read a prompt and said a word, all of them, whosever they are; and those of the model's file."""
    s = Ranks(BUILD, n, *flags, *CONTEXT, "-np", "1", model=model)
    s.json("/v1/completions", {"prompt": list(range(3, 200)), "max_tokens": 4, "ignore_eos": True})
    out = []
    for pid in s.pids:
        with open(f"/proc/{pid}/status") as f:
            out.append((int(f.read().split("VmRSS:")[1].split()[0]) * 1024, mapped(pid, model)))
    s.stop()
    return out


def planned(model, flags):
    """A rank's share of the weights, with what it has whole, and of the cache."""
    r = subprocess.run([os.path.join(BUILD, "steel"), "plan", model, *flags, *CONTEXT, "--json"], capture_output=True, text=True, check=True)
    return [(rank["weight_bytes"], rank["cache_bytes"]) for rank in json.loads(r.stdout)["ranks"]]


def test_memory():
    """What a rank has more of a large model than of a small one is its share of weights and cache, with what every rank has whole; within 10 %.
    Of the file, whose weights it has copied and packed, nothing stays."""
    if sanitized(BUILD):
        print("skipped: memory of ranks: the sanitizer has its own")
        return
    # Pages of 2 MB round up what is touched of buffers for steps, by where these happen to lie. Children inherit it.
    set_thp_disable = 41
    assert ctypes.CDLL(None).prctl(set_thp_disable, 1, 0, 0, 0) == 0
    files = {}
    for name, layers in (("small", 4), ("large", 26)):
        files[name] = os.path.join(WORK, name + ".gguf")
        subprocess.run([sys.executable, "bench/synth_gguf.py", files[name], "--shape", "tiny-moe", "--layers", str(layers), "--quant", "q8_0"],
                       check=True, stdout=subprocess.DEVNULL)
    for name in MEMORY if ALL else ("tp", "pp"):
        n, flags = MEMORY[name]
        small, large = (resident(files[k], n, flags) for k in ("small", "large"))
        less, more = (planned(files[k], flags) for k in ("small", "large"))
        for rank, ((a, _), (b, file)) in enumerate(zip(small, large)):
            weights, cache = (y - x for x, y in zip(less[rank], more[rank]))
            share = weights + cache
            print(f"{name:6} rank {rank}: {(b - a) / 1e6:6.1f} MB for a share of {weights / 1e6:6.1f} MB and {cache / 1e6:4.1f} MB of cache: "
                  f"{(b - a) / share:.3f}; {file // 1024} KiB of the file")
            assert abs((b - a) / share - 1) <= 0.1, (name, rank, a, b, share)
            assert file <= 65536, (name, rank, file)
        whole = os.path.getsize(files["large"]) - os.path.getsize(files["small"])
        assert sum(y[0] - x[0] for x, y in zip(less, more)) < 1.1 * whole, (less, more, whole)


def test_rough_company():
    for name in ARRANGEMENTS if ALL else QUICK:
        n, flags = ARRANGEMENTS[name]
        size = ["--clients", "64", "--seconds", "60"] if ALL else ["--clients", "12", "--seconds", "3", "--seqs", "8", "--kv-tokens", "1100"]
        r = subprocess.run([sys.executable, "bench/load.py", BUILD, *size, "--ranks", str(n), "--flags=" + " ".join(flags),
                            *(["--sanitized"] if sanitized(BUILD) else [])], capture_output=True, text=True, timeout=2 * HANG)
        print(name + ":", r.stdout.replace("\n", "; ")[:400])
        assert r.returncode == 0, r.stderr[-3000:]


if __name__ == "__main__":
    run_rank_tests(BUILD, globals(), WORK)

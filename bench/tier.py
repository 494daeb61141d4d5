#!/usr/bin/env python3
"""A mixture whose experts stay in the file (--expert-memory), against what the disk allows.

  tier.py BUILD [--layers N] [--share 0.5] [--skew 1.0] [--rounds N]

A synthetic Qwen3-30B-A3B of N layers with random weights is run with all experts in memory and with a share of them. Between the
runs the disk is measured: direct reads of 512 KB at random places of the same file, by eight threads. The bound of a run is the time of the run in
memory plus that of its misses at the disk's rate. Standard library only; Linux."""
import argparse
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
PIECE, THREADS, SECONDS = 512 << 10, 8, 2


def disk_rate(path):
    """Bytes a second of direct reads at random places."""
    n, done, stop = os.path.getsize(path) // PIECE, [0] * THREADS, time.time() + SECONDS

    def read(i):
        fd, draw, buf = os.open(path, os.O_RDONLY | os.O_DIRECT), random.Random(i), mmap.mmap(-1, PIECE)
        while time.time() < stop:
            done[i] += os.preadv(fd, [buf], draw.randrange(n) * PIECE)
        os.close(fd)
    start = time.time()
    threads = [threading.Thread(target=read, args=(i,)) for i in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return sum(done) / (time.time() - start)


def bench(steel, path, *args):
    r = subprocess.run([steel, "bench", path, "--device", "cpu", "--json", "--skip-cost", "--no-warmup", "-r", "1", *args], capture_output=True, text=True)
    if r.returncode:
        sys.exit(r.stderr)
    return [json.loads(line) for line in r.stdout.splitlines()][-1]


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("build")
    ap.add_argument("--layers", type=int, default=4)
    ap.add_argument("--share", type=float, default=0.5)
    ap.add_argument("--skew", type=float, default=0, help="as of synth_gguf.py")
    ap.add_argument("--rounds", type=int, default=3)
    a = ap.parse_args()
    steel = os.path.join(a.build, "steel")
    with tempfile.TemporaryDirectory(prefix="steel-tier-", dir=os.environ.get("TMPDIR", "/var/tmp")) as folder:
        path = os.path.join(folder, "m.gguf")
        subprocess.run([sys.executable, os.path.join(HERE, "synth_gguf.py"), path, "--shape", "qwen3-30b-a3b", "--layers", str(a.layers), "--vocab", "8192",
                        *(["--skew", str(a.skew)] if a.skew else [])],
                       check=True, capture_output=True)
        p = json.loads(subprocess.run([steel, "plan", path, "--json", "--no-probe", "--device", "cpu"], capture_output=True, text=True).stdout)["here"]
        experts = next(x["memory"] for x in p["parts"] if x["part"] == "experts")
        memory = ["--expert-memory", str(int(experts * a.share))]
        print(f"{os.path.getsize(path) / 1e9:.2f} GB, experts {experts / 1e9:.2f} GB, {a.share:.0%} of them in memory\n")
        print("| test | all in memory, tok/s | from the file, tok/s | misses | read | disk | bound, tok/s | reached |\n|---|---|---|---|---|---|---|---|")
        for name, n, args in (("tg128", 128, ("-p", "0", "-n", "128")), ("pp512", 512, ("-p", "512", "-n", "0"))):
            whole, part, rates = [], [], []
            for _ in range(a.rounds):
                whole.append(bench(steel, path, *args))
                rates.append(disk_rate(path))
                part.append(bench(steel, path, *args, *memory))
            if len({r["logits_hash"] for r in whole + part}) != 1:
                sys.exit("the logits differ")
            full, rate = statistics.median(r["tok_s"] for r in whole), statistics.median(rates)
            got = statistics.median(r["tok_s"] for r in part)
            read = statistics.median(r["expert_bytes_read"] for r in part)
            missed = statistics.median(r["expert_misses"] / (r["expert_hits"] + r["expert_misses"]) for r in part)
            bound = n / (n / full + read / rate)
            print(f"| {name} | {full:,.1f} | {got:,.1f} | {missed:.0%} | {read / 1e9:.2f} GB | {rate / 1e9:.2f} GB/s | {bound:,.1f} | {got / bound:.0%} |", flush=True)


if __name__ == "__main__":
    main()

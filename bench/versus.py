"""Compares two servers: the same prompts and load generator, interleaved runs, medians.

    python3 bench/versus.py BUILD MODEL --other 'llama-server -m {model} -t 2 -np 16 -c 16384 -fa on --port {port}'
        [--steel '-t 2 -np 16 -c 4096'] [--clients 16] [--prompts 32] [--input 128] [--output 64] [--rounds 3]

Both run during all rounds, and one has work at a time. Exits 1 if the ratio is below --ratio.
--quiet COMMAND runs every round under a command that keeps the machine quiet.
"""
import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
import urllib.request


def start(cmd, port):
    p = subprocess.Popen(cmd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while True:
        assert p.poll() is None, f"ended: {shlex.join(cmd)}"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").read()
            return p
        except OSError:
            time.sleep(0.2)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("build")
    p.add_argument("model")
    p.add_argument("--other", required=True)
    p.add_argument("--steel", default="-t 2 -np 16 -c 4096")
    p.add_argument("--port", type=int, default=18200)
    p.add_argument("--clients", type=int, default=16)
    p.add_argument("--prompts", type=int, default=32)
    p.add_argument("--input", type=int, default=128)
    p.add_argument("--output", type=int, default=64)
    p.add_argument("--words-per-token", type=float, default=0.9)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--ratio", type=float, default=1.5)
    p.add_argument("--quiet", default="")
    args = p.parse_args()
    steel = os.path.join(args.build, "steel")
    ports = {"steel": args.port, "other": args.port + 1}
    other = shlex.split(args.other.format(model=args.model, port=ports["other"]))
    servers = [start([steel, "serve", args.model, "--port", str(ports["steel"]), *shlex.split(args.steel)], ports["steel"]),
               start(other, ports["other"])]
    rows = {name: [] for name in ports}
    try:
        for r in range(args.rounds):
            script = ";".join(shlex.join([steel, "bench", "serve", "--url", f"http://127.0.0.1:{ports[n]}", "--concurrency", str(args.clients),
                                          "--num-prompts", str(args.prompts), "--input-len", str(args.input), "--output-len", str(args.output),
                                          "--words-per-token", str(args.words_per_token), "--seed", str(r), "--json"])
                              for n in ports)
            out = subprocess.run([*shlex.split(args.quiet), "sh", "-c", script], stdout=subprocess.PIPE, text=True).stdout
            for name, line in zip(ports, out.splitlines()):
                d = json.loads(line)
                rows[name].append(d)
                print(f"round {r} {name:6} {d['output_tokens_per_second']:8.1f} tok/s  {d['input_tokens']} in, {d['output_tokens']} out, "
                      f"{d['errors']} errors, TTFT p50 {d['ttft_ms']['p50']:.0f} p99 {d['ttft_ms']['p99']:.0f} ms, ITL p50 {d['itl_ms']['p50']:.1f} "
                      f"p99 {d['itl_ms']['p99']:.1f} ms", flush=True)
    finally:
        for s in servers:
            s.terminate()
            s.wait()
    mid = {n: statistics.median(d["output_tokens_per_second"] for d in rows[n]) for n in rows}
    print(f"medians: steel {mid['steel']:.1f} tok/s, other {mid['other']:.1f} tok/s, ratio {mid['steel'] / mid['other']:.2f}")
    sys.exit(mid["steel"] < args.ratio * mid["other"])


main()

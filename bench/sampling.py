#!/usr/bin/env python3
"""The cost of sampling features: tokens a second of the same streams with a schema, penalties, biases,
log-probabilities and several choices, and plain. All in one run on one server, in turn.

    python3 bench/sampling.py --steel build/steel --model MODEL.gguf [--device cpu] [--streams 32] [--rounds 3]

The model needs a real vocabulary for the schema (bench/add_vocab.py MODEL OUT ggml-vocab-qwen2.gguf gives a synthetic
one Qwen's). Prints a table: median tok/s of the rounds, the share of the plain speed of the same round, and the server's
CPU time per token, which on a CPU shows the same and does not depend on other programs. Then the kinds of steps:
those with several tokens of a sequence (prompts, forced tokens) are not recorded on a GPU. Every run is reported on stderr.
--seconds ends the program after the current round. With --check it exits 1 if a variant is below its share: 95 % with a
schema, 85 % otherwise.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

# Outputs can end before --output. One that cannot would be shortened by its budget from the first token, which would measure
# something else.
SCHEMA = {"type": "array", "minItems": 2, "items": {
    "type": "object", "additionalProperties": False, "required": ["name", "id", "tags", "state", "price"],
    "properties": {"name": {"type": "string", "maxLength": 40}, "id": {"type": "integer", "minimum": 0, "maximum": 999999},
                   "tags": {"type": "array", "maxItems": 3, "items": {"type": "string", "maxLength": 12}},
                   "state": {"enum": ["new", "open", "in progress", "closed"]}, "price": {"type": "number"}}}}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "rows", "schema": SCHEMA}}}
BIAS = {"logit_bias": {str(7 * i + 1000): (i % 5) - 2 for i in range(100)}}
# name, fields, choices of a request, share of the plain speed
VARIANTS = [
    ("plain", {}, 1, 1.0),
    ("JSON schema", FORMAT, 1, 0.95),
    ("presence and frequency penalty", {"presence_penalty": 0.5, "frequency_penalty": 0.3}, 1, 0.85),
    ("repeat penalty, last 256", {"repeat_penalty": 1.1, "repeat_last_n": 256}, 1, 0.85),
    ("logit_bias of 100 tokens", BIAS, 1, 0.85),
    ("top_logprobs 5", {"logprobs": 5}, 1, 0.85),
    ("n = 4", {"n": 4}, 4, 0.85),
]


def serve(args, log):
    cmd = [args.steel, "serve", args.model, "--port", "0", "-np", str(args.streams), "-c", str(args.context)]
    cmd += ["--device", args.device] if args.device else []
    cmd += ["-t", str(args.threads)] if args.threads else []
    p = subprocess.Popen(cmd, stderr=open(log, "w"))
    for _ in range(3000):
        text = open(log).read()
        if "ready" in text:
            return p, int(text.split("://", 1)[1].split(":", 1)[1].split()[0].strip('"/'))
        if p.poll() is not None:
            break
        time.sleep(0.1)
    sys.exit("the server did not start:\n" + open(log).read())


STATS = {"tokens": "steel_generation_tokens_total", "forced": "steel_forced_tokens_total", "steps": "steel_steps_total",
         "ahead": "steel_steps_ahead_total", "reads": "steel_steps_read_total",
         "read_s": "steel_step_seconds_total read", "decode_s": "steel_step_seconds_total decode"}  # a label's value


def stats(port, pid):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as r:
        lines = r.read().decode().splitlines()
    found = {k: sum(float(l.split()[-1]) for l in lines if all(w in l for w in v.split()) and l[0] != "#")
             for k, v in STATS.items()}
    return {**found, "cpu_s": cpu_seconds(pid)}


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as f:
        return sum(map(int, f.read().rsplit(")", 1)[1].split()[11:13])) / os.sysconf("SC_CLK_TCK")


def run(args, port, fields, n, seed, prompts, output):
    constrained = "response_format" in fields
    cmd = [args.steel, "bench", "serve", "--url", f"http://127.0.0.1:{port}", "--concurrency", str(args.streams // n),
           "--num-prompts", str(max(prompts // n, 1)), "--input-len", str(args.input), "--output-len", str(output),
           "--temperature", str(args.temperature), "--seed", str(seed), "--words-per-token", "1", "--json",
           "--endpoint", "completions", *(["--keep-eos"] if constrained else [])]
    cmd += ["--extra", json.dumps(fields)] if fields else []
    out = subprocess.run(cmd, capture_output=True, text=True)
    if out.returncode:
        sys.exit(out.stdout + out.stderr)
    return json.loads(out.stdout.splitlines()[-1])["output_tokens_per_second"]


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--steel", default="build/steel")
    p.add_argument("--model", required=True)
    p.add_argument("--device")
    p.add_argument("--threads", type=int)
    p.add_argument("--streams", type=int, default=32)
    p.add_argument("--context", type=int, default=2048)
    p.add_argument("--input", type=int, default=32)
    p.add_argument("--output", type=int, default=256)
    p.add_argument("--requests", type=int, help="a run (default: one a stream)")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--seconds", type=float, help="start no round after this many seconds")
    p.add_argument("--temperature", type=float, default=0.8)
    p.add_argument("--only", help="variants whose names contain this, beside plain")
    p.add_argument("--check", action="store_true")
    args = p.parse_args()
    variants = [v for v in VARIANTS if not args.only or v[0] == "plain" or args.only in v[0]]
    rates = {v[0]: [] for v in variants}
    sums = {v[0]: dict.fromkeys([*STATS, "cpu_s"], 0.0) for v in variants}
    began = time.monotonic()

    def tell(text):
        print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as d:
        server, port = serve(args, os.path.join(d, "log"))
        try:
            tell("ready")
            for v in variants:  # warm: grammars compiled, steps recorded
                run(args, port, v[1], v[2], 99, args.streams, min(args.output, 32))
            for r in range(args.rounds):
                for v in variants if r % 2 == 0 else variants[::-1]:
                    before = stats(port, server.pid)
                    rates[v[0]].append(run(args, port, v[1], v[2], r, args.requests or args.streams, args.output))
                    for k, x in stats(port, server.pid).items():
                        sums[v[0]][k] += x - before[k]
                    tell(f"{v[0]}: {rates[v[0]][-1]:,.0f} tok/s")
                if args.seconds and time.monotonic() - began > args.seconds:
                    break
        finally:
            server.terminate()
            server.wait()
    bad = 0
    print(f"{args.streams} streams, {args.input} tokens in, {args.output} out, temperature {args.temperature}, "
          f"{len(rates['plain'])} rounds\n")
    print("| choosing | tok/s | of plain | least | CPU ms a token |\n|---|---|---|---|---|")
    for name, _, _, share in variants:
        of = statistics.median(a / b for a, b in zip(rates[name], rates["plain"]))
        bad += of < share
        least = "" if name == "plain" else f"{share:.0%}"
        cost = sums[name]["cpu_s"] / max(sums[name]["tokens"], 1) * 1e3
        print(f"| {name} | {statistics.median(rates[name]):,.0f} | {of:.1%} | {least} | {cost:.2f} |")
    print("\n| choosing | tokens | forced | steps | ahead | reading | ms of a step | ms of one that reads |")
    print("|---|---|---|---|---|---|---|---|")
    for name, *_ in variants:
        s = sums[name]
        decode = s["decode_s"] / max(s["steps"] - s["reads"], 1) * 1e3
        read = s["read_s"] / max(s["reads"], 1) * 1e3
        print(f"| {name} | {s['tokens']:.0f} | {s['forced']:.0f} | {s['steps']:.0f} | {s['ahead']:.0f} | "
              f"{s['reads']:.0f} | {decode:.2f} | {read:.2f} |")
    sys.exit(1 if args.check and bad else 0)


main()

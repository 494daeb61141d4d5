#!/usr/bin/env python3
"""Checks that another program reads what `steel convert` writes: compares its logits with Steel's and the golden ones.

  bench/convert_peer.py PROGRAM [FOLDER]... [--steel build/steel] [--type TYPE] [--set KEY=VALUE]...

FOLDER is a model (config.json, golden.bin) or has models; default: tests/golden. Each decoder is converted, in its own type or --type. Then
`PROGRAM MODEL.gguf GOLDEN.bin OUT.bin` runs. It reads the ids of GOLDEN.bin (little-endian i32 T, i32 V, i32 ids[T]; the rest is ignored). It writes
OUT.bin: the same header, then f32 logits[T][V] of one sequence at every position. With llama.cpp's llama.h that takes some thirty lines: load the
model, a context with type_k and type_v F32 and flash attention off, one batch of the T ids with all logits, llama_get_logits_ith for each.
PROGRAM may be several shell words, such as "python3 mine.py".

Prints for each model the mean KL divergence of PROGRAM's logits from Steel's on the same file (reference kernels, f32 cache), its largest
row, the mean KL of both from golden.bin, and the share of rows with the same top token. --set first changes config.json of a copy (KEY may be a
path with dots; VALUE is JSON), to find the cause of a difference. Then Steel's logits are those of the changed folder, and golden.bin
is used for its ids only.
"""
import argparse
import glob
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tests"))
from gguf_tools import mean_kl, read_logits  # noqa


def models(folders):
    for folder in folders:
        for path in [folder] if os.path.exists(folder + "/config.json") else sorted(glob.glob(folder + "/*")):
            if os.path.exists(path + "/config.json") and os.path.exists(path + "/golden.bin"):
                yield path


def run(*args, **env):
    return subprocess.run(args, capture_output=True, text=True, errors="replace", env={**os.environ, **env})


def what_it_says(r):
    lines = [x for x in r.stderr.splitlines() if x.strip()]
    told = [x for x in lines if "ASSERT" in x or "error" in x.lower()] or lines[-1:]
    return told[0] if told else f"exit {r.returncode}"


def changed(folder, to, changes):
    """A copy of the folder with a changed config.json."""
    os.makedirs(to)
    for f in os.listdir(folder):
        if f != "config.json":
            os.symlink(os.path.abspath(os.path.join(folder, f)), os.path.join(to, f))
    config = json.load(open(folder + "/config.json"))
    for change in changes:
        key, _, value = change.partition("=")
        *way, last = key.split(".")
        at = config if key.split(".")[0] in config else config.get("text_config", config)
        for step in way:
            at = at[step]
        if last not in at:
            sys.exit(f"--set {change}: config.json has no {key}")
        at[last] = json.loads(value)
    json.dump(config, open(to + "/config.json", "w"))
    return to


def top(row):
    return max(range(len(row)), key=row.__getitem__)


def compare(args, folder, tmp):
    """A line of the table."""
    golden, gguf = folder + "/golden.bin", tmp + "/m.gguf"
    if args.set:
        folder = changed(folder, tmp + "/changed", args.set)
    kind = ["--type", args.type] if args.type else []
    r = run(args.steel, "convert", folder, gguf, *kind)
    if r.returncode:
        return "not converted: " + what_it_says(r)
    r = run(args.steel, "logits", folder if args.set else gguf, "--ids", golden, "--out", tmp + "/ours.bin", "--kv-type", "f32", STEEL_ISA="ref")
    if r.returncode:
        return None  # no decoder
    exact, ours = read_logits(golden), read_logits(tmp + "/ours.bin")
    if len(exact[0]) != len(ours[0]):
        return None  # what it makes are vectors
    r = run(*shlex.split(args.program), gguf, golden, tmp + "/theirs.bin")
    if r.returncode or not os.path.exists(tmp + "/theirs.bin"):
        return "not read: " + what_it_says(r)
    theirs = read_logits(tmp + "/theirs.bin")
    rows = [mean_kl([a], [b]) for a, b in zip(ours, theirs)]
    same = sum(top(a) == top(b) for a, b in zip(ours, theirs)) / len(ours)
    text = f"{sum(rows) / len(rows):.1e} | {max(rows):.1e} | {100 * same:.0f} %"
    if not args.set:
        text += f" | {mean_kl(exact, theirs):.1e} | {mean_kl(exact, ours):.1e}"
    return text


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("program", metavar="PROGRAM")
    p.add_argument("folders", metavar="FOLDER", nargs="*")
    p.add_argument("--steel", default=os.path.join(ROOT, "build/steel"))
    p.add_argument("--type", help="as of `steel convert`; default: each model's own")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change config.json first")
    args = p.parse_args()
    print("| model | KL from Steel | largest | same top token |" + ("" if args.set else " KL from golden | Steel's |"))
    print("|---|---|---|---|" + ("" if args.set else "---|---|"))
    for folder in models(args.folders or [os.path.join(ROOT, "tests/golden")]):
        tmp = tempfile.mkdtemp(prefix="steel-peer-")
        try:
            line = compare(args, folder, tmp)
        finally:
            shutil.rmtree(tmp)
        if line:
            print(f"| {os.path.basename(folder.rstrip('/'))} | {line} |", flush=True)


main()

#!/usr/bin/env python3
"""Instructions per weight and input row of products on ARM, counted under qemu-user.

  count.py [-cpu CPU] [-L SYSROOT] PROGRAM [TYPE ...]

PROGRAM takes TYPE INPUTS OUTPUTS ROWS RUNS, as build-aarch64-linux-gnu/bench/product does. The difference between
two runs and one leaves start, quantising and packing of weights out. Needs qemu-aarch64 with plugins."""
import os
import subprocess
import sys
import tempfile

INPUTS, OUTPUTS, ROWS = 2048, 512, (1, 4, 32, 512)
HERE = os.path.dirname(os.path.abspath(__file__))


def count(qemu, program, *args):
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "count")
        subprocess.run([*qemu, program, *map(str, args)], check=True, env=dict(os.environ, COUNT_FILE=out),
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with open(out) as f:
            return int(f.read())


def main():
    args, options = sys.argv[1:], []
    while args and args[0].startswith("-"):
        options += args[:2]
        args = args[2:]
    if not args:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        plugin = os.path.join(folder, "instructions.so")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", plugin, os.path.join(HERE, "instructions.c")], check=True)
        qemu = ["qemu-aarch64", *(options or ["-cpu", "max"]), "-plugin", plugin]
        for kind in args[1:] or ["Q4_K", "Q6_K", "Q8_0", "BF16"]:
            per = []
            for rows in ROWS:
                one, two = (count(qemu, args[0], kind, INPUTS, OUTPUTS, rows, runs) for runs in (1, 2))
                per.append((two - one) / INPUTS / OUTPUTS / rows)
            print(f"{kind:6}", *(f"{rows} rows {n:.3f}" for rows, n in zip(ROWS, per)), flush=True)


main()

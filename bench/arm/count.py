#!/usr/bin/env python3
r"""Instructions per weight and input row of products on ARM, counted under qemu-user.

  count.py [-cpu CPU] [-L SYSROOT] WRITER PROGRAM[,PROGRAM...] [TYPE ...]

WRITER is this machine's build/bench/product, which writes the file of each type. A PROGRAM takes FILE linear|wide|experts ROWS RUNS, as
build-aarch64-linux-gnu/bench/product does, and peer.cpp for llama.cpp's ggml:

  cmake -S llama.cpp/ggml -B b -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DGGML_NATIVE=OFF \
    -DGGML_CPU_ARM_ARCH=armv8.6-a+dotprod+i8mm -DGGML_OPENMP=OFF -DBUILD_SHARED_LIBS=OFF && cmake --build b
  aarch64-linux-gnu-g++ -O2 -static-libstdc++ -static-libgcc -Illama.cpp/ggml/include -o peer bench/arm/peer.cpp b/src/libggml.a b/src/libggml-cpu.a b/src/libggml-base.a -lpthread -ldl

The difference between two runs and one leaves start, packing of weights and file reading out. Products of experts are divided
by the weights that a row is multiplied with. The programs' first results must agree to 5 %. Needs qemu-aarch64 with plugins."""
import os
import subprocess
import sys
import tempfile

IN, OUT, FF, USED = 2048, 512, 512, 4  # bench/product.c
CASES = [("wide", 1), ("linear", 4), ("linear", 512), ("experts", 1), ("experts", 64), ("experts", 512)]
PER_ROW = {"linear": IN * OUT, "wide": IN * IN, "experts": 3 * IN * FF * USED}
HERE = os.path.dirname(os.path.abspath(__file__))


def count(qemu, program, *args):
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "count")
        ran = subprocess.run([*qemu, program, *map(str, args)], check=True, env=dict(os.environ, COUNT_FILE=out),
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        with open(out) as f:
            return int(f.read()), [float(x) for x in ran.stdout.split()]


def agree(a, b):
    return max(abs(x - y) for x, y in zip(a, b)) <= 0.05 * max(map(abs, a))


def main():
    args, options = sys.argv[1:], []
    while args and args[0].startswith("-"):
        options += args[:2]
        args = args[2:]
    if len(args) < 2:
        sys.exit(__doc__)
    writer, programs = args[0], args[1].split(",")
    with tempfile.TemporaryDirectory() as folder:
        plugin, weights = os.path.join(folder, "instructions.so"), os.path.join(folder, "weights.gguf")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", plugin, os.path.join(HERE, "instructions.c")], check=True)
        qemu = ["qemu-aarch64", *(options or ["-cpu", "max"]), "-plugin", plugin]
        for kind in args[2:] or ["Q4_K", "Q6_K", "Q8_0", "BF16"]:
            subprocess.run([writer, "write", weights, kind], check=True)
            for what, rows in CASES:
                if (kind, what, rows) == ("BF16", "experts", 512):
                    continue  # ggml's is plain C: 64 rows say the same in less time
                per, results = [], []
                for program in programs:
                    (one, first), (two, _) = (count(qemu, program, weights, what, rows, runs) for runs in (1, 2))
                    per.append((two - one) / rows / PER_ROW[what])
                    results.append(first)
                if not all(agree(results[0], r) for r in results):
                    sys.exit(f"{kind} {what} {rows}: results differ: {results}")
                print(f"{kind:6} {what:8} {rows:4}", *(f"{n:8.4f}" for n in per), flush=True)


main()

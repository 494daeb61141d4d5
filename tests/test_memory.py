#!/usr/bin/env python3
"""Weights stay compressed: the resident size of a loaded model is at most 1.05 x its file plus a fixed
allowance for KV, scratch and the program, repacked or not; loading never holds two copies."""
import os, resource, subprocess, sys, tempfile

STEEL = os.path.join(sys.argv[1] if len(sys.argv) > 1 else "build", "steel")
SYNTH = "bench/synth_gguf.py"
ALLOWANCE = 64 << 20


def peak_rss(cmd):
    """Peak resident bytes of one command."""
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.execv(cmd[0], cmd)
    _, status, usage = os.wait4(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, cmd
    return usage.ru_maxrss * 1024


def main():
    with tempfile.TemporaryDirectory() as tmp:
        model = os.path.join(tmp, "m.gguf")
        subprocess.run([sys.executable, SYNTH, model, "--shape", "qwen3-30b-a3b", "--layers", "1", "--vocab", "8192"],
                       check=True, stderr=subprocess.DEVNULL)
        size = os.path.getsize(model)
        for extra in ([], ["--no-repack"]):
            rss = peak_rss([STEEL, "bench", model, "-p", "8", "-n", "1", "-r", "1", *extra])
            print(f"file {size / 1e6:.0f} MB, peak {rss / 1e6:.0f} MB, {rss / size:.3f} x {' '.join(extra)}")
            if "asan" not in STEEL and "tsan" not in STEEL:  # sanitizers have memory of their own
                assert rss <= 1.05 * size + ALLOWANCE, (rss, size)


main()

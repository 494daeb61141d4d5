#!/usr/bin/env python3
"""Experts in host memory beside a simulated GPU (make test-sim): golden families and synthetic mixtures whose experts are divided at random
between GPU, RAM and file match the same model wholly on the GPU, as prompts and as decodes. A limit of the GPU's memory divides them by
itself; what cannot be is refused by name; a file that is cut while its experts are read is an error.
`offload_sim.py BUILD STEEL` does the same with another program, on a real GPU. OFFLOAD_FAMILIES=name,...: these only."""
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from gguf_tools import mean_kl, read_logits  # noqa: E402

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
STEEL = sys.argv[2] if len(sys.argv) > 2 else os.path.join(BUILD, "sim", "steel")
WORK = tempfile.TemporaryDirectory(prefix="steel-offload-")
GOLDEN = "tests/golden"
# Rounding alone: the two kinds of kernels round inputs differently.
LIMIT = 1e-5
IDS = os.path.join(WORK.name, "ids")
with open(IDS, "wb") as f:
    f.write(struct.pack("<2i24i", 24, 0, *(i * 7 % 90 + 1 for i in range(24))))


ENV = dict(os.environ, STEEL_CONFIG="", XDG_CACHE_HOME=os.path.join(WORK.name, "cache"))


def steel(*args, code=0, pick=""):
    r = subprocess.run([STEEL, *args], env=dict(ENV, STEEL_PICK=pick), capture_output=True, text=True, timeout=900)
    assert r.returncode == code, (args, r.returncode, r.stderr)
    return r


def logits(path, ids, *args, pick=""):
    out = os.path.join(WORK.name, "logits")
    err = steel("logits", path, "--ids", ids, "-o", out, "--device", "cuda", "-t", "2", "--kv-type", "f32", *args, pick=pick).stderr
    return read_logits(out), err


def plan(path, *args):
    return json.loads(steel("plan", path, "--json", "--no-probe", "--device", "cuda", "-c", "256", "-np", "1", *args).stdout)["here"]


def experts(path, *args):
    return next(p for p in plan(path, *args)["parts"] if p["part"] == "experts")


def divided(path, context="256", *command):
    """--gpu-memory with which a command (logits) has some experts, not all, in host memory alone: a little less than all of them need."""
    one = os.path.join(WORK.name, "one")
    with open(one, "wb") as f:
        f.write(struct.pack("<3i", 1, 0, 1))
    command = command or ("logits", path, "--ids", one, "-o", os.devnull, "--kv-type", "f32")
    low, high = 1 << 28, 1 << 31
    while True:
        mid = (low + high) // 2
        args = ["-c", context, "--gpu-memory", str(mid)]
        r = subprocess.run([STEEL, *command, "--device", "cuda", *args], env=ENV, capture_output=True, text=True)
        if r.returncode == 0 and "experts used most are on the GPU" in r.stderr:
            return args
        assert high - low > 4096, r.stderr
        low, high = (low, mid) if r.returncode == 0 and "in host memory" not in r.stderr else (mid, high)


def wholes(path, ids):
    """On the GPU alone: all rows at once, and one by one. Near ties of routers are decided otherwise by rounding alone: no split can be nearer than these two are
    to each other."""
    both = [logits(path, ids, *chunk)[0] for chunk in ([], ["--chunk", "1"])]
    return both, max(LIMIT, mean_kl(*both))


def check(name, path, ids, args, whole, limit=LIMIT, pick=""):
    got, err = logits(path, ids, *args, pick=pick)
    kl = mean_kl(whole["--chunk" in args], got)
    assert "in host memory" in err or "on the GPU (" in err, (name, args, err)
    assert kl <= limit, (name, args, kl, limit)
    print(f"{name} {' '.join(args)} {pick}: KL {kl:.1e}", flush=True)


def test_families(rng):
    named = os.environ.get("OFFLOAD_FAMILIES")
    for family in named.split(",") if named else ["qwen3moe", "gpt_oss_mxfp4", "qwen3_next", "deepseek_v3", "glm4_moe", "mixtral", "minimax_m2"]:
        path, ids = f"{GOLDEN}/{family}", f"{GOLDEN}/{family}/golden.bin"
        whole, limit = wholes(path, ids)
        for pick in ("away_copied", "away_hosted"):
            check(family, path, ids, ["--cpu-moe"], whole, limit, pick)
        layer = rng.randrange(2)
        check(family, path, ids, ["-ot", "exps=CPU" if family in ("deepseek_v3", "glm4_moe") else f"blk\\.{layer}\\..*_exps=CPU", "--chunk", "1"], whole, limit)


def synthetic(quant, layers=3):
    path = os.path.join(WORK.name, f"{quant}-{layers}.gguf")
    subprocess.run([sys.executable, "bench/synth_gguf.py", path, "--shape", "tiny-moe", "--layers", str(layers), "--quant", quant], check=True, capture_output=True)
    return path


def test_tiers(rng):
    """GPU and RAM, and the file as well."""
    for quant in ("q4_k_m", "q8_0"):
        path = synthetic(quant, 10)  # more than the margin that the engine leaves
        whole, limit = wholes(path, IDS)
        some, ram = divided(path), ["--expert-memory", str(experts(path)["memory"] // 4)]
        for args in (some, [*some, *ram], ["--n-cpu-moe", str(rng.randrange(1, 10)), *ram, "--chunk", "1"]):
            check(quant, path, IDS, args, whole, limit)
        check(quant, path, IDS, some, whole, limit, "away_copied")


def uses(path, args, tokens):
    """Share of the uses of experts that the host computed while tokens were generated."""
    out = steel("bench", path, "--device", "cuda", "--skip-cost", "--no-warmup", "-p", "0", "-n", str(tokens), "-b", "4", "-r", "1", "--json", *args).stdout
    last = json.loads(out.splitlines()[-1])
    return last["experts_on_host"] / (last["experts_on_host"] + last["experts_on_device"])


def test_use():
    """Experts used most move to the GPU while it generates, without another result, and are there at the next start."""
    path = os.path.join(WORK.name, "skewed.gguf")
    subprocess.run([sys.executable, "bench/synth_gguf.py", path, "--shape", "tiny-moe", "--layers", "10", "--quant", "q4_k_m", "--skew", "1.2"], check=True, capture_output=True)
    args = divided(path, "64", "bench", path, "--skip-cost", "--no-warmup", "-p", "0", "-n", "1", "-b", "4", "-r", "1")
    first = uses(path, args, 36)
    kept = os.listdir(os.path.join(ENV["XDG_CACHE_HOME"], "steel", "experts"))
    assert len(kept) == 1, kept
    second = uses(path, args, 4)
    print(f"skewed: the host computed {first:.3f} of the uses, after the next start {second:.3f}", flush=True)
    assert second < first, (first, second)
    whole, limit = wholes(path, IDS)  # the placement is another now
    args = divided(path)
    for more in ([], ["--chunk", "1"]):
        check("skewed", path, IDS, [*args, *more], whole, limit)
    check("skewed", path, IDS, args, whole, limit, "away_copied")


def test_plan():
    """The table has every byte, wherever it is."""
    path = synthetic("q8_0")
    whole = experts(path)
    for n in range(4):
        part = experts(path, "--n-cpu-moe", str(n))
        assert abs(part["memory"] - whole["memory"] * (3 - n) / 3) < 0.02 * whole["memory"], (n, part, whole)
        assert abs(part["host"] - whole["memory"] * n / 3) < 0.03 * whole["memory"], (n, part, whole)
        less = experts(path, "--n-cpu-moe", str(n), "--expert-memory", str(max(part["host"] // 2, 1))) if n else part
        assert less["memory"] == part["memory"] and less["host"] + less["file"] == part["host"], (n, less, part)


def test_refused():
    path = synthetic("q4_k_m")
    for args, why in ((["-ot", "attn_q=CPU"], "matches no experts"), (["-ot", "exps=CUDA0"], "expected REGEX=CPU"), (["-ngl", "2"], "-ngl 2: a layer is not divided"),
                      (["--gpu-memory", "100M"], "needs"), (["--cpu-moe", "--no-repack"], "--no-repack")):
        r = subprocess.run([STEEL, "logits", path, "--ids", IDS, "-o", os.devnull, "--device", "cuda", *args], capture_output=True, text=True)
        assert r.returncode in (1, 2) and why in r.stderr, (args, r.stderr)
    for model, why in ((f"{GOLDEN}/qwen3", "the model has no experts"), (f"{GOLDEN}/nemotron_h", "experts on projections"), ):
        r = subprocess.run([STEEL, "logits", model, "--ids", f"{model}/golden.bin", "-o", os.devnull, "--device", "cuda", "--cpu-moe"], capture_output=True, text=True)
        if model.endswith("nemotron_h") and r.returncode == 0:
            continue  # this one has no projections
        assert r.returncode == 1 and why in r.stderr, (model, r.stderr)


def test_cut():
    """The file is cut while its experts are read."""
    path = os.path.join(WORK.name, "cut.gguf")
    shutil.copy(synthetic("q8_0"), path)
    p = subprocess.Popen([STEEL, "bench", path, "--device", "cuda", "--skip-cost", "--no-warmup", "-p", "1", "-n", "3000", "-r", "1", "-c", "4096", "--cpu-moe",
                          "--expert-memory", str(experts(path)["memory"] // 4)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = ""
    while "pp1" not in line:  # the first test is done
        line = p.stdout.readline()
        assert line, p.communicate()
    os.truncate(path, os.path.getsize(path) // 3)
    out, err = p.communicate(timeout=900)
    assert p.returncode == 1 and "truncated" in err and "tg" not in out, (p.returncode, out, err)
    print("cut: an error", flush=True)


def main():
    rng = random.Random(int(os.environ.get("SEED", "7")))
    test_refused()
    test_plan()
    test_tiers(rng)
    test_use()
    test_cut()
    test_families(rng)


main()

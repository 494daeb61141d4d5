#!/usr/bin/env python3
"""--expert-memory: experts that stay in the file. The same bytes as with all of them in memory, whatever fits; less memory; what cannot be
is refused by name; a file that is cut while experts are read is an error, never a wrong answer."""
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from serverlib import HANG, run_tests, sanitized  # noqa: E402

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
STEEL = os.path.join(BUILD, "steel")
WORK = tempfile.TemporaryDirectory(prefix="steel-tier-")


IDS = os.path.join(WORK.name, "ids")
with open(IDS, "wb") as f:
    f.write(struct.pack("<2i48i", 48, 0, *(i * 7 % 90 + 1 for i in range(48))))


def model(quant, layers=3):
    path = os.path.join(WORK.name, f"{quant}-{layers}.gguf")
    if not os.path.exists(path):
        subprocess.run([sys.executable, "bench/synth_gguf.py", path, "--shape", "tiny-moe", "--layers", str(layers), "--quant", quant], check=True, capture_output=True)
    return path


def bench(path, *args, gen="12"):
    r = subprocess.run([STEEL, "bench", path, "--device", "cpu", "--json", "--skip-cost", "--no-warmup", "-r", "1", "-p", "40", "-n", gen, "-b", "1,3", *args],
                       capture_output=True, text=True, timeout=HANG)
    assert r.returncode == 0, r.stderr
    return [json.loads(line) for line in r.stdout.splitlines()]


def logits(path, *args, code=0):
    out = os.path.join(WORK.name, "logits")
    r = subprocess.run([STEEL, "logits", path, "--device", "cpu", "-o", out, "--ids", IDS, *args],
                       capture_output=True, text=True, timeout=HANG)
    assert r.returncode == code, (args, r.stderr)
    return open(out, "rb").read() if code == 0 else r.stderr


def experts_of(path, *args):
    p = json.loads(subprocess.run([STEEL, "plan", path, "--json", "--no-probe", "--device", "cpu", *args], capture_output=True, text=True).stdout)["here"]
    return next(x for x in p["parts"] if x["part"] == "experts")


def places(path, n, of=16):
    """--expert-memory for n of a layer's experts."""
    return ["--expert-memory", f"{experts_of(path)['memory'] * n // of // 1024 + 1}K"]


def test_same_bytes():
    """From two places of 16 experts to all of them, in formats with one and two kinds of blocks; many rows, one row, three."""
    for quant, sizes in (("q4_k_m", (2, 3, 9, 16)), ("q8_0", (5,)), ("mxfp4", (4,)), ("iq2_xxs", (2,)), ("bf16", (6,))):
        path = model(quant)
        want = [r["logits_hash"] for r in bench(path)]
        for n in sizes:
            got = bench(path, *places(path, n))
            assert [r["logits_hash"] for r in got] == want, (quant, n)
            last = got[-1]
            assert last["expert_memory"] == experts_of(path)["memory"] * n // 16, (quant, n, last)
            assert last["expert_misses"] > (0 if n == 16 else 2 * 3 * 16) and last["expert_bytes_read"] > 0
            assert n < 16 or last["expert_misses"] <= 2 * 3 * 16  # each is read once


def test_families():
    """Folders with a tensor for each expert, biases, groups, a shared expert, adapters."""
    ran = 0
    for family, size in (("qwen3moe", 3), ("deepseek_v3", 4), ("qwen3_5_moe", 3), ("mixtral", 4), ("glm4_moe", 3), ("olmoe", 3), ("granitemoe", 3)):
        path = f"tests/golden/{family}"
        args = ["--expert-memory", f"{experts_of(path)['memory'] // 1024 * 2 // size}K"]
        r = subprocess.run([STEEL, "logits", path, "--device", "cpu", *args, "-o", os.devnull, "--ids", IDS], capture_output=True, text=True)
        if r.returncode:
            assert "no experts that can be read" in r.stderr or "fewer than two" in r.stderr, r.stderr
            continue
        assert logits(path, *args) == logits(path), family
        ran += 1
    assert ran >= 4, ran
    lora = "tests/golden/qwen3moe-lora"
    adapter = next((os.path.join(lora, n) for n in ("", "adapter", "lora") if os.path.exists(os.path.join(lora, n, "adapter_config.json"))), None)
    if adapter:
        base = ["--lora", adapter]
        assert logits("tests/golden/qwen3moe", *base, "--expert-memory", "60K") == logits("tests/golden/qwen3moe", *base)


def test_memory():
    """What is not in memory takes none."""
    if sanitized(BUILD):
        print("skipped: test_tier.py memory: sanitizers have memory of their own")
        return
    path = model("q8_0", 8)
    peaks = []
    few = places(path, 4)
    for args in ([], few):
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.execv(STEEL, [STEEL, "bench", path, "--device", "cpu", "-p", "8", "-n", "8", "-r", "1", "--skip-cost", *args])
        _, status, usage = os.wait4(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        peaks.append(usage.ru_maxrss * 1024)
    experts = experts_of(path, *few)
    saved = experts["file"] - experts["memory"]
    assert experts["memory"] == experts["file"] // 4 and saved > 30 << 20, experts
    assert peaks[0] - peaks[1] > 0.8 * saved, (peaks, saved)


def test_by_itself():
    """A model whose experts do not fit what is free: they stay in the file, and one line says so."""
    if sanitized(BUILD):
        print("skipped: test_tier.py by itself: sanitizers reserve address space")
        return
    path = os.path.join(WORK.name, "large.gguf")
    subprocess.run([sys.executable, "bench/synth_gguf.py", path, "--shape", "qwen3-30b-a3b", "--layers", "4", "--vocab", "8192", "--empty"], check=True, capture_output=True)
    size = os.path.getsize(path)
    limit = (size + size // 2) // 1024 + 600000  # address space: the file, half of it again, the program and its threads
    r = subprocess.run(["sh", "-c", f"ulimit -v {limit}; exec \"$0\" run \"$1\" --device cpu -t 2 --raw -n 4 -p x -c 512", STEEL, path], capture_output=True, text=True, timeout=HANG,
                       env=dict(os.environ, MALLOC_ARENA_MAX="1"))  # an arena a thread would take address space at random
    assert "of experts are in memory, the others are read from the file" in r.stderr, r.stderr
    assert r.returncode == 0 or "no vocabulary" in r.stderr or "tokenizer" in r.stderr, r.stderr


def test_refused():
    path = model("q4_k_m")
    for args, why in ((["--expert-memory", "100K"], "fewer than two experts"), (["--expert-memory", "4M", "--no-repack"], "--no-repack"),
                      (["--expert-memory", "x"], "use a size"), (["--expert-memory", "0"], "use a size")):
        r = subprocess.run([STEEL, "logits", path, "--device", "cpu", "--ids", IDS, "-o", os.devnull, *args], capture_output=True, text=True)
        assert r.returncode in (1, 2) and why in r.stderr, (args, r.stderr)
    assert "no experts that can be read" in logits("tests/golden/qwen3", "--expert-memory", "1M", code=1)


def test_cut():
    """The file is cut while experts are read."""
    path = os.path.join(WORK.name, "cut.gguf")
    shutil.copy(model("q4_k_m"), path)
    p = subprocess.Popen([STEEL, "bench", path, "--device", "cpu", "--skip-cost", "--no-warmup", "-p", "1", "-n", "30000", "-r", "1", "-c", "32768", *places(path, 3)],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = ""
    while "pp1" not in line:  # the first test is done
        line = p.stdout.readline()
        assert line, p.communicate()
    os.truncate(path, os.path.getsize(path) // 3)
    out, err = p.communicate(timeout=HANG)
    assert p.returncode == 1 and "truncated" in err, (p.returncode, out, err)
    assert "tg" not in out, out


if __name__ == "__main__":
    with WORK:
        run_tests([v for k, v in sorted(globals().items()) if k.startswith("test_")])

#!/usr/bin/env python3
"""steel plan --json of large models that are only names and shapes (bench/synth_gguf.py --empty): shares add up, what is whole
is named, what fits is right. And of golden models with a number of their config spoiled: a plan, or one line that names the folder.
That the plan is what ranks load and send is checked in test_plan.c."""
import json
import os
import random
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from serverlib import HANG, run_tests, sanitized  # noqa: E402

BUILD = sys.argv[1] if len(sys.argv) > 1 else "build"
STEEL = os.path.join(BUILD, "steel")
LITTLE = "" if sanitized(BUILD) else "ulimit -v 2000000; "  # sanitizers reserve address space
WORK = tempfile.TemporaryDirectory(prefix="steel-plan-")


def model(shape, **more):
    path = os.path.join(WORK.name, shape + ".gguf")
    if not os.path.exists(path):
        subprocess.run([sys.executable, "bench/synth_gguf.py", path, "--shape", shape, "--empty",
                        *(x for k, v in more.items() for x in ("--" + k, str(v)))], check=True, capture_output=True)
    return path


os.environ["XDG_CACHE_HOME"] = WORK.name  # of measured speeds


def plan(path, *args, code=0):
    r = subprocess.run([STEEL, "plan", path, "--json", *args], capture_output=True, text=True)
    assert r.returncode == code, (path, args, r.returncode, r.stderr)
    return json.loads(r.stdout)


def total(p, key):
    return sum(r[key] for r in p["ranks"])


def copies(p):
    return {c["part"]: c for c in p["whole"]}


def test_shares_add_up():
    """What is not whole is there once."""
    for shape, args, tp in (("qwen3-30b-a3b", ["--tp", "2"], 2), ("qwen3-30b-a3b", ["--tp", "4", "--ep"], 4),
                            ("deepseek-v3", ["--tp", "8", "--ep"], 8), ("llama-3.1-8b", ["--tp", "4"], 4),
                            ("gpt-oss-20b", ["--tp", "4", "--ep"], 4), ("glm-4.7-flash", ["--tp", "4", "--ep"], 4)):
        p = plan(model(shape), *args)
        one, first = p["one"], p["ranks"][0]
        assert len(p["ranks"]) == tp
        more = total(p, "weight_bytes") - one["weight_bytes"] - (tp - 1) * first["whole_bytes"]
        assert more == 0 or (shape == "gpt-oss-20b" and 0 < more < 1e-3 * one["weight_bytes"]), shape  # biases of sums: zeros elsewhere
        assert sum(c["bytes"] for c in p["whole"]) == first["whole_bytes"]
        assert sum(r["heads"][1] for r in p["ranks"]) == one["heads"][1], shape
        assert sum(r["vocabulary"]["n"] for r in p["ranks"]) == one["vocabulary"]["n"], shape
        at = 0
        for r in p["ranks"]:
            assert r["vocabulary"]["first"] == at
            at += r["vocabulary"]["n"]
        if "--ep" in args:
            assert sum(r["experts"]["n"] for r in p["ranks"]) == one["experts"]["n"], shape
        assert first["weight_bytes"] < 1.1 / tp * one["weight_bytes"], shape


def test_stages():
    p = plan(model("qwen3-235b-a22b"), "--tp", "2", "--pp", "3")
    # the last stage has the head, and layers of a Q4_K_M are not alike
    assert [r["layers"]["n"] for r in p["ranks"]] == [31, 31, 32, 32, 31, 31]
    assert [r["layers"]["first"] for r in p["ranks"]] == [0, 0, 31, 31, 63, 63]
    # the embedding is in the first stage, the head in the last
    assert [bool(r["vocabulary"]["n"]) for r in p["ranks"]] == [True, True, False, False, True, True]
    assert sum(r["cache_token_bytes"] for r in p["ranks"]) == p["one"]["cache_token_bytes"]
    # stages of one rank: first and last share the head, but on GPUs, or where it is the embedding, too
    for path, args, stages, vocabulary in ((model("qwen3-30b-a3b"), [], 3, [75968, 0, 75968]),
                                           (model("qwen3-30b-a3b"), ["--gpu", "h200"], 3, [151936, 0, 151936]),
                                           ("tests/golden/gemma3", [], 2, None)):
        p = plan(path, "--pp", str(stages), *args)
        assert [r["vocabulary"]["n"] for r in p["ranks"]] == (vocabulary or [p["one"]["vocabulary"]["n"]] * stages), path
        if vocabulary:  # the last norm is everywhere
            assert 0 <= total(p, "weight_bytes") - p["one"]["weight_bytes"] < 1e-5 * p["one"]["weight_bytes"]
        assert sum(r["layers"]["n"] for r in p["ranks"]) == p["one"]["layers"]["n"]


def test_what_is_whole_and_why():
    p = plan(model("qwen3-30b-a3b"), "--tp", "8")
    # 768 hidden units are three blocks of a K-quant: whole experts are shared out
    assert [r["experts"]["n"] for r in p["ranks"]] == [16] * 8 and "experts" not in copies(p)
    assert copies(p)["routers and gates"]["layers"] == 48
    p = plan(model("qwen3-30b-a3b"), "--tp", "2", "--gpu", "h200")  # on GPUs they are cut all the same
    assert p["gpu"] and [r["expert_width"] for r in p["ranks"]] == [[512, 512], [256, 256]]
    p = plan(model("qwen3-30b-a3b"), "--tp", "8")
    assert copies(p)["KV heads"]["why"] == "4 for 8 ranks: each is on 2 of them, with its cache"
    assert all(r["kv_heads"] == [1, 1] for r in p["ranks"])
    assert total(p, "cache_token_bytes") == 2 * p["one"]["cache_token_bytes"]
    p = plan(model("deepseek-v3"), "--tp", "4")
    assert copies(p)["latent projections"]["layers"] == 61
    assert all(r["cache_token_bytes"] == p["one"]["cache_token_bytes"] for r in p["ranks"])  # the latent is whole
    p = plan("tests/golden/minimax_m2", "--tp", "2")
    assert copies(p)["attention"]["why"] == "its QK-norm is over all heads"
    p = plan("tests/golden/qwen3moe", "--tp", "1")
    assert not p["whole"] and p["steps"][0]["messages"] == 0


def test_what_fits():
    path = model("qwen3-235b-a22b")
    p = plan(path, "--tp", "4", "--memory", "80G", "-c", "32768")
    assert p["fits"] and all(r["fits"] for r in p["ranks"])
    rank = p["ranks"][0]
    assert rank["cache_bytes"] == 32768 * rank["cache_token_bytes"]
    left = 0.9 * 80 * 2**30 - (rank["needed_bytes"] - rank["cache_bytes"])
    assert abs(p["room_tokens"] - left // rank["cache_token_bytes"]) <= 1
    # twice as many sequences need twice the cache
    assert plan(path, "--tp", "4", "--memory", "80G", "-c", "32768", "-np", "2")["ranks"][0]["cache_bytes"] == 2 * rank["cache_bytes"]
    assert plan(path, "--tp", "4", "--memory", "80G", "-c", "32768", "--kv-type", "q8_0")["ranks"][0]["cache_bytes"] < 0.54 * rank["cache_bytes"]
    r = subprocess.run([STEEL, "plan", path, "--tp", "2", "--memory", "40G", "--ep"], capture_output=True, text=True)
    assert r.returncode == 1 and r.stderr.count("\n") == 1 and "; --tp 8 would" in r.stderr, r.stderr
    assert not plan(path, "--tp", "2", "--memory", "40G", code=1)["fits"]


def test_states():
    """Checkpoints of recurrent states: 64 on a CPU, fewer where they would take more than a quarter of the room."""
    rank = plan("tests/golden/qwen3_5", "--memory", "8G", "-c", "1024")["ranks"][0]
    assert rank["checkpoints"] == 64 and rank["fits"]
    assert rank["cache_bytes"] == 1024 * rank["cache_token_bytes"] + (1 + 64) * rank["state_bytes"]
    assert plan("tests/golden/qwen3_5", "--memory", "8G", "-np", "100")["ranks"][0]["checkpoints"] == 200
    assert plan("tests/golden/qwen3", "--memory", "8G")["ranks"][0]["checkpoints"] == 0
    beside = rank["needed_bytes"] - rank["cache_bytes"]
    tight = int((beside + 81 * rank["state_bytes"]) / 0.9)
    assert plan("tests/golden/qwen3_5", "--memory", "%dK" % (tight // 1024 + 1), "-c", "512")["ranks"][0]["checkpoints"] in (19, 20, 21)


def test_prediction():
    """The parts make the whole, slower links are slower, and one H200 is what was measured there (docs/communication.md)."""
    path = model("qwen3-30b-a3b")
    for args in ([], ["--tp", "2"], ["--pp", "2"], ["--tp", "4", "--ep"], ["--tp", "2", "--pp", "2"]):
        before = 0
        for link in ("nvlink", "pcie5", "pcie4", "100g", "25g"):
            for s in plan(path, *args, "--link", link)["steps"]:
                q = s["prediction"]
                rest = q["layers"] + q["latency"] + q["transfer"]
                least, most = max(q["memory"], q["compute"]) + rest, q["memory"] + q["compute"] + rest
                most = most if "--pp" in args else least  # each stage has its own longer one
                assert least - 1e-9 < q["seconds"] < most + 1e-9, (args, s)
                assert q["bound"] in ("memory", "compute", "layers", "latency", "bandwidth")
            assert q["seconds"] >= before
            before = q["seconds"] if args else 0
    for seqs, depth, measured in ((1, 64, 748), (1, 8192, 616), (4, 320, 1554), (16, 320, 3342), (32, 320, 4722), (64, 320, 8105)):
        said = plan(path, "--link", "nvlink", "--seqs", str(seqs), "--depth", str(depth))["steps"][0]["prediction"]["tokens_per_second"]
        assert 0.85 < said / measured < 1.15, (seqs, depth, said, measured)


def test_hostile_configs():
    values = [-1, 0, 1, 3, 7, 1 << 20, 1 << 31, 1 << 40, 1e300, -0.5, "x", [], {}, True, None]
    draw, ran, refused = random.Random(3), 0, 0
    for family in ("qwen3moe", "deepseek_v3", "gemma4_moe", "qwen3_next", "gpt_oss_mxfp4", "bert"):
        source, folder = f"tests/golden/{family}", os.path.join(WORK.name, family)
        os.makedirs(folder)
        os.symlink(os.path.abspath(source + "/model.safetensors"), folder + "/model.safetensors")
        good = json.load(open(source + "/config.json"))
        places = [good, *(v for v in good.values() if isinstance(v, dict))]
        fields = [(o, k) for o in places for k in o]
        for _ in range(40):
            o, key = draw.choice(fields)
            before, o[key] = o[key], draw.choice(values)
            with open(folder + "/config.json", "w") as f:
                json.dump(good, f)
            args = draw.choice((["--tp", "2"], ["--tp", "3", "--ep"], ["--pp", "2"], ["--tp", "64"], ["--tp", "8", "--pp", "8"]))
            r = subprocess.run([STEEL, "plan", folder, *args, "--link", "nvlink", "-c", str(1 << 28), "-np", "4096",
                                "--memory", "900T"], capture_output=True, timeout=HANG)
            lines = r.stderr.decode(errors="replace").splitlines()
            assert r.returncode in (0, 1), (family, key, o[key], r.returncode, lines[:5])
            if r.returncode:
                assert len(lines) == 1 and folder in lines[0], (family, key, o[key], lines[:5])
            refused += r.returncode
            ran += 1
            o[key] = before
    print(f"{ran} configs changed, {refused} refused")


def test_hostile_shapes():
    """A GGUF whose numbers do not belong to its tensors: one line, and no memory for what is not there."""
    good = open(model("tiny-moe"), "rb").read(1 << 16)
    for key, value in ((b"block_count", 4), (b"embedding_length", 512), (b"attention.head_count", 8), (b"expert_count", 16),
                       (b"expert_feed_forward_length", 256), (b"vocab_size", 4096), (b"attention.key_length", 64)):
        for bad in (0, 1, value + 1, 1 << 20, 0x7FFFFFFF, 0xFFFFFFFF):
            at = good.index(b"qwen3moe." + key + b"\x04\0\0\0") + len(b"qwen3moe." + key) + 4
            path = os.path.join(WORK.name, "bad.gguf")
            with open(path, "wb") as f:
                f.write(good[:at] + bad.to_bytes(4, "little") + good[at + 4:])
                f.truncate(os.path.getsize(model("tiny-moe")))
            r = subprocess.run(["sh", "-c", LITTLE + "exec \"$0\" plan \"$1\" --tp 2 --ep --json", STEEL, path],
                               capture_output=True, timeout=HANG)
            lines = r.stderr.decode(errors="replace").splitlines()
            assert r.returncode in (0, 1), (key, bad, r.returncode, lines[:3])
            assert r.returncode == 0 or (len(lines) == 1 and path in lines[0]), (key, bad, lines[:3])
            assert r.returncode == 1 or bad in (0, 1) or key in (b"block_count", b"vocab_size"), (key, bad)


def test_this_machine():
    """Where every byte is: the parts make the whole; what fits is what `run` does; a wish that cannot be granted names one that can."""
    p = plan("tests/golden/qwen3_5_moe", "--device", "cpu", "-c", "256", "-np", "2", "--kv-type", "q8_0", "-b", "64")["here"]
    parts = {x["part"]: x["memory"] for x in p["parts"]}
    assert {"embedding", "attention", "shared experts", "experts", "routers", "head", "KV cache", "states", "working memory"} <= set(parts), parts
    assert sum(parts.values()) == p["needed_bytes"] and p["fits"] and p["context"] == 256 and p["sequences"] == 2
    assert parts["KV cache"] == (2 * 256 // 16 + 2) * 16 * plan("tests/golden/qwen3_5_moe", "--memory", "1G", "--kv-type", "q8_0")["one"]["cache_token_bytes"]
    speed = p["speed"]
    assert speed["prompt"]["tokens"] == 64 and speed["prompt"]["tokens_per_second"] > 0
    one, many = [g["tokens_per_second"] for g in speed["generation"]]
    assert 0 < one < many
    # measured once; a damaged file of measurements is measured anew, and never believed
    place = os.path.join(WORK.name, "steel", "speed.json")
    again = plan("tests/golden/qwen3_5_moe", "--device", "cpu")["here"]["speed"]
    assert again["measured_earlier"]
    known = json.load(open(place))
    for bad in ("{", json.dumps({k: {f: [-1, 0, 1e9, "x"] for f in v} for k, v in known.items()})):
        with open(place, "w") as f:
            f.write(bad)
        speed = plan("tests/golden/qwen3", "--device", "cpu")["here"]["speed"]
        assert not speed["measured_earlier"] and speed["generation"][0]["tokens_per_second"] > 0, bad
    assert plan("tests/golden/qwen3", "--no-probe")["here"]["speed"] is None


def test_does_not_fit():
    path = model("qwen3-0.6b")
    p = plan(path, "--device", "cpu", "-c", "200000000", code=1)["here"]
    assert not p["fits"] and "would fit" in p["why"] and p["speed"] is None
    assert re.fullmatch(r"-c \d+", p["better"][0]["flags"]), p["better"]
    # `run` and `serve` refuse with the same words, and one screen of what would fit
    for command in (["run", path, "--raw", "-p", "x"], ["serve", path, "--port", "0"]):
        r = subprocess.run([STEEL, *command, "--device", "cpu", "-c", "200000000"], capture_output=True, text=True, timeout=HANG)
        assert r.returncode == 1 and "a context of 200000000 tokens needs" in r.stderr, r.stderr
        assert "KV cache" not in r.stderr and "together" in r.stderr and re.search(r"would       -c \d+ ", r.stderr), r.stderr
        assert r.stderr.count("\n") < 30, r.stderr
    text = subprocess.run([STEEL, "plan", path, "--device", "cpu", "-c", "200000000"], capture_output=True, text=True).stdout
    assert "fits        no" in text and re.search(r"would       -c \d+ ", text), text


def test_name_is_not_text():
    """JSON has no place for a file name that is not UTF-8: that is said, and is a failure."""
    path = os.path.join(os.fsencode(WORK.name), b"caf\xe9.gguf")
    os.symlink(os.path.abspath("demo/steel-demo.gguf"), path)
    r = subprocess.run([STEEL, "plan", path, "--json", "--no-probe"], capture_output=True)
    assert r.returncode == 1 and not r.stdout and b"UTF-8" in r.stderr, (r.returncode, r.stdout, r.stderr)


if __name__ == "__main__":
    with WORK:
        run_tests([v for k, v in sorted(globals().items()) if k.startswith("test_")])

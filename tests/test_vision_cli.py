#!/usr/bin/env python3
"""steel logits --input: from the golden's pixels its features and logits, from the pictures nearly the same, whole and in chunks;
a prompt that does not fit its images, a broken picture and a model without a tower are refused in words."""
import array
import json
import os
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gguf_tools import max_difference, mean_kl, read_logits  # noqa

STEEL = os.path.abspath(os.path.join(sys.argv[1], "steel"))
GOLDEN = "tests/golden_images"
WORK = tempfile.mkdtemp()


def logits(model, *args, isa="ref", **env):
    out = os.path.join(WORK, "logits.bin")
    r = subprocess.run([STEEL, "logits", model, "--out", out, "--kv-type", "f32", *args], capture_output=True, text=True,
                       env={**os.environ, **({"STEEL_ISA": isa} if isa else {}), **env})
    return r, out


def records(path):
    """The values of all records of a file."""
    data, at, values = open(path, "rb").read(), 0, array.array("f")
    while at < len(data):
        head = array.array("i", data[at:at + 12])
        assert head[0] == 2
        n = head[1] * head[2]
        values.frombytes(data[at + 12:at + 12 + 4 * n])
        at += 12 + 4 * n
    return values


def refused(words, model, *args):
    r, _ = logits(model, *args)
    assert r.returncode and words in r.stderr, (words, r.stderr)


for name in "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe":
    folder = f"{GOLDEN}/{name}"
    given = ("--input", f"{folder}/input.json", "--pixels", f"{folder}/pixel_values.bin")
    features = os.path.join(WORK, "features.bin")
    want = read_logits(f"{folder}/golden.bin")
    for isa, most_features, most_logits in ("ref", 2e-4, 2e-4), ("", 2e-2, 2e-2):
        for chunk in "512", "11":
            r, out = logits(folder, *given, "--features", features, "--chunk", chunk, isa=isa)
            assert r.returncode == 0, r.stderr
            off = max(abs(a - b) for a, b in zip(records(features), records(f"{folder}/features.bin"), strict=True))
            far = max_difference(read_logits(out), want)
            print(f"{name} {isa or 'kernels'}, chunks of {chunk}: features {off:.1e}, logits {far:.1e} from the golden's")
            assert off < most_features and far < most_logits
    r, out = logits(folder, "--input", f"{folder}/input.json")
    assert r.returncode == 0, r.stderr
    far = mean_kl(want, read_logits(out))
    print(f"{name} from the pictures: KL {far:.1e} from the golden's logits")
    swapped = os.path.join(WORK, name)
    shutil.copytree(folder, swapped)
    shutil.copy(f"{folder}/a.png", f"{swapped}/b.png")
    shutil.copy(f"{folder}/b.png", f"{swapped}/a.png")
    r, out = logits(folder, "--input", f"{swapped}/input.json")
    other = mean_kl(want, read_logits(out))
    print(f"  with the pictures swapped: KL {other:.1e}")
    assert 0 < far < 2e-3 and other > 20 * far

folder = f"{GOLDEN}/qwen3_vl"
copy = os.path.join(WORK, "input")
shutil.copytree(folder, copy)
prompt = json.load(open(f"{folder}/input.json"))
path = os.path.join(copy, "input.json")


def rewrite(**changes):
    json.dump({**prompt, **changes}, open(path, "w"))


rewrite(ids=prompt["ids"][:20])
refused("input.json: image 0 has 20 features and 14 placeholders", folder, "--input", path)
rewrite(images=["a.png", "c.png"])
refused("c.png: No such file", folder, "--input", path)
open(os.path.join(copy, "a.png"), "r+b").truncate(300)
rewrite()
refused("a.png: PNG: the file ends too early", folder, "--input", path)
rewrite(image_grid_thw=[[1, 8, 10], [1, 10, 10]])
refused("image_grid_thw[1]: not a grid of the pixels", folder, "--input", path, "--pixels", f"{folder}/pixel_values.bin")
refused("expected (n, 96) values", folder, "--input", path, "--pixels", f"{folder}/golden.bin")
refused("no image tower that can run here", "tests/golden/qwen3", "--input", f"{folder}/input.json")
refused("--pixels and --features need --input", folder, "--ids", f"{folder}/golden.bin", "--features", "x")
refused("--ids or --input, and --out, are needed", folder, "--ids", f"{folder}/golden.bin", "--input", path)
shutil.rmtree(WORK)

#!/usr/bin/env python3
"""steel logits --input: from the golden's pixels its features and logits, from the pictures nearly the same, whole and in chunks;
a prompt that does not fit its images, a broken picture and a model without a tower are refused in words."""
import array
import glob
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import vision_model  # noqa
from gguf_tools import Gguf, max_difference, mean_kl, read_logits, read_safetensors, write_gguf  # noqa

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


GOLDENS = sorted(os.path.basename(os.path.dirname(p)) for p in glob.glob(f"{GOLDEN}/*/input.json"))
for name in GOLDENS:
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
    if r.returncode:
        assert " features and " in r.stderr, r.stderr
        print("  with the pictures swapped: refused, they have other numbers of features")
        continue
    other = mean_kl(want, read_logits(out))
    print(f"  with the pictures swapped: KL {other:.1e}")
    assert 0 < far < 2e-3 and other > 20 * far


def floats(kind, data):
    """bf16 to f32"""
    assert kind == "BF16"
    return b"".join(b"\0\0" + data[i:i + 2] for i in range(0, len(data), 2))


def q8_0(values):
    out = b""
    for i in range(0, len(values), 32):
        row = values[i:i + 32]
        d = max(map(abs, row)) / 127
        out += struct.pack("<e", d) + bytes(round(x / d) & 255 if d else 0 for x in row)
    return out


def mmproj(folder, out, quantise=False):
    """The tower of a folder as llama.cpp's converter writes it."""
    config = json.load(open(f"{folder}/config.json"))["vision_config"]
    pixels = json.load(open(f"{folder}/preprocessor_config.json"))
    levels = config.get("deepstack_visual_indexes", [])
    E, P, depth = config["hidden_size"], config["patch_size"], config["depth"]
    grid = round(config["num_position_embeddings"] ** 0.5)
    names = {"attn.qkv": "attn_qkv", "attn.proj": "attn_out", "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down", "norm1": "ln1", "norm2": "ln2"}
    tensors = []
    for name, (kind, shape, data) in read_safetensors(f"{folder}/model.safetensors").items():
        if not name.startswith("model.visual."):
            continue
        name, _, suffix = name[len("model.visual."):].rpartition(".")
        f32 = floats(kind, data)
        if name == "patch_embed.proj" and suffix == "weight":
            values = array.array("f", f32)
            plane = P * P
            for f in range(2):
                part = array.array("f")
                for row in range(E * 3):
                    part += values[(2 * row + f) * plane:(2 * row + f + 1) * plane]
                tensors.append(("v.patch_embd.weight" + (".1" if f else ""), (P, P, 3, E), 0, part.tobytes()))
            continue
        part = name.split(".")
        if name == "patch_embed.proj":
            to = "v.patch_embd"
        elif name == "pos_embed":
            to = "v.position_embd"
        elif part[0] == "blocks":
            to = f"v.blk.{part[1]}." + names[".".join(part[2:])]
        elif part[0] == "deepstack_merger_list":
            to = f"v.deepstack.{levels[int(part[1])]}." + {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}[part[2]]
        else:
            to = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}[part[1]]
        dims = tuple(reversed(shape))
        if quantise and len(dims) == 2 and dims[0] % 32 == 0 and "position" not in to:
            tensors.append((f"{to}.{suffix}", dims, 8, q8_0(array.array("f", f32))))
        elif len(dims) == 2 and "position" not in to:
            tensors.append((f"{to}.{suffix}", dims, 30, data))
        else:
            tensors.append((f"{to}.{suffix}", dims, 0, f32))
    v = "clip.vision."
    write_gguf(out, {"general.architecture": "clip", "clip.has_vision_encoder": True, "clip.projector_type": "qwen3vl_merger", "clip.use_gelu": True,
                     v + "block_count": depth, v + "embedding_length": E, v + "feed_forward_length": config["intermediate_size"],
                     v + "attention.head_count": config["num_heads"], v + "attention.layer_norm_epsilon": 1e-6,
                     v + "projection_dim": config["out_hidden_size"], v + "patch_size": P, v + "image_size": P * grid,
                     v + "spatial_merge_size": 2, v + "image_mean": pixels["image_mean"], v + "image_std": pixels["image_std"],
                     v + "image_min_pixels": pixels["size"]["shortest_edge"], v + "image_max_pixels": pixels["size"]["longest_edge"],
                     v + "is_deepstack_layers": [i in levels for i in range(depth)]}, tensors)


def test_mmproj():
    """A GGUF finds its tower beside it or by name; a tower of another model is refused, or not taken."""
    for name in "qwen3_vl", "qwen3_5_moe":
        folder, place = f"{GOLDEN}/{name}", os.path.join(WORK, "gguf-" + name)
        os.makedirs(place)
        model, tower = f"{place}/model.gguf", f"{place}/mmproj-model-bf16.gguf"
        subprocess.run([STEEL, "convert", folder, model, "--type", "bf16", "--no-images"], check=True, capture_output=True)
        given = ("--input", f"{folder}/input.json", "--pixels", f"{folder}/pixel_values.bin")
        features, want = os.path.join(WORK, "features.bin"), read_logits(f"{folder}/golden.bin")
        refused("no image tower that can run here", model, *given)
        mmproj(folder, tower)
        for args in (), ("--mmproj", tower):
            r, out = logits(model, *given, "--features", features, *args)
            assert r.returncode == 0, r.stderr
            off = max(abs(a - b) for a, b in zip(records(features), records(f"{folder}/features.bin"), strict=True))
            far = max_difference(read_logits(out), want)
            print(f"{name} as GGUF with mmproj: features {off:.1e}, logits {far:.1e} from the golden's")
            assert off < 2e-4 and far < 2e-3
        other = f"{place}/mmproj-a.gguf"  # the first by name, of another model
        shutil.copy(model, other)
        os.rename(tower, f"{place}/mmproj-model.gguf")
        r, out = logits(model, *given)
        assert r.returncode == 0 and max_difference(read_logits(out), want) < 2e-3, r.stderr
        os.remove(other)
        os.rename(f"{place}/mmproj-model.gguf", tower)
        quantised = f"{place}/small.gguf"
        mmproj(folder, quantised, True)
        for isa in "ref", "":
            r, out = logits(model, *given, "--features", features, "--mmproj", quantised, isa=isa)
            assert r.returncode == 0, r.stderr
            off = max(abs(a - b) for a, b in zip(records(features), records(f"{folder}/features.bin"), strict=True))
            print(f"{name} with a tower partly in Q8_0: features {off:.1e} from the golden's")
            assert 1e-6 < off < 0.05
    other = f"{WORK}/gguf-qwen3_5_moe/mmproj-model-bf16.gguf"
    refused("this image tower is not that of a qwen3vl model", f"{WORK}/gguf-qwen3_vl/model.gguf", "--input", f"{GOLDEN}/qwen3_vl/input.json",
            "--mmproj", other)
    refused("no image tower that Steel runs", f"{WORK}/gguf-qwen3_vl/model.gguf", "--input", f"{GOLDEN}/qwen3_vl/input.json",
            "--mmproj", f"{WORK}/gguf-qwen3_vl/model.gguf")


NARROW = "gemma4", "glm46v", "glm4v_moe"  # no rows of whole blocks


def test_convert():
    """Every folder becomes two GGUFs, which give its features and logits; matrices of the tower may be quantised."""
    def most(features, folder):
        return max(abs(a - b) for a, b in zip(records(features), records(f"{folder}/features.bin"), strict=True))

    for name in GOLDENS:
        folder, place = f"{GOLDEN}/{name}", os.path.join(WORK, "convert-" + name)
        model, features, want = f"{place}/model.gguf", os.path.join(WORK, "features.bin"), read_logits(f"{folder}/golden.bin")
        given = ("--input", f"{folder}/input.json", "--pixels", f"{folder}/pixel_values.bin", "--features", features)
        os.makedirs(place)
        subprocess.run([STEEL, "convert", folder, model], check=True, capture_output=True)
        for isa in "ref", "":
            r, out = logits(model, *given, isa=isa)
            assert r.returncode == 0, r.stderr
            off, far = most(features, folder), mean_kl(want, read_logits(out))
            print(f"{name} converted, {isa or 'kernels'}: features {off:.1e} from the golden's, KL {far:.1e}")
            assert off < (2e-4 if isa else 2e-2) and far < 5e-4
        r, out = logits(model, "--input", f"{folder}/input.json")
        assert r.returncode == 0 and mean_kl(want, read_logits(out)) < 2e-3, r.stderr
        towers = []
        for how in ("convert", folder, f"{place}/small.gguf", "--image-type", "q8_0"), ("quantize", f"{place}/mmproj-model.gguf", f"{place}/mmproj-q.gguf",
                                                                                   "q8_0"):
            subprocess.run([STEEL, *how], check=True, capture_output=True)
            towers.append(f"{place}/mmproj-small.gguf" if how[0] == "convert" else how[2])
            r, out = logits(model, *given, "--mmproj", towers[-1])
            assert r.returncode == 0, r.stderr
            off = most(features, folder)
            assert (off > 1e-5 or name in NARROW) and off < 0.5, (name, how[0], off)
        print(f"{name} with a tower partly in Q8_0: features {off:.1e} from the golden's")
        shutil.rmtree(place)
    r = subprocess.run([STEEL, "convert", f"{GOLDEN}/gemma3", f"{WORK}/alone.gguf", "--no-images"], capture_output=True, text=True)
    assert r.returncode == 0 and not os.path.exists(f"{WORK}/mmproj-alone.gguf")
    r = subprocess.run([STEEL, "convert", f"{GOLDEN}/gemma3", f"{WORK}/alone.gguf", "--force", "--image-type", "q9"], capture_output=True, text=True)
    assert r.returncode and "unknown type 'q9'" in r.stderr


def test_row_mark():
    """The mmproj of Pixtral's kind has the embedding of the token between rows, for llama.cpp."""
    folder = vision_model.make(os.path.join(WORK, "rows"), f"{GOLDEN}/mistral3", ["[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    subprocess.run([STEEL, "convert", folder, f"{WORK}/rows.gguf", "--type", "f16", "--pre", "qwen2"], check=True, capture_output=True)
    dims, kind, data = Gguf(f"{WORK}/mmproj-rows.gguf").tensors["v.token_embd.img_break"]
    table = read_safetensors(f"{folder}/model.safetensors")["language_model.model.embed_tokens.weight"]
    at, width = 256 + len(vision_model.MARKS) + 1, table[1][1]
    row = table[2][2 * width * at:2 * width * (at + 1)]  # BF16
    assert dims == (width,) and kind == 0 and data[2::4] + data[3::4] == row[::2] + row[1::2] and not any(data[::4])


test_mmproj()
test_convert()
test_row_mark()
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
rewrite(image_sizes_wh=[[61, 47], [200, 200]])
refused("pixel_values.bin: these are not the pixels of image 1", folder, "--input", path, "--pixels", f"{folder}/pixel_values.bin")
rewrite(image_sizes_wh=[[61, 47], [90, 0]])
refused("image_sizes_wh[1]: not a size", folder, "--input", path, "--pixels", f"{folder}/pixel_values.bin")
refused("expected a record of values", folder, "--input", path, "--pixels", f"{folder}/golden.bin")
refused("no image tower that can run here", "tests/golden/qwen3", "--input", f"{folder}/input.json")
refused("--pixels and --features need --input", folder, "--ids", f"{folder}/golden.bin", "--features", "x")
for command, words in ("show", "image tower     3 layers, "), ("plan", "adapters, image tower "):
    r = subprocess.run([STEEL, command, *(["--brief"] if command == "show" else []), folder], capture_output=True, text=True)
    assert words in r.stdout, r
    assert "image tower" not in subprocess.run([STEEL, command, "tests/golden/qwen3"], capture_output=True, text=True).stdout
refused("--ids or --input, and --out, are needed", folder, "--ids", f"{folder}/golden.bin", "--input", path)
shutil.rmtree(WORK)

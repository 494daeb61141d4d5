#!/usr/bin/env python3
"""Gives a golden model an MTP block: the folder SRC with such tensors beside its own becomes OUT.

The block's layer has the values of the model's last one in another order, so that it is as large and as
tame as that; its projection is random. What it drafts is nonsense, always the same for a seed.
usage: mtp_toy.py SRC OUT [seed]
"""
import json
import os
import random
import shutil
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gguf_tools import read_safetensors, write_safetensors  # noqa


def shuffled(rng, tensor):
    dtype, shape, data = tensor
    size = {"BF16": 2, "F16": 2, "F32": 4}[dtype]
    values = [data[i : i + size] for i in range(0, len(data), size)]
    rng.shuffle(values)
    return dtype, shape, b"".join(values)


def bf16(rng, shape, mean, deviation):
    n = 1
    for d in shape:
        n *= d
    values = b"".join(struct.pack("<f", rng.gauss(mean, deviation))[2:] for _ in range(n))
    return "BF16", shape, values


def write_tokenizer(out, size):
    """A token is a byte: space and line's end as byte-level vocabularies write them, then what prints."""
    letters = "\u0120\u010a" + "".join(map(chr, [*range(33, 127), *range(161, 173), *range(174, 256)]))
    vocabulary = {c: i for i, c in enumerate(letters[:size])}
    tokenizer = {"model": {"type": "BPE", "vocab": vocabulary, "merges": []},
                 "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
                 "decoder": {"type": "ByteLevel"}, "added_tokens": []}
    json.dump(tokenizer, open(os.path.join(out, "tokenizer.json"), "w"))
    json.dump({"eos_token_id": size - 1}, open(os.path.join(out, "generation_config.json"), "w"))


def plain(src, out):
    """A golden model as it is, with a tokenizer."""
    os.makedirs(out, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(os.path.join(src, name), out)
    config = json.load(open(os.path.join(src, "config.json")))
    text = config.get("text_config", config)
    write_tokenizer(out, text.get("unpadded_vocab_size", text["vocab_size"]))


def main(src, out, seed):
    rng = random.Random(seed)
    os.makedirs(out, exist_ok=True)
    for name in os.listdir(src):
        if name != "golden.bin":
            shutil.copy(os.path.join(src, name), out)
    config = json.load(open(os.path.join(src, "config.json")))
    text = config.get("text_config", config)
    layers, width = text["num_hidden_layers"], text["hidden_size"]
    tensors = read_safetensors(os.path.join(src, "model.safetensors"))
    root = next(n for n in tensors if n.endswith("embed_tokens.weight"))[: -len("embed_tokens.weight")]
    last = f"{root}layers.{layers - 1}."
    qwen = "qwen3_" in config["model_type"]
    layer = "mtp.layers.0." if qwen else f"{root}layers.{layers}."
    for name in [n for n in tensors if n.startswith(last)]:
        tensors[layer + name[len(last) :]] = shuffled(rng, tensors[name])
    names = ["mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"]
    if not qwen:
        names = [layer + n for n in ("eh_proj", "enorm", "hnorm", "shared_head.norm")]
        # copies of the model's own, as published folders have them
        tensors[layer + "embed_tokens.weight"] = tensors[root + "embed_tokens.weight"]
        tensors[layer + "shared_head.head.weight"] = tensors["lm_head.weight"]
    tensors[names[0] + ".weight"] = bf16(rng, [width, 2 * width], 0, (2 * width) ** -0.5)
    for name in names[1:]:
        tensors[name + ".weight"] = bf16(rng, [width], 0 if qwen else 1, 0.1)
    text["mtp_num_hidden_layers" if qwen else "num_nextn_predict_layers"] = 1
    text["eos_token_id"] = text["vocab_size"] - 1
    write_safetensors(os.path.join(out, "model.safetensors"), tensors)
    json.dump(config, open(os.path.join(out, "config.json"), "w"), indent=2)
    write_tokenizer(out, text["vocab_size"])


if __name__ == "__main__":
    if sys.argv[3:] == ["plain"]:
        plain(sys.argv[1], sys.argv[2])
    else:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 1)

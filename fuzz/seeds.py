#!/usr/bin/env python3
"""Writes the seeds of four fuzzers into fuzz/seeds, from what the tests have:

  fuzz/seeds.py [STEEL]       default: build/steel

  fuzz_gguf         of every model in tests/golden its converted file, whole metadata and all names of the first two layers, but a
                    value for each tensor alone; the same of every image tower in tests/golden_images; and a file with a block of every type
  fuzz_chat_parser  answers of every form with calls or reasoning in them, from tests/test_chat_parse.c and test_chat_families.c
  fuzz_jinja        the templates of tests/data, and every fortieth of the small cases
  fuzz_markdown     texts of tests/test_markdown.c, for two widths
Files that are there are written again; nothing is removed.
"""
import glob
import json
import os
import shutil
import re
import struct
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tests"))
from gguf_tools import Gguf, pack_text, write_gguf  # noqa

STEEL = sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "build/steel")
# number of the type in GGUF: values and bytes of a block
TYPES = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84), 11: (256, 110),
         12: (256, 144), 13: (256, 176), 14: (256, 210), 16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18),
         21: (256, 110), 22: (256, 82), 23: (256, 136), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
         40: (64, 36), 41: (128, 18), 42: (64, 18)}


def folder(fuzzer):
    path = os.path.join(ROOT, "fuzz/seeds", fuzzer)
    os.makedirs(path, exist_ok=True)
    return path


def shrink(source, out):
    """The metadata byte for byte, and the tensors with their names and one value each."""
    g = Gguf(source)
    names = [x for x in g.tensors if not re.match(r"blk\.([2-9]|\d\d)", x)]
    g.at = 8
    _, n_meta = g.take("QQ")
    for _ in range(n_meta):
        g.text()
        g.value(g.take("I")[0])
    head = g.data[:8] + struct.pack("<Q", len(names)) + g.data[16:g.at]
    for i, name in enumerate(names):
        head += pack_text(name) + struct.pack("<IQIQ", 1, 1, 0, 32 * i)
    with open(out, "wb") as f:
        f.write(head + bytes(-len(head) % 32) + struct.pack("<f28x", 1) * len(names))


def gguf_seeds():
    to = folder("fuzz_gguf")
    with tempfile.TemporaryDirectory() as tmp:
        for model in sorted(glob.glob(ROOT + "/tests/golden/*")):
            if not os.path.exists(model + "/config.json"):
                continue
            source = tmp + "/m.gguf"
            subprocess.run([STEEL, "convert", model, source, "--force"], check=True, stderr=subprocess.DEVNULL)
            shrink(source, os.path.join(to, os.path.basename(model)))
        for model in sorted(glob.glob(ROOT + "/tests/golden_images/*/")):
            subprocess.run([STEEL, "convert", model, tmp + "/m.gguf", "--force"], check=True, stderr=subprocess.DEVNULL)
            shrink(tmp + "/mmproj-m.gguf", os.path.join(to, "mmproj-" + os.path.basename(model[:-1])))
    meta = {"general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 64, "llama.embedding_length": 256,
            "llama.feed_forward_length": 64, "llama.attention.head_count": 4, "llama.attention.layer_norm_rms_epsilon": 1e-5}
    tensors = [(f"blk.0.t{t}.weight", (n,), t, bytes((37 * i + t) % 251 for i in range(size))) for t, (n, size) in TYPES.items()]
    tensors.append(("blk.0.t40.scale", (1,), 0, struct.pack("<f", 0.01)))
    write_gguf(os.path.join(to, "types"), meta, [("token_embd.weight", (256, 1), 2, bytes(144)), *tensors])


def unescape(literal):
    """The bytes of a C string."""
    return re.sub(rb"\\(x[0-9a-f]{2}|.)", lambda m: bytes.fromhex(m[1][1:].decode()) if m[1][:1] == b"x" else
                  {b"n": b"\n", b"t": b"\t"}.get(m[1], m[1]), literal.encode())


def chat_seeds():
    to = folder("fuzz_chat_parser")
    text = open(ROOT + "/src/text/chat/chat_parse.h").read()
    formats = re.findall(r"^    CHAT_(\w+),", text[text.index("enum chat_format {"):text.index("CHAT_N_FORMATS")], re.M)
    # a text, a name, or a text with the mark of MiniMax-M3 in it
    string = r'(\w+|(?:(?:NS|"(?:[^"\\]|\\.)*")\s*)+)'
    case = re.compile(r"check\(\s*CHAT_(\w+),\s*(true|false),\s*" + r",\s*".join([string] * 4) + r"\)")
    spoken = lambda answer: b"".join(b"]<]minimax[>[" if x == "NS" else unescape(x[1:-1]) for x in re.findall(r'NS|"(?:[^"\\]|\\.)*"', answer))
    counts = {}
    tests = "".join(open(f"{ROOT}/tests/test_chat_{part}.c").read() for part in ("parse", "families"))
    text_of = r'("(?:[^"\\]|\\.)*")'  # macros of tests/chat_check.h
    tests = re.sub(rf"PARAMETER\(\s*{text_of},\s*{text_of},\s*{text_of}\)",
                   r'"<" DSML "parameter name=\\"" \1 "\\" string=\\"" \2 "\\">" \3 "</" DSML "parameter>\\n"', tests)
    tests = re.sub(r"\bDSML\b", '"｜DSML｜"', tests)
    for name, thinks, answer, _, reasoning, calls in case.findall(tests):
        if reasoning.strip() == calls.strip() == "NULL" or '"' not in answer:
            continue
        said = spoken(answer)
        # the fuzzer's first bytes: the format; options, of which 8 and 16 remove tools and reasoning, 32: thinking has begun
        how = 32 if thinks == "true" else 0
        counts[name] = counts.get(name, -1) + 1
        with open(os.path.join(to, f"{name.lower()}{counts[name]}"), "wb") as f:
            f.write(bytes([formats.index(name), how, 7]) + said)
    marks = re.findall(r"^    CHAT_THOUGHTS_(\w+),", text, re.M)
    case = re.compile(r"check_thoughts\(\s*CHAT_THOUGHTS_(\w+),\s*CHAT_(\w+),\s*(true|false),\s*" + string)
    for thoughts, name, thinks, answer in case.findall(tests):
        said = spoken(answer)
        how = 32 if thinks == "true" else 0
        counts["thoughts_" + thoughts] = counts.get("thoughts_" + thoughts, -1) + 1
        with open(os.path.join(to, f"thoughts_{thoughts.lower()}{counts['thoughts_' + thoughts]}"), "wb") as f:
            f.write(bytes([formats.index(name), how, 16 * marks.index(thoughts) + 7]) + said)
    missing = set(formats) - set(counts) - {"PLAIN"}
    assert not missing, missing


def jinja_seeds():
    to = folder("fuzz_jinja")
    for path in glob.glob(ROOT + "/tests/data/*.jinja"):
        shutil.copyfile(path, os.path.join(to, os.path.basename(path)))
    with open(ROOT + "/tests/data/jinja_cases.jsonl") as f:
        for i, line in enumerate(f):
            if i % 40 == 0:
                with open(os.path.join(to, f"case{i}"), "w") as out:
                    out.write(json.loads(line)["source"])


def markdown_seeds():
    to = folder("fuzz_markdown")
    text = open(ROOT + "/tests/test_markdown.c").read()
    shown = [b"".join(unescape(x) for x in re.findall(r'"((?:[^"\\]|\\.)*)"', t))
             for t in re.findall(r'SHOWS\(\d+,\s*((?:"(?:[^"\\]|\\.)*"\s*)+),', text)]
    assert len(shown) > 40
    for i in range(0, len(shown), 8):
        # the fuzzer's first bytes: columns, styles and Unicode, the length of a piece
        with open(os.path.join(to, f"texts{i // 8}"), "wb") as f:
            f.write(bytes([18 if i % 16 else 78, 3, 4]) + b"\n\n".join(shown[i:i + 8]))


gguf_seeds()
chat_seeds()
jinja_seeds()
markdown_seeds()

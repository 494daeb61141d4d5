#!/usr/bin/env python3
"""Damaged files through the command line: a sample of cuts and mutations of a small GGUF and a small
folder. Each run ends with exit 0, or with exit 1 and one line that names the file. test_hostile.c does
the tens of thousands in one process; this one sees what a user sees."""
import json
import os
import pty
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gguf_tools import write_safetensors  # noqa: E402

STEEL = os.path.join(sys.argv[1] if len(sys.argv) > 1 else "build", "steel")
N_CUTS, N_MUTATIONS = 40, 80


def make_folder(folder):
    os.makedirs(folder)
    draw = random.Random(1)
    shapes = {"model.embed_tokens.weight": [64, 32], "model.norm.weight": [32]}
    p = "model.layers.0."
    shapes.update({p + "input_layernorm.weight": [32], p + "post_attention_layernorm.weight": [32]})
    shapes.update({p + f"self_attn.{x}_proj.weight": [32, 32] for x in "qkvo"})
    shapes.update({p + "mlp.gate_proj.weight": [64, 32], p + "mlp.up_proj.weight": [64, 32],
                   p + "mlp.down_proj.weight": [32, 64]})
    tensors = {}
    for name, shape in shapes.items():
        n = shape[0] * (shape[1] if len(shape) > 1 else 1)
        tensors[name] = ("F32", shape, struct.pack("<%df" % n, *(draw.gauss(0, 0.1) for _ in range(n))))
    write_safetensors(folder + "/model.safetensors", tensors)
    json.dump({"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
               "num_attention_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
               "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": 63},
              open(folder + "/config.json", "w"))
    vocab = {chr(97 + i): i for i in range(26)}
    vocab.update({"ab": 26, "\u0120": 27, "\u0120a": 28})
    json.dump({"model": {"type": "BPE", "vocab": vocab, "merges": ["a b", "\u0120 a"]},
               "pre_tokenizer": {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False},
               "decoder": {"type": "ByteLevel"},
               "added_tokens": [{"id": 63, "content": "</s>", "special": True}]},
              open(folder + "/tokenizer.json", "w"))


def check(model, what):
    r = subprocess.run([STEEL, "run", model, "-p", "abc a", "-n", "2", "--temp", "0"], capture_output=True)
    if r.returncode == 0:
        return True
    lines = r.stderr.decode(errors="replace").splitlines()
    assert r.returncode == 1, (what, r.returncode, lines[:5])
    assert len(lines) == 1 and lines[0].startswith("steel: "), (what, lines[:5])
    assert model in lines[0], (what, lines)
    return False


def torment(file, model, header):
    good = open(file, "rb").read()
    assert check(model, "whole"), file
    draw = random.Random(7)
    for cut in sorted(draw.sample(range(len(good)), N_CUTS)):
        open(file, "wb").write(good[:cut])
        assert not check(model, f"{file} cut to {cut}"), f"{file} cut to {cut} still runs"
    survived = 0
    for i in range(N_MUTATIONS):
        bad = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(header if draw.random() < 0.9 else len(good))
            bad[at] = draw.choice([0, 0xFF, bad[at] ^ 1 << draw.randrange(8), draw.randrange(256)])
        open(file, "wb").write(bad)
        survived += check(model, f"{file} mutation {i}")
    open(file, "wb").write(good)
    print(f"{os.path.basename(file)}: {N_CUTS} cuts, {N_MUTATIONS} mutations, {survived} of them harmless")


def at_terminal(*args):
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    p = subprocess.Popen([STEEL, *args], stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    seen = b""
    try:
        while piece := os.read(ours, 65536):
            seen += piece
    except OSError:  # the terminal is closed
        pass
    os.close(ours)
    return p.wait(), seen


def escapes(tmp):
    """Escape sequences of a model, or of a file's name, do not reach the terminal; files get all bytes."""
    toy, text = tmp + "/toy.gguf", "\x1b]0;mine\x07\x1b[31m\u009b2J\r\x08red"
    subprocess.run([os.path.join(os.path.dirname(STEEL), "tests/toy_gguf"), toy], check=True)
    vocab, spelled = {}, {}
    keep = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    rest = [b for b in range(256) if b not in keep]
    for b in range(256):
        vocab[chr(b if b in keep else 256 + rest.index(b))] = b
    json.dump({"model": {"type": "BPE", "vocab": vocab, "merges": []}, "decoder": {"type": "ByteLevel"},
               "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}}, open(tmp + "/tokenizer.json", "w"))
    ids = [str(b) for b in text.encode()]
    plain = "".join(c if c >= " " and c < "\x7f" else "^?" if c > "~" else "^" + chr(ord(c) + 64) for c in text).encode()
    rc, seen = at_terminal("detokenize", tmp + "/tokenizer.json", *ids)
    assert rc == 0 and seen.strip() == plain, (seen, plain)
    got = subprocess.run([STEEL, "detokenize", tmp + "/tokenizer.json", *ids], capture_output=True).stdout
    assert got == text.encode()
    pattern = "".join(f"\\u{ord(c):04x}" for c in text)
    rc, seen = at_terminal("run", toy, "--raw", "-p", "x", "--regex", pattern, "-q")
    assert rc == 0 and plain in seen and b"\x1b]" not in seen and b"\x1b[31m" not in seen, seen
    got = subprocess.run([STEEL, "run", toy, "--raw", "-p", "x", "--regex", pattern, "-q"], capture_output=True, stdin=subprocess.DEVNULL).stdout
    assert got == text.encode() + b"\n", got
    # C1 controls in errors, as characters and as bytes; other characters stay
    for name, shown in (("n\u009b31m\u00fc\u4e8c", "n??31m\u00fc\u4e8c".encode()), (b"n\x9b31m\x1b[31m", b"n?31m?[31m")):
        r = subprocess.run([STEEL, "show", os.path.join(os.fsencode(tmp), os.fsencode(name) + b".gguf")], capture_output=True)
        assert r.returncode == 1 and shown in r.stderr, r.stderr


def endless_streams():
    """bench serve ends a stream that does not end by itself."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    token = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"text":"x"}]}\n\n'

    def serve(first, piece):
        listener = socket.create_server(("127.0.0.1", 0))

        def run():
            while True:
                c, _ = listener.accept()
                threading.Thread(target=send, args=(c,), daemon=True).start()

        def send(c):
            try:
                c.recv(65536)
                c.sendall(first)
                while True:
                    c.sendall(piece)
            except OSError:
                c.close()
        threading.Thread(target=run, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"
    for first, piece in ((head, token * 100), (head, b": ping\n\n" * 1000), (head, b"x" * 65536), (b"HTTP/1.1 500 No\r\n\r\n", b"x" * 65536),
                         (b"HTTP/1.1 200 OK\r\n", b"A: b\r\n" * 1000)):
        r = subprocess.run([STEEL, "bench", "serve", "--url", serve(first, piece), "--model", "m", "--concurrency", "1", "--num-prompts", "1",
                            "--output-len", "4"], capture_output=True, stdin=subprocess.DEVNULL)
        assert b"sends more than it was asked for" in r.stdout + r.stderr or first.startswith(b"HTTP/1.1 500"), (first, piece[:20], r)


def hostile_configs(tmp):
    """Every family, with one number of its config.json that cannot be: it still runs, or one line names the
    folder. A crash, a hang or a second line is a failure."""
    draw = random.Random(7)
    values = [-1, 0, 1, 3, 7, 1 << 31, 1 << 40, 1e300, -0.5, "x", [], {}, True, None]
    refused = ran = 0
    for family in sorted(os.listdir("tests/golden")):
        source = f"tests/golden/{family}"
        if not os.path.exists(source + "/model.safetensors") or subprocess.run(
                [STEEL, "show", source, "--brief"], capture_output=True).returncode:
            continue
        folder = f"{tmp}/{family}"
        os.makedirs(folder)
        os.symlink(os.path.abspath(source + "/model.safetensors"), folder + "/model.safetensors")
        good = json.load(open(source + "/config.json"))
        places = [good, good.get("text_config", {})]
        for o in places[:]:
            places += [v for v in o.values() if isinstance(v, dict)]
            places += [w for v in o.values() if isinstance(v, dict) for w in v.values() if isinstance(w, dict)]
        fields = [(o, k) for o in places for k in o if not k.startswith("vision")]
        for _ in range(30):
            o, key = draw.choice(fields)
            before, o[key] = o[key], draw.choice(values)
            json.dump(good, open(folder + "/config.json", "w"))
            r = subprocess.run([STEEL, "logits", folder, "--ids", source + "/golden.bin", "--out", "/dev/null", "-t", "1"],
                               capture_output=True, timeout=300)
            lines = r.stderr.decode(errors="replace").splitlines()
            assert r.returncode in (0, 1), (family, key, o[key], r.returncode, lines[:5])
            if r.returncode:
                assert len(lines) == 1 and folder in lines[0], (family, key, o[key], lines[:5])
            refused += r.returncode
            ran += 1
            o[key] = before
    print(f"configs of every family: {ran} changed, {refused} refused")


def main():
    # in memory where possible: rewriting a file over and over waits for the disk
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="steel-hostile-", dir=base) as tmp:
        escapes(tmp)
        endless_streams()
        folder, gguf = tmp + "/folder", tmp + "/model.gguf"
        make_folder(folder)
        subprocess.run([STEEL, "convert", folder, gguf], check=True, capture_output=True)
        torment(gguf, gguf, open(gguf, "rb").read().index(b"output_norm.weight") + 40)
        n, = struct.unpack("<Q", open(folder + "/model.safetensors", "rb").read(8))
        torment(folder + "/model.safetensors", folder, 8 + n)
        torment(folder + "/config.json", folder, os.path.getsize(folder + "/config.json"))
        torment(folder + "/tokenizer.json", folder, os.path.getsize(folder + "/tokenizer.json"))
        hostile_configs(tmp)


main()

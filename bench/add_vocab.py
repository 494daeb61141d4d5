"""Adds a vocabulary to a GGUF that has none, so that servers that need text can run it. It is synthetic (all bytes, then
filler tokens), or copied from another GGUF with the same number of tokens:

    python3 bench/add_vocab.py IN.gguf OUT.gguf [VOCAB.gguf]"""
import struct
import sys

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


class Reader:
    def __init__(self, f):
        self.f = f

    def u32(self):
        return struct.unpack("<I", self.f.read(4))[0]

    def u64(self):
        return struct.unpack("<Q", self.f.read(8))[0]

    def skip(self, kind):
        if kind == 8:
            self.f.read(self.u64())
        elif kind == 9:
            inner, n = self.u32(), self.u64()
            if inner in SIZES:
                self.f.seek(SIZES[inner] * n, 1)
            else:
                for _ in range(n):
                    self.skip(inner)
        else:
            self.f.seek(SIZES[kind], 1)


def string(s):
    return struct.pack("<Q", len(s)) + s


def byte_name(b):
    """The character that byte-level BPE uses for a byte."""
    plain = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    return chr(b if b in plain else 256 + [x for x in range(256) if x not in plain].index(b)).encode()


def tokenizer_of(path):
    """A GGUF's vocabulary metadata as bytes, and its number of tokens."""
    found, n = [], 0
    with open(path, "rb") as f:
        r = Reader(f)
        magic, version, n_tensors, n_kv = f.read(4), r.u32(), r.u64(), r.u64()
        for _ in range(n_kv):
            start = f.tell()
            key, kind = f.read(r.u64()), r.u32()
            value = f.tell()
            r.skip(kind)
            end = f.tell()
            if key == b"tokenizer.ggml.tokens":
                f.seek(value + 4)
                n = r.u64()
            f.seek(start)
            raw = f.read(end - start)
            if key.startswith(b"tokenizer."):
                found.append(raw)
    return found, n


def made_up(vocab):
    names = [byte_name(b) for b in range(256)] + [b"ab"] + [b"w%d" % i for i in range(257, vocab - 1)] + [b"<|end|>"]
    kinds = [1] * (vocab - 1) + [3]

    def text(key, v):
        return string(key) + struct.pack("<I", 8) + string(v)
    return [text(b"tokenizer.ggml.model", b"gpt2"), text(b"tokenizer.ggml.pre", b"qwen2"),
            string(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, vocab) + b"".join(map(string, names)),
            string(b"tokenizer.ggml.token_type") + struct.pack("<IIQ", 9, 5, vocab) + struct.pack(f"<{vocab}i", *kinds),
            string(b"tokenizer.ggml.merges") + struct.pack("<IIQ", 9, 8, 1) + string(b"a b"),
            string(b"tokenizer.ggml.eos_token_id") + struct.pack("<II", 4, vocab - 1)]


def main(src, dst, other=None):
    with open(src, "rb") as f, open(dst, "wb") as out:
        r = Reader(f)
        magic, version, n_tensors, n_kv = f.read(4), r.u32(), r.u64(), r.u64()
        assert magic == b"GGUF" and version == 3
        kept, vocab, align = [], None, 32
        for _ in range(n_kv):
            start = f.tell()
            key = f.read(r.u64())
            kind = r.u32()
            value = f.tell()
            r.skip(kind)
            end = f.tell()
            f.seek(value)
            if key.endswith(b".vocab_size"):
                vocab = r.u32()
            if key == b"general.alignment":
                align = r.u32()
            f.seek(start)
            raw = f.read(end - start)
            if not key.startswith(b"tokenizer."):
                kept.append(raw)
        start = f.tell()
        for _ in range(n_tensors):
            f.read(r.u64())
            f.seek(8 * r.u32() + 12, 1)
        end = f.tell()
        f.seek(start)
        infos = f.read(end - start)
        if other:
            more, n = tokenizer_of(other)
            if n > vocab:
                sys.exit(f"{other} has {n} tokens, {src} room for {vocab}")
            kept += more
        else:
            kept += made_up(vocab)
        out.write(magic + struct.pack("<IQQ", version, n_tensors, len(kept)) + b"".join(kept) + infos)
        out.write(b"\0" * (-out.tell() % align))
        f.seek(end + (-end % align))
        while piece := f.read(1 << 24):
            out.write(piece)


main(*sys.argv[1:])

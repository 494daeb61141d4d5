"""What the Python tests of file tools share: reading GGUF, writing GGUF and safetensors, logits."""
import math
import struct

FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BLOCKS = {26: (1, 4), 0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
          10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
          20: (32, 18), 27: (1, 8), 23: (256, 136), 30: (1, 2), 39: (32, 17), 40: (64, 36)}


class Gguf:
    """meta: key -> value; tensors: name -> (dims, type, bytes), dims[0] contiguous."""

    def __init__(self, path):
        self.data = open(path, "rb").read()
        self.at = 8
        assert self.data[:4] == b"GGUF", path
        n_tensors, n_meta = self.take("QQ")
        self.meta, self.tensors = {}, {}
        for _ in range(n_meta):
            key = self.text()
            self.meta[key] = self.value(self.take("I")[0])
        info = []
        for _ in range(n_tensors):
            name = self.text()
            dims = self.take("Q" * self.take("I")[0])
            info.append((name, dims) + self.take("IQ"))
        align = self.meta.get("general.alignment", 32)
        start = -(-self.at // align) * align
        for name, dims, kind, offset in info:
            length, size = BLOCKS[kind]
            n = math.prod(dims) // length * size
            self.tensors[name] = (dims, kind, self.data[start + offset:start + offset + n])
            assert len(self.tensors[name][2]) == n, name

    def take(self, fmt):
        v = struct.unpack_from("<" + fmt, self.data, self.at)
        self.at += struct.calcsize("<" + fmt)
        return v

    def text(self):
        n, = self.take("Q")
        self.at += n
        return self.data[self.at - n:self.at].decode("utf-8", "surrogateescape")

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind != 9:
            return self.take(FORMATS[kind])[0]
        kind, n = self.take("IQ")
        return [self.text() for _ in range(n)] if kind == 8 else list(self.take("%d%s" % (n, FORMATS[kind])))


def pack_text(s):
    b = s.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(b)) + b


def write_gguf(path, meta, tensors):
    """tensors: list of (name, dims, type, bytes). Values: str, bool, int (u32), float, lists of str, bool, int (i32) or float."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(meta)))
    for key, v in meta.items():
        out += pack_text(key)
        if isinstance(v, str):
            out += struct.pack("<I", 8) + pack_text(v)
        elif isinstance(v, bool):
            out += struct.pack("<I?", 7, v)
        elif isinstance(v, list) and v and isinstance(v[0], bool):
            out += struct.pack(f"<IIQ{len(v)}?", 9, 7, len(v), *v)
        elif isinstance(v, list) and v and isinstance(v[0], float):
            out += struct.pack(f"<IIQ{len(v)}f", 9, 6, len(v), *v)
        elif isinstance(v, list) and v and isinstance(v[0], int):
            out += struct.pack(f"<IIQ{len(v)}i", 9, 5, len(v), *v)
        elif isinstance(v, list):
            out += struct.pack("<IIQ", 9, 8, len(v)) + b"".join(map(pack_text, v))
        elif isinstance(v, int):
            out += struct.pack("<II", 4, v)
        elif isinstance(v, list):
            texts = isinstance(v[0], str)
            out += struct.pack("<IIQ", 9, 8 if texts else 5, len(v))
            out += b"".join(map(pack_text, v)) if texts else struct.pack("<%di" % len(v), *v)
        else:
            out += struct.pack("<If", 6, v)
    offset = 0
    for name, dims, kind, data in tensors:
        out += pack_text(name) + struct.pack("<I%dQ" % len(dims), len(dims), *dims)
        out += struct.pack("<IQ", kind, offset)
        offset += -(-len(data) // 32) * 32
    out += bytes(-len(out) % 32)
    with open(path, "wb") as f:
        f.write(out)
        for _, _, _, data in tensors:
            f.write(data + bytes(-len(data) % 32))


def grow_vocab(src, dst, n):
    """Copies a GGUF of few tokens with a vocabulary of n: made-up words of letters, digits and signs, as a real one has
    them. Their rows are those of the first tokens, rotated."""
    import random
    rng, model = random.Random(1), Gguf(src)
    tokens, kinds = model.meta["tokenizer.ggml.tokens"], model.meta["tokenizer.ggml.token_type"]
    small, known = len(tokens), set(tokens)
    alphabet = "etaoinshrdlucmfwypvbgkqjxz" * 4 + "ETAOINSHRDLUCMFWYPVBGKQJXZ" + "0123456789" + "_.,-:;/'\"()[]{}=+*"
    while len(tokens) < n:
        word = ("\u0120" if rng.random() < 0.4 else "") + "".join(rng.choices(alphabet, k=rng.randint(2, 7)))
        if word not in known:
            known.add(word)
            tokens.append(word)
    meta = dict(model.meta)
    meta["tokenizer.ggml.token_type"] = kinds + [1] * (n - small)
    tensors = []
    for name, (dims, kind, data) in model.tensors.items():
        if small in dims[1:]:
            size, unit = len(data) // small, len(data) // small // dims[0]
            rows = [data]
            for i in range(small, n):
                row, at = data[i % small * size:(i % small + 1) * size], i // small * unit % size
                rows.append(row[at:] + row[:at])
            dims, data = (dims[0], n), b"".join(rows)
        tensors.append((name, dims, kind, data))
    write_gguf(dst, meta, tensors)


def write_safetensors(path, tensors):
    """tensors: name -> (dtype, shape, bytes)."""
    import json
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            f.write(data)


def read_safetensors(path):
    import json
    data = open(path, "rb").read()
    n, = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + n])
    return {k: (v["dtype"], v["shape"], data[8 + n + v["data_offsets"][0]:8 + n + v["data_offsets"][1]])
            for k, v in header.items() if k != "__metadata__"}


def read_logits(path):
    b = open(path, "rb").read()
    t, v = struct.unpack_from("<ii", b)
    x = struct.unpack_from("<%df" % (t * v), b, 8 + 4 * t)
    return [x[i * v:(i + 1) * v] for i in range(t)]


def max_difference(a, b):
    return max(abs(x - y) for r, s in zip(a, b) for x, y in zip(r, s))


def mean_kl(a, b):
    """KL(softmax(a) || softmax(b)), mean over rows."""
    total = 0
    for r, s in zip(a, b):
        mr, ms = max(r), max(s)
        zr = math.log(sum(math.exp(x - mr) for x in r)) + mr
        zs = math.log(sum(math.exp(x - ms) for x in s)) + ms
        total += sum(math.exp(x - zr) * ((x - zr) - (y - zs)) for x, y in zip(r, s))
    return total / len(a)

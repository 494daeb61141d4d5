"""Compressed matrices the way each tool writes them into a Hugging Face folder, in plain Python and by their
descriptions: a matrix of floats goes in, its tensors and the values they stand for come out. No code shared with Steel."""
import array
import bisect
import math
import struct

FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def f16(x):
    return struct.unpack("<e", struct.pack("<e", x))[0]


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bf16(x):
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))[0]


def to_bf16(values):
    raw = array.array("I", array.array("f", values).tobytes())
    return array.array("H", [b >> 16 for b in raw]).tobytes()


def _e4m3(code):
    exp, man = code >> 3 & 15, code & 7
    return man * 2.0 ** -9 if exp == 0 else (8 + man) * 2.0 ** (exp - 10)


E4M3 = [_e4m3(c) for c in range(0x7F)]


def nearest(levels, x):
    """Index of the level nearest to x >= 0; levels rise."""
    i = bisect.bisect_left(levels, x)
    if i == len(levels) or (i and x - levels[i - 1] <= levels[i] - x):
        i -= 1
    return i


def signed(levels, bit, x):
    """(code with its sign in `bit`, value)"""
    i = nearest(levels, abs(x))
    return (i | bit, -levels[i]) if x < 0 and i else (i, levels[i])


def floats(kind, shape, values):
    """A tensor of floats, rounded to its type, and those values."""
    fix = {"F32": f32, "F16": f16, "BF16": bf16}[kind]
    values = [fix(v) for v in values]
    raw = {"F32": lambda: array.array("f", values).tobytes(), "BF16": lambda: to_bf16(values),
           "F16": lambda: b"".join(struct.pack("<e", v) for v in values)}[kind]()
    return (kind, shape, raw), values


def amax(rows):
    return max(max(map(abs, r)) for r in rows) or 1.0


def fp8(rows, block=None, name="weight_scale_inv", kind="F32", flat=False):
    """block: (rows, columns) of a scale; None: one for all; (1, 0): one a row."""
    n, m = len(rows), len(rows[0])
    bn, bm = block or (n, m)
    bm = bm or m
    down, across = -(-n // bn), -(-m // bm)
    scales = [amax([r[j * bm:(j + 1) * bm] for r in rows[i * bn:(i + 1) * bn]]) / 448
              for i in range(down) for j in range(across)]
    shape = [] if block is None else [down] if flat else [down, across]
    tensor, scales = floats(kind, shape, scales)
    codes, out = bytearray(), []
    for i, r in enumerate(rows):
        line = []
        for j, x in enumerate(r):
            s = scales[i // bn * across + j // bm]
            c, v = signed(E4M3, 0x80, x / s)
            codes.append(c)
            line.append(v * s)
        out.append(line)
    return {"weight": ("F8_E4M3", [n, m], bytes(codes)), name: tensor}, out


def _nibbles(codes):
    return bytes(codes[i] | codes[i + 1] << 4 for i in range(0, len(codes), 2))


def nvfp4(rows, modelopt=True, glob=None):
    n, m = len(rows), len(rows[0])
    g = f32(glob or amax(rows) / (6 * 448))
    codes, scales, out = [], bytearray(), []
    for r in rows:
        line = []
        for j in range(0, m, 16):
            s = nearest(E4M3, amax([r[j:j + 16]]) / 6 / g)
            scales.append(s)
            step = (E4M3[s] or 1.0) * g
            for x in r[j:j + 16]:
                c, v = signed(FP4, 8, x / step)
                codes.append(c)
                line.append(v * E4M3[s] * g)
        out.append(line)
    whole = struct.pack("<f", g if modelopt else 1 / g)
    if modelopt:
        return {"weight": ("U8", [n, m // 2], _nibbles(codes)), "weight_scale": ("F8_E4M3", [n, m // 16], bytes(scales)),
                "weight_scale_2": ("F32", [], whole), "input_scale": ("F32", [], struct.pack("<f", 1))}, out
    return {"weight_packed": ("U8", [n, m // 2], _nibbles(codes)),
            "weight_scale": ("F8_E4M3", [n, m // 16], bytes(scales)), "weight_global_scale": ("F32", [1], whole),
            "input_global_scale": ("F32", [1], struct.pack("<f", 1))}, out


def mxfp4(rows, codes_name="weight_packed"):
    n, m = len(rows), len(rows[0])
    codes, scales, out = [], bytearray(), []
    for r in rows:
        line = []
        for j in range(0, m, 32):
            e = 127
            while amax([r[j:j + 32]]) / 6 <= 2.0 ** (e - 128):
                e -= 1
            while amax([r[j:j + 32]]) / 6 > 2.0 ** (e - 127):
                e += 1
            scales.append(e)
            for x in r[j:j + 32]:
                c, v = signed(FP4, 8, x / 2.0 ** (e - 127))
                codes.append(c)
                line.append(v * 2.0 ** (e - 127))
        out.append(line)
    return {codes_name: ("U8", [n, m // 2], _nibbles(codes)), "weight_scale": ("U8", [n, m // 32], bytes(scales))}, out


def groups(rows, bits, length, symmetric, kind="F16", order=None, rnd=None):
    """codes[row][column], zeros and scales [row][group], the group of each column, and the values."""
    n, m, top = len(rows), len(rows[0]), (1 << bits) - 1
    length = m if length < 0 else length
    of = [j // length for j in range(m)]
    if order:
        rnd.shuffle(of)
    codes, zeros, scales, out = [], [], [], []
    for r in rows:
        z, s = [], []
        for g in range(-(-m // length)):
            part = [x for x, k in zip(r, of) if k == g]
            lo, hi = min(part + [0]), max(part + [0])
            mid = 1 << bits - 1
            step = floats(kind, [1], [(max(-lo, hi) / (mid - 0.5) if symmetric else (hi - lo) / top) or 1])[1][0]
            s.append(step)
            z.append(mid if symmetric else min(max(round(-lo / step), 1), top))
        line = [min(max(round(x / s[k]) + z[k], 0), top) for x, k in zip(r, of)]
        codes.append(line)
        zeros.append(z)
        scales.append(s)
        out.append([(c - z[k]) * s[k] for c, k in zip(line, of)])
    return codes, zeros, scales, of, out


def words(values, bits, places=None):
    """Words of 32 / bits values each, the first lowest, or values[places[i]] at i."""
    per = 32 // bits
    out = array.array("I")
    for i in range(0, len(values), per):
        out.append(sum(values[i + (places[k] if places else k)] << bits * k for k in range(per)))
    return out.tobytes()


def bits_in_a_row(values, bits):
    """Values without a gap, the first lowest: GPTQ's 3 bits."""
    n = sum(v << bits * i for i, v in enumerate(values))
    return n.to_bytes(len(values) * bits // 8, "little")


def _turned(x):
    return [list(c) for c in zip(*x)]


def gptq(rows, bits=4, length=32, symmetric=True, order=False, v2=False, rnd=None):
    codes, zeros, scales, of, out = groups(rows, bits, length, symmetric, "F16", order, rnd)
    n, m, g = len(rows), len(rows[0]), len(scales[0])
    pack = bits_in_a_row if bits == 3 else words
    packed = [pack(col, bits) for col in codes]  # by row: then words go across
    each = len(packed[0]) // 4
    qweight = b"".join(packed[o][4 * i:4 * i + 4] for i in range(each) for o in range(n))
    stored = [[(z - (not v2)) & (1 << bits) - 1 for z in r] for r in zeros]
    tensors = {"qweight": ("I32", [each, n], qweight),
               "qzeros": ("I32", [g, n * bits // 32], b"".join(pack(r, bits) for r in _turned(stored))),
               "scales": floats("F16", [g, n], [x for r in _turned(scales) for x in r])[0]}
    if order is not None:
        tensors["g_idx"] = ("I32", [m], array.array("i", of).tobytes())
    return tensors, out


def awq(rows, length=32):
    codes, zeros, scales, _, out = groups(rows, 4, length, False)
    n, m, g = len(rows), len(rows[0]), len(scales[0])
    at = [0, 2, 4, 6, 1, 3, 5, 7]
    return {"qweight": ("I32", [m, n // 8], b"".join(words(c, 4, at) for c in _turned(codes))),
            "qzeros": ("I32", [g, n // 8], b"".join(words(z, 4, at) for z in _turned(zeros))),
            "scales": floats("F16", [g, n], [x for r in _turned(scales) for x in r])[0]}, out


def ct_int(rows, bits=4, length=32, symmetric=True, order=False, rnd=None):
    """compressed-tensors' pack-quantized."""
    codes, zeros, scales, of, out = groups(rows, bits, length, symmetric, "BF16", order, rnd)
    n, m, g = len(rows), len(rows[0]), len(scales[0])
    tensors = {"weight_packed": ("I32", [n, m * bits // 32], b"".join(words(c, bits) for c in codes)),
               "weight_scale": floats("BF16", [n, g], [x for r in scales for x in r])[0],
               "weight_shape": ("I64", [2], struct.pack("<qq", n, m))}
    if not symmetric:
        packed = [words(z + [0] * (-n % (32 // bits)), bits) for z in _turned(zeros)]
        each = len(packed[0]) // 4
        tensors["weight_zero_point"] = ("I32", [each, g], b"".join(p[4 * i:4 * i + 4] for i in range(each) for p in packed))
    if order:
        tensors["weight_g_idx"] = ("I32", [m], array.array("i", of).tobytes())
    return tensors, out


def int8(rows, kind="BF16", names=("weight", "weight_scale")):
    """A byte a value, a scale a row: compressed-tensors' int-quantized."""
    tensor, scales = floats(kind, [len(rows), 1], [amax([r]) / 127.5 for r in rows])
    codes, out = array.array("b"), []
    for r, s in zip(rows, scales):
        line = [min(max(round(x / s), -128), 127) for x in r]
        codes.extend(line)
        out.append([c * s for c in line])
    return {names[0]: ("I8", [len(rows), len(rows[0])], codes.tobytes()), names[1]: tensor}, out


NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
BNB_FP4 = [s * x / 12 for s in (1, -1) for x in (0, 0.0625, 8, 12, 4, 6, 2, 3)]


def awq_gemv(rows, length=32):
    """Words along a row; scales and zeros padded, as AutoAWQ does for groups of 32, to a multiple of 32 groups."""
    codes, zeros, scales, _, out = groups(rows, 4, length, False)
    n, m = len(rows), len(rows[0])
    wide = -(-len(scales[0]) // 32) * 32
    pad = lambda r: r + [0] * (wide - len(r))  # noqa
    return {"qweight": ("I32", [n, m // 8], b"".join(words(r, 4) for r in codes)),
            "qzeros": ("I32", [n, wide // 8], b"".join(words(pad(r), 4) for r in zeros)),
            "scales": floats("F16", [n, wide], [x for r in scales for x in pad(r)])[0]}, out


def mlx(rows, bits=4, length=32, kind="BF16"):
    n, m, top = len(rows), len(rows[0]), (1 << bits) - 1
    data, scales, biases, out = b"", [], [], []
    for r in rows:
        codes, line = [], []
        for j in range(0, m, length):
            part = r[j:j + length]
            s = floats(kind, [1], [(max(part) - min(part)) / top or 1])[1][0]
            b = floats(kind, [1], [min(part)])[1][0]
            group = [min(max(round((x - b) / s), 0), top) for x in part]
            scales.append(s)
            biases.append(b)
            codes += group
            line += [c * s + b for c in group]
        data += bits_in_a_row(codes, bits)
        out.append(line)
    return {"weight": ("U32", [n, m * bits // 32], data), "scales": floats(kind, [n, m // length], scales)[0],
            "biases": floats(kind, [n, m // length], biases)[0]}, out


def mlx_mxfp4(rows):
    t, out = mxfp4(rows)
    n, m = len(rows), len(rows[0])
    return {"weight": ("U32", [n, m // 8], t["weight_packed"][2]), "scales": t["weight_scale"]}, out


def mlx_mxfp8(rows):
    t, out = mxfp8(rows)
    n, m = len(rows), len(rows[0])
    return {"weight": ("U32", [n, m // 4], t["weight"][2]), "scales": t["weight_scale"]}, out


def mlx_nvfp4(rows):
    t, out = nvfp4(rows, glob=1.0)
    n, m = len(rows), len(rows[0])
    return {"weight": ("U32", [n, m // 8], t["weight"][2]), "scales": ("U8", *t["weight_scale"][1:])}, out


def ternary(rows, divides=False):
    n, m = len(rows), len(rows[0])
    scale = floats("BF16", [1], [sum(map(abs, sum(rows, []))) / (n * m) or 1])[1][0]
    if divides:  # a power of two, so that its reciprocal is exact
        scale = 2.0 ** round(math.log2(scale))
    codes = [[min(max(round(x / scale), -1), 1) for x in r] for r in rows]
    part = n // 4
    data = bytes(sum(codes[i * part + r][j] + 1 << 2 * i for i in range(4)) for r in range(part) for j in range(m))
    return {"weight": ("U8", [part, m], data), "weight_scale": floats("BF16", [1], [1 / scale if divides else scale])[0]}, \
        [[c * scale for c in r] for r in codes]


def mxfp8(rows, kind="U8"):
    n, m = len(rows), len(rows[0])
    codes, scales, out = bytearray(), bytearray(), []
    for r in rows:
        line = []
        for j in range(0, m, 32):
            e = max(math.frexp(amax([r[j:j + 32]]) / 448)[1], -126)
            scales.append(e + 127)
            for x in r[j:j + 32]:
                c, v = signed(E4M3, 0x80, x / 2.0 ** e)
                codes.append(c)
                line.append(v * 2.0 ** e)
        out.append(line)
    return {"weight": ("F8_E4M3", [n, m], bytes(codes)), "weight_scale": (kind, [n, m // 32], bytes(scales))}, out


def deepseek_fp4(rows):
    """DeepSeek V4's experts."""
    t, out = mxfp4(rows)
    return {"weight": ("I8", *t["weight_packed"][1:]), "scale": ("F8_E8M0", *t["weight_scale"][1:])}, out


def deepseek_fp8(rows, block=(128, 128)):
    """DeepSeek V4's other matrices: scales of blocks are powers of two."""
    n, m = len(rows), len(rows[0])
    across = -(-m // block[1])
    scales = [math.frexp(amax([r[j:j + block[1]] for r in rows[i:i + block[0]]]) / 448)[1]
              for i in range(0, n, block[0]) for j in range(0, m, block[1])]
    codes, out = bytearray(), []
    for i, r in enumerate(rows):
        line = []
        for j, x in enumerate(r):
            e = scales[i // block[0] * across + j // block[1]]
            c, v = signed(E4M3, 0x80, x / 2.0 ** e)
            codes.append(c)
            line.append(v * 2.0 ** e)
        out.append(line)
    return {"weight": ("F8_E4M3", [n, m], bytes(codes)),
            "scale": ("F8_E8M0", [len(scales) // across, across], bytes(e + 127 for e in scales))}, out


def bnb4(rows, kind="nf4", nested=True, length=64):
    """bitsandbytes: blocks of the whole matrix, the first value of a byte above."""
    import json
    tensor, levels = floats("F32", [16], NF4 if kind == "nf4" else BNB_FP4)
    flat = [x for r in rows for x in r]
    blocks = [flat[i:i + length] for i in range(0, len(flat), length)]
    scales = [f32(max(map(abs, b)) or 1.0) for b in blocks]
    state = {"quant_type": kind, "blocksize": length, "dtype": "bfloat16", "shape": [len(rows), len(rows[0])]}
    out = {"weight.quant_map": tensor}
    if nested:
        offset = f32(sum(scales) / len(scales))
        maps, steps = floats("F32", [256], [(i - 128) / 128 for i in range(256)])
        tops = [max(abs(s - offset) for s in scales[i:i + 256]) or 1.0 for i in range(0, len(scales), 256)]
        nested_tensor, tops = floats("F32", [len(tops)], tops)
        codes = [nearest(steps, (s - offset) / tops[i // 256]) for i, s in enumerate(scales)]
        scales = [steps[c] * tops[i // 256] + offset for i, c in enumerate(codes)]
        state.update(nested_blocksize=256, nested_dtype="float32", nested_offset=offset)
        out.update({"weight.absmax": ("U8", [len(codes)], bytes(codes)), "weight.nested_absmax": nested_tensor,
                    "weight.nested_quant_map": maps})
    else:
        out["weight.absmax"], scales = floats("F32", [len(scales)], scales)
    order = sorted(range(16), key=lambda i: levels[i])
    codes, values = [], []
    for b, s in zip(blocks, scales):
        for x in b:
            c = order[nearest([levels[i] for i in order], x / s)]
            codes.append(c)
            values.append(levels[c] * s)
    text = json.dumps(state).encode()
    out["weight"] = ("U8", [len(codes) // 2, 1], bytes(codes[i] << 4 | codes[i + 1] for i in range(0, len(codes), 2)))
    out[f"weight.quant_state.bitsandbytes__{kind}"] = ("U8", [len(text)], text)
    n = len(rows[0])
    return out, [values[i:i + n] for i in range(0, len(values), n)]


def stack(matrices, across=()):
    """Tensors of several matrices as one each, of one more dimension; suffixes `across` are transposed."""
    out = {}
    for suffix, (kind, shape, raw) in matrices[0].items():
        parts = [m[suffix][2] for m in matrices]
        if suffix in across:  # of bytes
            n, w = shape
            parts = [bytes(p[i * w + j] for j in range(w) for i in range(n)) for p in parts]
            shape = [w, n]
        out[suffix] = (kind, [len(matrices)] + shape, b"".join(parts))
    return out


def _axes(flat, shape, order):
    """A flat list seen as an array of this shape, with its axes in another order."""
    strides = [math.prod(shape[i + 1:]) for i in range(len(shape))]
    out = []

    def walk(k, at):
        if k == len(order):
            out.append(flat[at])
            return
        for i in range(shape[order[k]]):
            walk(k + 1, at + i * strides[order[k]])
    walk(0, 0)
    return out


def awq_gemv_fast(rows, length=32):
    """AutoAWQ's order for its fast kernels: columns and four rows woven, zeros times scales, both across."""
    codes, zeros, scales, _, out = groups(rows, 4, length, False)
    n, m, g = len(rows), len(rows[0]), len(scales[0])
    wide = -(-(-(-g // 8)) // 4) * 4 * 8
    flat = _axes([c for r in codes for c in r], [n, m // 32, 4, 4, 2], [0, 1, 3, 2, 4])
    flat = _axes(flat, [n, m // 32, 4, 4, 2], [0, 1, 2, 4, 3])
    flat = _axes(flat, [n // 4, 4, m // 64, 64], [0, 2, 1, 3])
    data = array.array("H", [sum(flat[i + k] << 4 * k for k in range(4)) for i in range(0, len(flat), 4)]).tobytes()
    across = lambda x: [x[o][i] if i < g else 0.0 for i in range(wide) for o in range(n)]  # noqa
    shift, least = floats("F16", [wide, n], across([[-z * s for z, s in zip(a, b)] for a, b in zip(zeros, scales)]))
    out = [[codes[o][j] * scales[o][j // length] + least[j // length * n + o] for j in range(m)] for o in range(n)]
    return {"qweight": ("I16", [n // 4, m], data), "scales": floats("F16", [wide, n], across(scales))[0], "scaled_zeros": shift}, out


def hqq(rows, bits=4, length=32, axis=1, kind="F16", least=f16):
    """W_q: the numbers as groups (axis 1: rows of `length`; axis 0: columns of `length`), whose slices share bytes. The values
    are (code - zero) * scale with zero * scale rounded by `least`: to halves, as Q4_1 keeps it."""
    n, m, top = len(rows), len(rows[0]), (1 << bits) - 1
    flat = [x for r in rows for x in r]
    n_groups = n * m // length
    of = [i // length if axis else i % n_groups for i in range(n * m)]
    parts = [[] for _ in range(n_groups)]
    for x, k in zip(flat, of):
        parts[k].append(x)
    scales = floats(kind, [n_groups, 1], [(max(x) - min(x)) / top or 1 for x in parts])
    zeros = floats(kind, [n_groups, 1], [-min(x) / s for x, s in zip(parts, scales[1])])
    codes = [min(max(round(x / scales[1][k] + zeros[1][k]), 0), top) for x, k in zip(flat, of)]
    high, wide = (n_groups, length) if axis else (length, n_groups)
    per = 10 if bits == 3 else 8 // bits
    step = -(-high // per)
    codes_at = lambda i: codes[i] if i < len(codes) else 0  # noqa
    words_ = [sum(codes_at((s * step + i) * wide + e) << (per - 1 - s) * bits for s in range(per)) for i in range(step) for e in range(wide)]
    packed = ("I32", [step, wide], array.array("I", words_).tobytes()) if bits == 3 else ("U8", [step, wide], bytes(words_))
    number = lambda v: ("I32", [], struct.pack("<i", v))  # noqa
    name = (b"3bit_32" if bits == 3 else b"%dbit_u8" % bits)
    values = [c * scales[1][k] + least(-zeros[1][k] * scales[1][k]) for c, k in zip(codes, of)]
    return {"W_q": packed, "scale": scales[0], "zero": zeros[0], "nbits": number(bits), "group_size": number(length), "axis": number(axis),
            "packing": ("U8", [len(name)], name), "shape": ("I64", [2], struct.pack("<qq", n, m)), "quant_scale": ("U8", [], b"\0"),
            "quant_zero": ("U8", [], b"\0"), "view_as_float": ("U8", [], b"\0")}, \
        [values[i * m:(i + 1) * m] for i in range(n)]


def ao_int4(rows, length=32):
    """torchao's Int4Tensor: signed codes, the even one low; scales and zero points across. The value of the least code is
    rounded to a half, as Q4_1 keeps it."""
    codes, data, scales, points, out = [], b"", [], [], []
    for r in rows:
        s = [(max(r[j:j + length]) - min(r[j:j + length])) / 15 or 1 for j in range(0, len(r), length)]
        s = floats("BF16", [len(s)], s)[1]
        z = floats("BF16", [len(s)], [min(r[g * length:(g + 1) * length]) + 8 * s[g] for g in range(len(s))])[1]
        codes = [min(max(round((x - z[j // length]) / s[j // length]), -8), 7) for j, x in enumerate(r)]
        data += _nibbles([c & 15 for c in codes])
        scales.append(s)
        points.append(z)
        out.append([(c + 8) * s[j // length] + f16(z[j // length] - 8 * s[j // length]) for j, c in enumerate(codes)])
    shape = [len(scales[0]), len(rows)]
    return {"_weight_qdata": ("I8", [len(rows), len(rows[0]) // 2], data),
            "_weight_scale": floats("BF16", shape, [x for r in _turned(scales) for x in r])[0],
            "_weight_zero_point": floats("BF16", shape, [x for r in _turned(points) for x in r])[0]}, out


def ao_int8(rows, length=0, bits=8, symmetric=True):
    """torchao's Int8Tensor, or with zero points IntxUnpackedToInt8Tensor: a byte a value."""
    length = length or len(rows[0])
    low, data, scales, points, out = -(1 << bits - 1), array.array("b"), [], [], []
    for r in rows:
        line = []
        for j in range(0, len(r), length):
            part = r[j:j + length]
            lo, hi = min(part + [0]), max(part + [0])
            s = floats("BF16", [1], [(max(-lo, hi) / (-low - 0.5) if symmetric else (hi - lo) / (-2 * low - 1)) or 1])[1][0]
            z = 0 if symmetric else min(max(round(low - lo / s), low), -low - 1)
            codes = [min(max(round(x / s) + z, low), -low - 1) for x in part]
            data.extend(codes)
            scales.append(s)
            points.append(z)
            line += [(c - z) * s for c in codes]
        out.append(line)
    shape = [len(rows), len(rows[0]) // length]
    tensors = {"_weight_qdata": ("I8", [len(rows), len(rows[0])], data.tobytes()), "_weight_scale": floats("BF16", shape, scales)[0]}
    if not symmetric:
        tensors["_weight_zero_point"] = ("I8", shape, array.array("b", points).tobytes())
    return tensors, out


def ao_fp8(rows, block=(1, 0)):
    t, out = fp8(rows, block, "_weight_scale")
    return {"_weight_qdata": t["weight"], "_weight_scale": t["_weight_scale"]}, out

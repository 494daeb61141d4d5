"""A second opinion on the forward pass: plain Python, double precision, no code shared with Steel.

Writes tiny Hugging Face folders with random weights and computes their logits from the published
equations of each family, so that what the golden models do not cover (YaRN, linear RoPE, mixed
dense and sparse layers, GPTQ variants, old and new config names) has an independent answer.
"""
import array, json, math, os, random, struct


def bf16(x):
    """x rounded to bfloat16, as a float."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def matrix(rnd, rows, cols, scale=0.3):
    return [[bf16(rnd.gauss(0, scale)) for _ in range(cols)] for _ in range(rows)]


def write_safetensors(path, tensors):
    """tensors: name -> (dtype, shape, bytes)"""
    head, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    h = json.dumps(head).encode()
    h += b" " * (-len(h) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(h)) + h + data)


def f32_tensor(m):
    if isinstance(m[0], list):
        return ("F32", [len(m), len(m[0])], array.array("f", [x for r in m for x in r]).tobytes())
    return ("F32", [len(m)], array.array("f", m).tobytes())


def write_folder(path, config, weights, extra=None):
    """weights: name -> rows or vector (written as F32); extra: raw tensors that replace some."""
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump(config, f)
    tensors = {n: f32_tensor(w) for n, w in weights.items()}
    tensors.update(extra or {})
    write_safetensors(os.path.join(path, "model.safetensors"), tensors)


def rope_frequencies(cfg, dim):
    """(frequencies, factor on cos and sin) of plain, linear, llama3 and yarn scaling."""
    p = cfg.get("rope_parameters") or cfg.get("rope_scaling") or {}
    base = p.get("rope_theta", cfg.get("rope_theta", 10000.0))
    kind = p.get("rope_type", p.get("type", "default"))
    freq = [base ** (-2.0 * i / dim) for i in range(dim // 2)]
    if kind == "linear":
        return [f / p["factor"] for f in freq], 1.0
    if kind == "llama3":
        orig, out = p["original_max_position_embeddings"], []
        for f in freq:
            wave = 2 * math.pi / f
            if wave < orig / p["high_freq_factor"]:
                out.append(f)
            elif wave > orig / p["low_freq_factor"]:
                out.append(f / p["factor"])
            else:
                s = (orig / wave - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
                out.append((1 - s) * f / p["factor"] + s * f)
        return out, 1.0
    if kind == "yarn":
        orig = p.get("original_max_position_embeddings", cfg["max_position_embeddings"])
        where = lambda turns: dim * math.log(orig / (turns * 2 * math.pi)) / (2 * math.log(base))
        low = max(math.floor(where(p.get("beta_fast", 32))), 0)
        high = min(math.ceil(where(p.get("beta_slow", 1))), dim - 1)
        span = high - low or 0.001
        out = []
        for i, f in enumerate(freq):
            ramp = min(max((i - low) / span, 0), 1)
            out.append(f / p["factor"] * ramp + f * (1 - ramp))
        return out, p.get("attention_factor", 0.1 * math.log(p["factor"]) + 1)
    return freq, 1.0


def matvec(w, x, bias=None):
    y = [sum(a * b for a, b in zip(row, x)) for row in w]
    return [a + b for a, b in zip(y, bias)] if bias else y


def rms(x, gain, eps):
    s = 1 / math.sqrt(sum(v * v for v in x) / len(x) + eps)
    return [v * s * g for v, g in zip(x, gain)]


def softmax(x):
    m = max(x)
    e = [math.exp(v - m) for v in x]
    s = sum(e)
    return [v / s for v in e]


def glu(w, prefix, x):
    g = matvec(w[prefix + "gate_proj.weight"], x)
    u = matvec(w[prefix + "up_proj.weight"], x)
    return matvec(w[prefix + "down_proj.weight"], [a / (1 + math.exp(-a)) * b for a, b in zip(g, u)])


def is_sparse(cfg, i):
    if cfg["model_type"] != "qwen3_moe" or i in cfg.get("mlp_only_layers", []):
        return False
    return (i + 1) % cfg.get("decoder_sparse_step", 1) == 0


def window_of(cfg, i):
    if cfg["model_type"] == "mistral":
        return cfg.get("sliding_window") or 0
    if cfg.get("use_sliding_window") and i >= cfg.get("max_window_layers", 0):
        return cfg["sliding_window"]
    return 0


def forward(cfg, w, ids, inputs=None):
    """Logits after every position: a list of rows. inputs: receives the stream before each layer."""
    H, K = cfg["num_attention_heads"], cfg["num_key_value_heads"]
    D = cfg.get("head_dim") or cfg["hidden_size"] // H
    eps = cfg["rms_norm_eps"]
    freq, factor = rope_frequencies(cfg, D)

    def rotate(head, pos):
        out = head[:]
        for i, f in enumerate(freq):
            c, s = math.cos(pos * f) * factor, math.sin(pos * f) * factor
            a, b = head[i], head[i + D // 2]
            out[i], out[i + D // 2] = a * c - b * s, b * c + a * s
        return out

    X = [list(w["model.embed_tokens.weight"][t]) for t in ids]
    for layer in range(cfg["num_hidden_layers"]):
        if inputs is not None:
            inputs.append([x[:] for x in X])
        p = f"model.layers.{layer}."
        q_norm, k_norm = w.get(p + "self_attn.q_norm.weight"), w.get(p + "self_attn.k_norm.weight")
        keys, values, queries = [], [], []
        for t, x in enumerate(X):
            n = rms(x, w[p + "input_layernorm.weight"], eps)
            q, k, v = (matvec(w[p + f"self_attn.{c}_proj.weight"], n, w.get(p + f"self_attn.{c}_proj.bias"))
                       for c in "qkv")
            split = lambda z: [z[i:i + D] for i in range(0, len(z), D)]
            queries.append([rotate(rms(h, q_norm, eps) if q_norm else h, t) for h in split(q)])
            keys.append([rotate(rms(h, k_norm, eps) if k_norm else h, t) for h in split(k)])
            values.append(split(v))
        window = window_of(cfg, layer)
        for t in range(len(X)):
            first = max(0, t - window + 1) if window else 0
            a = []
            for h in range(H):
                g = h * K // H
                s = softmax([sum(x * y for x, y in zip(queries[t][h], keys[j][g])) / math.sqrt(D)
                             for j in range(first, t + 1)])
                a += [sum(s[j - first] * values[j][g][d] for j in range(first, t + 1)) for d in range(D)]
            X[t] = [x + y for x, y in zip(X[t], matvec(w[p + "self_attn.o_proj.weight"], a))]
            n = rms(X[t], w[p + "post_attention_layernorm.weight"], eps)
            if is_sparse(cfg, layer):
                probs = softmax(matvec(w[p + "mlp.gate.weight"], n))
                top = sorted(range(len(probs)), key=lambda e: (-probs[e], e))[:cfg["num_experts_per_tok"]]
                total = sum(probs[e] for e in top) if cfg.get("norm_topk_prob") else 1.0
                d = [0.0] * len(n)
                for e in top:
                    for i, v in enumerate(glu(w, p + f"mlp.experts.{e}.", n)):
                        d[i] += probs[e] / total * v
            else:
                d = glu(w, p + "mlp.", n)
            X[t] = [x + y for x, y in zip(X[t], d)]
    head = w.get("lm_head.weight") or w["model.embed_tokens.weight"]
    return [matvec(head, rms(x, w["model.norm.weight"], eps)) for x in X]


def make_weights(cfg, seed):
    rnd = random.Random(seed)
    E, H, K = cfg["hidden_size"], cfg["num_attention_heads"], cfg["num_key_value_heads"]
    D = cfg.get("head_dim") or E // H
    near_one = lambda n: [bf16(1 + rnd.gauss(0, 0.1)) for _ in range(n)]
    w = {"model.embed_tokens.weight": matrix(rnd, cfg["vocab_size"], E, 1.0), "model.norm.weight": near_one(E)}
    if not cfg.get("tie_word_embeddings"):
        w["lm_head.weight"] = matrix(rnd, cfg["vocab_size"], E)

    def add_glu(prefix, width):
        w[prefix + "gate_proj.weight"] = matrix(rnd, width, E)
        w[prefix + "up_proj.weight"] = matrix(rnd, width, E)
        w[prefix + "down_proj.weight"] = matrix(rnd, E, width)

    for i in range(cfg["num_hidden_layers"]):
        p = f"model.layers.{i}."
        w[p + "input_layernorm.weight"] = near_one(E)
        w[p + "post_attention_layernorm.weight"] = near_one(E)
        for c, rows in (("q", H * D), ("k", K * D), ("v", K * D)):
            w[p + f"self_attn.{c}_proj.weight"] = matrix(rnd, rows, E)
            if cfg["model_type"] == "qwen2":
                w[p + f"self_attn.{c}_proj.bias"] = [bf16(rnd.gauss(0, 0.3)) for _ in range(rows)]
        w[p + "self_attn.o_proj.weight"] = matrix(rnd, E, H * D)
        if cfg["model_type"].startswith("qwen3"):
            w[p + "self_attn.q_norm.weight"] = near_one(D)
            w[p + "self_attn.k_norm.weight"] = near_one(D)
        if is_sparse(cfg, i):
            w[p + "mlp.gate.weight"] = matrix(rnd, cfg["num_experts"], E)
            for e in range(cfg["num_experts"]):
                add_glu(p + f"mlp.experts.{e}.", cfg["moe_intermediate_size"])
        else:
            add_glu(p + "mlp.", cfg["intermediate_size"])
    return w


def gptq_pack(rows, rnd, group, act_order, sym, v2):
    """Quantises rows (out x in) in the GPTQ layout; returns (raw tensors by suffix, dequantised rows)."""
    n_out, n_in = len(rows), len(rows[0])
    glen = n_in if group < 0 else group
    groups = (n_in + glen - 1) // glen
    order = list(range(n_in))
    if act_order:
        rnd.shuffle(order)
    g_idx = [0] * n_in
    for j, col in enumerate(order):
        g_idx[col] = j // glen
    half = lambda x: struct.unpack("<e", struct.pack("<e", x))[0]
    scales = [[half(rnd.uniform(0.02, 0.06)) for _ in range(n_out)] for _ in range(groups)]
    zeros = [[8 if sym else rnd.randrange(1, 16) for _ in range(n_out)] for _ in range(groups)]
    code = [[min(15, max(0, round(rows[o][j] / scales[g_idx[j]][o]) + zeros[g_idx[j]][o])) for j in range(n_in)]
            for o in range(n_out)]
    deq = [[(code[o][j] - zeros[g_idx[j]][o]) * scales[g_idx[j]][o] for j in range(n_in)] for o in range(n_out)]
    qweight = [sum(code[o][8 * i + k] << (4 * k) for k in range(8)) for i in range(n_in // 8) for o in range(n_out)]
    stored = [[z - (0 if v2 else 1) for z in row] for row in zeros]
    qzeros = [sum(row[8 * i + k] << (4 * k) for k in range(8)) for row in stored for i in range(n_out // 8)]
    return {
        "qweight": ("I32", [n_in // 8, n_out], struct.pack(f"<{len(qweight)}I", *qweight)),
        "qzeros": ("I32", [groups, n_out // 8], struct.pack(f"<{len(qzeros)}I", *qzeros)),
        "scales": ("F16", [groups, n_out], b"".join(struct.pack("<e", s) for r in scales for s in r)),
        "g_idx": ("I32", [n_in], struct.pack(f"<{n_in}i", *g_idx)),
    }, deq

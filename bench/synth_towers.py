"""Models that read images, for synth_gguf.py: the text model with a vocabulary, and the file of its tower (mmproj), in the
layout of llama.cpp. The vocabulary has all bytes, the marks of images and chats, and filler tokens."""

# family; the tower's width, layers, heads, hidden, patch, and what its family adds (Qwen: levels of deepstack and the side of the
# table of positions; others: the side of an image in pixels); then the text model's width, layers, heads, kv heads, head dim,
# hidden, vocabulary
SEEING = {
    "qwen3-vl-8b": ("qwen3vl", (1152, 27, 16, 4304, 16, (8, 16, 24), 48), (4096, 36, 32, 8, 128, 12288, 151936)),
    "qwen3-vl-2b": ("qwen3vl", (1024, 24, 16, 4096, 16, (5, 11, 17), 48), (2048, 28, 16, 8, 128, 6144, 151936)),
    "gemma-3-12b": ("gemma3", (1152, 27, 16, 4304, 14, 896), (3840, 48, 16, 8, 256, 15360, 262144)),
    "ministral-3-8b": ("mistral3", (1024, 24, 16, 4096, 14, 1540), (4096, 34, 32, 8, 128, 14336, 131072)),
}
MARKS = {"qwen3vl": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"],
         "gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
         "mistral3": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]}
CHAT = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def byte_names():
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return [chr(b if b in plain else 256 + rest.index(b)) for b in range(256)]


def vocabulary(family, n):
    marks = CHAT + MARKS[family]
    names = byte_names() + marks
    names += [f"w{i}" for i in range(n - len(names))]
    kinds = [3 if 256 <= i < 256 + len(marks) else 1 for i in range(n)]
    meta = [("model", "gpt2"), ("pre", "qwen2"), ("tokens", names), ("token_type", kinds), ("merges", ["w 0"]),
            ("eos_token_id", 258), ("padding_token_id", 256), ("add_bos_token", False), ("chat_template", TEMPLATE)]
    return [(f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}", value) for key, value in meta]


def text(new, shape, layers, vocab, main, high, f32):
    """The text model: Qwen3's layers with three planes of positions, Gemma 3's or Mistral's. new makes an empty model."""
    family, tower_shape, (E, n, H, K, D, F, V) = SEEING[shape]
    m = new(family, layers or n, vocab or V, main, high)
    more = {"qwen3vl": dict(rope__freq_base=5e6, rope__dimension_sections=[24, 20, 20, 0]),
            "gemma3": dict(rope__freq_base=1e6, attention__sliding_window=1024),
            "mistral3": dict(rope__freq_base=1e6)}[family]
    if family == "qwen3vl":
        more["n_deepstack_layers"] = len(tower_shape[5])
    m.set(context_length=131072, embedding_length=E, block_count=m.layers, feed_forward_length=F, attention__head_count=H,
          attention__head_count_kv=K, attention__key_length=D, attention__value_length=D,
          attention__layer_norm_rms_epsilon=1e-6, rope__dimension_count=D, vocab_size=m.vocab, **more)
    if family == "gemma3":
        m.add("token_embd.weight", [E, m.vocab], high)
        m.add("output_norm.weight", [E], f32)
    else:
        m.ends(E, main, high)
    norms = {"qwen3vl": ["attn_q_norm", "attn_k_norm"], "mistral3": [],
             "gemma3": ["attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"]}[family]
    for i in range(m.layers):
        bits = m.more_bits(i)
        m.layer(i, ("attn_norm.weight", [E], f32), ("attn_q.weight", [E, H * D], main), ("attn_k.weight", [E, K * D], main),
                ("attn_v.weight", [E, K * D], bits), ("attn_output.weight", [H * D, E], main),
                *((f"{name}.weight", [D if name in ("attn_q_norm", "attn_k_norm") else E], f32) for name in norms),
                ("ffn_norm.weight", [E], f32), ("ffn_gate.weight", [E, F], main), ("ffn_up.weight", [E, F], main),
                ("ffn_down.weight", [F, E], bits))
    m.vocabulary = vocabulary(family, m.vocab)
    return m


def tower(new, shape, layers, main, f32, f16):
    """The file of the tower. layers: fewer; then the last levels of deepstack read the last layers."""
    family, (E, n, H, F, P, *rest), (out, *_) = SEEING[shape]
    m = new("clip", layers or n, 0, main, main)
    both = lambda name, n_in, n_out: (m.add(f"{name}.weight", [n_in, n_out], main), m.add(f"{name}.bias", [n_out], f32))
    norm = lambda name, width: [m.add(f"{name}.{part}", [width], f32) for part in ("weight", "bias")]
    gain = lambda name: m.add(f"{name}.weight", [E], f32)
    v = dict(embedding_length=E, feed_forward_length=F, patch_size=P, projection_dim=out, block_count=m.layers,
             attention__head_count=H, attention__layer_norm_epsilon=1e-5 if family == "mistral3" else 1e-6,
             image_mean=[0.5] * 3, image_std=[0.5] * 3)
    kind = {"qwen3vl": "qwen3vl_merger", "gemma3": "gemma3", "mistral3": "pixtral"}[family]
    levels = []
    if family == "qwen3vl":
        levels, side = [min(level, m.layers - len(rest[0]) + i) for i, level in enumerate(rest[0])], rest[1]
        v |= dict(image_size=P * side, spatial_merge_size=2, is_deepstack_layers=[i in levels for i in range(m.layers)])
    else:
        v |= dict(image_size=rest[0])
        side = rest[0] // P
        if family == "mistral3":
            v |= dict(spatial_merge_size=2)
    m.meta += [("clip.has_vision_encoder", True), ("clip.projector_type", kind),
               ("clip.use_silu" if family == "mistral3" else "clip.use_gelu", True)]
    m.set(**{f"vision__{key}": value for key, value in v.items()})
    for name in ("v.patch_embd.weight", "v.patch_embd.weight.1")[:2 if family == "qwen3vl" else 1]:
        m.add(name, [P, P, 3, E], f16)
    if family == "mistral3":
        gain("v.pre_ln")
        for i in range(m.layers):
            gain(f"v.blk.{i}.ln1")
            gain(f"v.blk.{i}.ln2")
            for part, n_in, n_out in (*((f"attn_{x}", E, E) for x in ("q", "k", "v", "out")), ("ffn_gate", E, F),
                                      ("ffn_up", E, F), ("ffn_down", F, E)):
                m.add(f"v.blk.{i}.{part}.weight", [n_in, n_out], main)
        m.add("v.token_embd.img_break", [out], f32)
        gain("mm.input_norm")
        m.add("mm.patch_merger.weight", [4 * E, E], main)
        m.add("mm.1.weight", [E, out], main)
        m.add("mm.2.weight", [out, out], main)
        return m
    m.add("v.patch_embd.bias", [E], f32)
    m.add("v.position_embd.weight", [E, side * side], f32)
    for i in range(m.layers):
        norm(f"v.blk.{i}.ln1", E)
        norm(f"v.blk.{i}.ln2", E)
        if family == "qwen3vl":
            both(f"v.blk.{i}.attn_qkv", E, 3 * E)
        else:
            for x in "qkv":
                both(f"v.blk.{i}.attn_{x}", E, E)
        both(f"v.blk.{i}.attn_out", E, E)
        both(f"v.blk.{i}.ffn_up", E, F)
        both(f"v.blk.{i}.ffn_down", F, E)
    norm("v.post_ln", E)
    if family == "gemma3":
        m.add("mm.input_projection.weight", [out, E], f16)
        m.add("mm.soft_emb_norm.weight", [E], f32)
        return m
    both("mm.0", 4 * E, 4 * E)
    both("mm.2", 4 * E, out)
    for i in levels:
        norm(f"v.deepstack.{i}.norm", 4 * E)
        both(f"v.deepstack.{i}.fc1", 4 * E, 4 * E)
        both(f"v.deepstack.{i}.fc2", 4 * E, out)
    return m

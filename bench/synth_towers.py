"""Models that read images, for synth_gguf.py: the text model with a vocabulary, and the file of its tower (mmproj), in the
layout of llama.cpp. The vocabulary has all bytes, the marks of images and chats, and filler tokens."""

# width, layers, heads, hidden, levels of deepstack, side of the table of positions; then the text model's width, layers,
# heads, kv heads, head dim, hidden
SEEING = {
    "qwen3-vl-8b": ((1152, 27, 16, 4304, (8, 16, 24), 48), (4096, 36, 32, 8, 128, 12288)),
    "qwen3-vl-2b": ((1024, 24, 16, 4096, (5, 11, 17), 48), (2048, 28, 16, 8, 128, 6144)),
}
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
TEMPLATE = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}\
<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def byte_names():
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return [chr(b if b in plain else 256 + rest.index(b)) for b in range(256)]


def vocabulary(n):
    names = byte_names() + MARKS
    names += [f"w{i}" for i in range(n - len(names))]
    marks = range(256, 256 + len(MARKS))
    kinds = [3 if i in marks else 1 for i in range(n)]
    meta = [("model", "gpt2"), ("pre", "qwen2"), ("tokens", names), ("token_type", kinds), ("merges", ["w 0"]),
            ("eos_token_id", 258), ("padding_token_id", 256), ("add_bos_token", False), ("chat_template", TEMPLATE)]
    return [(f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}", value) for key, value in meta]


def text(new, shape, layers, vocab, main, high, f32):
    """The text model: Qwen3's layers with three planes of positions. new makes an empty model."""
    E, n, H, K, D, F = SEEING[shape][1]
    m = new("qwen3vl", layers or n, vocab or 151936, main, high)
    m.set(context_length=262144, embedding_length=E, block_count=m.layers, feed_forward_length=F, attention__head_count=H,
          attention__head_count_kv=K, attention__key_length=D, attention__value_length=D,
          attention__layer_norm_rms_epsilon=1e-6, rope__freq_base=5e6, rope__dimension_count=D,
          rope__dimension_sections=[24, 20, 20, 0], n_deepstack_layers=len(SEEING[shape][0][4]), vocab_size=m.vocab)
    m.ends(E, main, high)
    for i in range(m.layers):
        more = m.more_bits(i)
        m.layer(i, ("attn_norm.weight", [E], f32), ("attn_q.weight", [E, H * D], main), ("attn_k.weight", [E, K * D], main),
                ("attn_v.weight", [E, K * D], more), ("attn_output.weight", [H * D, E], main),
                ("attn_q_norm.weight", [D], f32), ("attn_k_norm.weight", [D], f32), ("ffn_norm.weight", [E], f32),
                ("ffn_gate.weight", [E, F], main), ("ffn_up.weight", [E, F], main), ("ffn_down.weight", [F, E], more))
    m.vocabulary = vocabulary(m.vocab)
    return m


def tower(new, shape, layers, main, f32, f16):
    """The file of the tower. layers: fewer; then the last levels of deepstack read the last layers."""
    (E, n, H, F, levels, side), (out, *_) = SEEING[shape]
    m = new("clip", layers or n, 0, main, main)
    levels = [min(level, m.layers - len(levels) + i) for i, level in enumerate(levels)]
    v = dict(image_size=16 * side, patch_size=16, embedding_length=E, feed_forward_length=F, projection_dim=out,
             block_count=m.layers, attention__head_count=H, attention__layer_norm_epsilon=1e-6, spatial_merge_size=2,
             image_mean=[0.5] * 3, image_std=[0.5] * 3, is_deepstack_layers=[i in levels for i in range(m.layers)])
    m.meta += [("clip.has_vision_encoder", True), ("clip.projector_type", "qwen3vl_merger"), ("clip.use_gelu", True)]
    m.set(**{f"vision__{key}": value for key, value in v.items()})
    both = lambda name, n_in, n_out: (m.add(f"{name}.weight", [n_in, n_out], main), m.add(f"{name}.bias", [n_out], f32))
    norm = lambda name, width: [m.add(f"{name}.{part}", [width], f32) for part in ("weight", "bias")]
    for name in "v.patch_embd.weight", "v.patch_embd.weight.1":
        m.add(name, [16, 16, 3, E], f16)
    m.add("v.patch_embd.bias", [E], f32)
    m.add("v.position_embd.weight", [E, side * side], f32)
    for i in range(m.layers):
        norm(f"v.blk.{i}.ln1", E)
        norm(f"v.blk.{i}.ln2", E)
        both(f"v.blk.{i}.attn_qkv", E, 3 * E)
        both(f"v.blk.{i}.attn_out", E, E)
        both(f"v.blk.{i}.ffn_up", E, F)
        both(f"v.blk.{i}.ffn_down", F, E)
    norm("v.post_ln", E)
    both("mm.0", 4 * E, 4 * E)
    both("mm.2", 4 * E, out)
    for i in levels:
        norm(f"v.deepstack.{i}.norm", 4 * E)
        both(f"v.deepstack.{i}.fc1", 4 * E, 4 * E)
        both(f"v.deepstack.{i}.fc2", 4 * E, out)
    return m

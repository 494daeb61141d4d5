"""Shapes of hybrids and of sparse attention for synth_gguf.py: Nemotron 3 Nano, Granite 4 H, LFM2-MoE, GLM-5, Laguna XS, DeepSeek V4."""

F32 = 0


def mamba(E, heads, dim, groups, state, main):
    """The tensors of a state-space model of Mamba-2."""
    inner, channels = heads * dim, heads * dim + 2 * groups * state
    return [("ssm_in.weight", [E, inner + channels + heads], main), ("ssm_conv1d.weight", [4, channels], F32),
            ("ssm_conv1d.bias", [channels], F32), ("ssm_dt.bias", [heads], F32), ("ssm_a", [1, heads], F32),
            ("ssm_d", [1, heads], F32), ("ssm_norm.weight", [inner // groups, groups], F32),
            ("ssm_out.weight", [inner, E], main)]


def sizes(heads, dim, groups, state):
    return dict(ssm__conv_kernel=4, ssm__inner_size=heads * dim, ssm__state_size=state, ssm__time_step_rank=heads,
                ssm__group_count=groups)


def attention(E, H, K, D, main, more):
    return [("attn_q.weight", [E, H * D], main), ("attn_k.weight", [E, K * D], main), ("attn_v.weight", [E, K * D], more),
            ("attn_output.weight", [H * D, E], main)]


def nemotron_3_nano(Model, layers, vocab, main, high):
    E, H, K, D, X, F, shared = 2688, 32, 2, 128, 128, 1856, 3712
    blocks = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    m = Model("nemotron_h_moe", layers or len(blocks), vocab or 131072, main, high)
    kinds = blocks[:m.layers]
    m.set(context_length=262144, embedding_length=E, block_count=m.layers, attention__head_count=H,
          attention__head_count_kv=[K if b == "*" else 0 for b in kinds],
          feed_forward_length=[F if b == "E" else 0 for b in kinds], attention__key_length=D, attention__value_length=D,
          attention__layer_norm_rms_epsilon=1e-5, attention__layer_norm_epsilon=1e-5, rope__freq_base=10000.0,
          rope__dimension_count=D, expert_count=X, expert_used_count=6, expert_feed_forward_length=F, expert_shared_count=1,
          expert_shared_feed_forward_length=shared, expert_weights_norm=True, expert_weights_scale=2.5, expert_gating_func=2,
          expert_group_count=1, expert_group_used_count=1, vocab_size=m.vocab, **sizes(64, 64, 8, 128))
    m.ends(E, main, high)
    for i, block in enumerate(kinds):
        more = m.more_bits(i)
        m.layer(i, ("attn_norm.weight", [E], F32))
        if block == "M":
            m.layer(i, *mamba(E, 64, 64, 8, 128, main))
        elif block == "*":
            m.layer(i, *attention(E, H, K, D, main, more))
        else:
            m.layer(i, ("ffn_gate_inp.weight", [E, X], F32), ("exp_probs_b.bias", [X], F32),
                    ("ffn_up_exps.weight", [E, F, X], main), ("ffn_down_exps.weight", [F, E, X], more),
                    ("ffn_up_shexp.weight", [E, shared], main), ("ffn_down_shexp.weight", [shared, E], more))
    return m


def granite_4_h_small(Model, layers, vocab, main, high):
    E, H, K, D, X, F, shared = 4096, 32, 8, 128, 72, 768, 1536
    m = Model("granitehybrid", layers or 40, vocab or 100352, main, high)
    full = [i % 10 == 5 for i in range(m.layers)]
    m.set(context_length=131072, embedding_length=E, block_count=m.layers, attention__head_count=H,
          attention__head_count_kv=[K if f else 0 for f in full], feed_forward_length=F, attention__key_length=D,
          attention__value_length=D, attention__layer_norm_rms_epsilon=1e-5, rope__freq_base=10000.0, rope__dimension_count=D,
          rope__scaling__finetuned=False, embedding_scale=12.0, residual_scale=0.22, attention__scale=0.0078125,
          logit_scale=16.0, expert_count=X, expert_used_count=10, expert_feed_forward_length=F,
          expert_shared_feed_forward_length=shared, vocab_size=m.vocab, **sizes(128, 64, 1, 128))
    m.ends(E, main, high)
    for i in range(m.layers):
        more = m.more_bits(i)
        m.layer(i, ("attn_norm.weight", [E], F32), ("ffn_norm.weight", [E], F32),
                *(attention(E, H, K, D, main, more) if full[i] else mamba(E, 128, 64, 1, 128, main)),
                ("ffn_gate_inp.weight", [E, X], F32), ("ffn_gate_exps.weight", [E, F, X], main),
                ("ffn_up_exps.weight", [E, F, X], main), ("ffn_down_exps.weight", [F, E, X], more),
                ("ffn_gate_shexp.weight", [E, shared], main), ("ffn_up_shexp.weight", [E, shared], main),
                ("ffn_down_shexp.weight", [shared, E], more))
    return m


def lfm2_8b_a1b(Model, layers, vocab, main, high):
    E, H, K, D, X, F, dense = 2048, 32, 8, 64, 32, 1792, 7168
    m = Model("lfm2moe", layers or 24, vocab or 65536, main, high)
    full = [i in (2, 6, 10, 14, 18, 21) for i in range(m.layers)]
    m.set(context_length=128000, embedding_length=E, block_count=m.layers, attention__head_count=H,
          attention__head_count_kv=[K if f else 0 for f in full], feed_forward_length=dense,
          attention__layer_norm_rms_epsilon=1e-5, rope__freq_base=1e6, rope__dimension_count=D, shortconv__l_cache=3,
          leading_dense_block_count=2, expert_count=X, expert_used_count=4, expert_feed_forward_length=F,
          expert_gating_func=2, expert_weights_norm=True, vocab_size=m.vocab)
    m.add("token_embd.weight", [E, m.vocab], high)
    m.add("token_embd_norm.weight", [E], F32)
    for i in range(m.layers):
        more = m.more_bits(i)
        m.layer(i, ("attn_norm.weight", [E], F32), ("ffn_norm.weight", [E], F32))
        if full[i]:
            m.layer(i, *attention(E, H, K, D, main, more), ("attn_q_norm.weight", [D], F32),
                    ("attn_k_norm.weight", [D], F32))
        else:
            m.layer(i, ("shortconv.in_proj.weight", [E, 3 * E], main), ("shortconv.conv.weight", [3, E], F32),
                    ("shortconv.out_proj.weight", [E, E], main))
        if i < 2:
            m.layer(i, ("ffn_gate.weight", [E, dense], main), ("ffn_up.weight", [E, dense], main),
                    ("ffn_down.weight", [dense, E], more))
        else:
            m.layer(i, ("ffn_gate_inp.weight", [E, X], F32), ("exp_probs_b.bias", [X], F32),
                    ("ffn_gate_exps.weight", [E, F, X], main), ("ffn_up_exps.weight", [E, F, X], main),
                    ("ffn_down_exps.weight", [F, E, X], more))
    return m


def glm_5(latent, Model, layers, vocab, main, high):
    """GLM-5: latent attention with an indexer in every layer."""
    heads, dim, q_rank, E = 32, 128, 2048, 6144
    m = Model("glm-dsa", layers or 78, vocab or 154880, main, high)
    latent(m, (E, 64, 256, 2048, 12288), (q_rank, 512, 64, 192, 256), n_dense=min(3, m.layers - 1), context_length=202752,
           attention__layer_norm_rms_epsilon=1e-5, rope__freq_base=1e6, expert_used_count=8, expert_weights_scale=2.5,
           expert_group_count=1, expert_group_used_count=1, attention__indexer__head_count=heads,
           attention__indexer__key_length=dim, attention__indexer__top_k=2048)
    for i in range(m.layers):
        m.layer(i, ("indexer.attn_q_b.weight", [q_rank, heads * dim], main), ("indexer.attn_k.weight", [E, dim], main),
                ("indexer.proj.weight", [E, heads], main), ("indexer.k_norm.weight", [dim], F32),
                ("indexer.k_norm.bias", [dim], F32))
    return m


def experts(E, F, X, main, more, shared=True):
    """A router with a bias, experts, and a shared expert of their width."""
    t = [("ffn_gate_inp.weight", [E, X], F32), ("exp_probs_b.bias", [X], F32), ("ffn_gate_exps.weight", [E, F, X], main),
         ("ffn_up_exps.weight", [E, F, X], main), ("ffn_down_exps.weight", [F, E, X], more)]
    return t + [("ffn_gate_shexp.weight", [E, F], main), ("ffn_up_shexp.weight", [E, F], main),
                ("ffn_down_shexp.weight", [F, E], more)] * shared


def laguna_xs(Model, layers, vocab, main, high):
    """Laguna-XS: full attention of 48 heads in every fourth layer, windows with 64 heads in the others."""
    E, K, D, X, F, dense = 2048, 8, 128, 256, 512, 8192
    m = Model("laguna", layers or 40, vocab or 100352, main, high)
    slides = [i % 4 != 0 for i in range(m.layers)]
    heads = [64 if s else 48 for s in slides]
    m.set(context_length=262144, embedding_length=E, block_count=m.layers, feed_forward_length=dense, attention__head_count=heads,
          attention__head_count_kv=K, attention__key_length=D, attention__value_length=D, attention__layer_norm_rms_epsilon=1e-6,
          attention__sliding_window=512, attention__sliding_window_pattern=slides, rope__freq_base=5e5, rope__freq_base_swa=1e4,
          rope__dimension_count=D // 2, rope__dimension_count_swa=D, rope__scaling__type="yarn", rope__scaling__factor=32.0,
          rope__scaling__original_context_length=8192, leading_dense_block_count=1, expert_count=X, expert_used_count=8,
          expert_feed_forward_length=F, expert_shared_feed_forward_length=F, expert_weights_norm=True, expert_weights_scale=2.5,
          expert_gating_func=2, vocab_size=m.vocab)
    m.ends(E, main, high)
    for i, H in enumerate(heads):
        more = m.more_bits(i)
        m.layer(i, ("attn_norm.weight", [E], F32), *attention(E, H, K, D, main, more), ("attn_gate.weight", [E, H], main),
                ("attn_q_norm.weight", [D], F32), ("attn_k_norm.weight", [D], F32), ("ffn_norm.weight", [E], F32))
        if i == 0:
            m.layer(i, ("ffn_gate.weight", [E, dense], main), ("ffn_up.weight", [E, dense], main), ("ffn_down.weight", [dense, E], more))
        else:
            m.layer(i, *experts(E, F, X, main, more))
    return m


def deepseek_v4_flash(Model, layers, vocab, main, high, expert_type):
    """DeepSeek-V4-Flash, but that its first layers also route by scores: their tables of whole numbers would say nothing here."""
    E, H, D, Q, G, R, X, F, N, heads, dim = 4096, 64, 512, 1024, 8, 1024, 256, 2048, 4, 64, 128
    m = Model("deepseek4", layers or 43, vocab or 129280, main, high)
    rates = [0 if i < 2 else 4 if i % 2 == 0 else 128 for i in range(m.layers)]
    m.set(context_length=1048576, embedding_length=E, block_count=m.layers, attention__head_count=H, attention__head_count_kv=1,
          attention__key_length=D, attention__value_length=D, attention__layer_norm_rms_epsilon=1e-6, attention__sliding_window=128,
          attention__q_lora_rank=Q, attention__output_group_count=G, attention__output_lora_rank=R, attention__compress_ratios=rates,
          attention__compress_rope_freq_base=160000.0, attention__indexer__head_count=heads, attention__indexer__key_length=dim,
          attention__indexer__top_k=512, rope__freq_base=10000.0, rope__dimension_count=64, rope__scaling__type="yarn",
          rope__scaling__factor=16.0, rope__scaling__original_context_length=65536, hyper_connection__count=N,
          hyper_connection__sinkhorn_iterations=20, hyper_connection__epsilon=1e-6, hash_layer_count=0, expert_count=X,
          expert_used_count=6, expert_shared_count=1, expert_feed_forward_length=F, expert_weights_norm=True,
          expert_weights_scale=1.5, expert_gating_func=4, swiglu_clamp_exp=[10.0] * m.layers, swiglu_clamp_shexp=[10.0] * m.layers,
          vocab_size=m.vocab)
    m.ends(E, main, high)
    hyper = lambda name, n: [(f"hc_{name}_fn.weight", [N * E, n], F32), (f"hc_{name}_base.weight", [n], F32)]  # noqa
    compressor = lambda name, rate, width, D: [  # noqa
        (f"{name}_compressor_kv.weight", [E, width * D], main), (f"{name}_compressor_gate.weight", [E, width * D], main),
        (f"{name}_compressor_ape.weight", [width * D, rate], F32), (f"{name}_compressor_norm.weight", [D], F32)]
    for name, dims, kind in hyper("head", N):
        m.add("output_" + name.replace("head_", ""), dims, kind)
    m.add("output_hc_scale.weight", [1], F32)
    for i, rate in enumerate(rates):
        more = m.more_bits(i)
        m.layer(i, ("attn_norm.weight", [E], F32), ("attn_q_a.weight", [E, Q], main), ("attn_q_a_norm.weight", [Q], F32),
                ("attn_q_b.weight", [Q, H * D], main), ("attn_kv.weight", [E, D], main), ("attn_kv_a_norm.weight", [D], F32),
                ("attn_output_a.weight", [H // G * D, G * R], main), ("attn_output_b.weight", [G * R, E], main),
                ("attn_sinks.weight", [H], F32), ("ffn_norm.weight", [E], F32), *hyper("attn", N * (N + 2)), *hyper("ffn", N * (N + 2)),
                ("hc_attn_scale.weight", [3], F32), ("hc_ffn_scale.weight", [3], F32))
        if rate:
            m.layer(i, *compressor("attn", rate, 2 if rate == 4 else 1, D))
        if rate == 4:
            m.layer(i, ("indexer.attn_q_b.weight", [Q, heads * dim], main), ("indexer.proj.weight", [E, heads], main),
                    *compressor("indexer", rate, 2, dim))
        m.layer(i, *[(n, d, expert_type if "_exps" in n else k) for n, d, k in experts(E, F, X, main, more)])
    return m

"""The demo model as trained: Qwen3-MoE's mathematics, laid out for speed on one GPU.

The weights of all layers lie stacked in a dozen tensors. Every expert is computed for every token as one wide
gated layer whose columns are scaled by the router's weight (zero for experts not chosen): at this size that is far
faster than gathering tokens, and its result is the same. `export` gives the tensors under Hugging Face's names.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class Config:
    def __init__(self, vocab=3072, hidden=256, layers=6, heads=4, kv_heads=2, head_dim=64, experts=16, top=4, width=64,
                 theta=10000.0, eps=1e-6, positions=2048):
        self.vocab, self.hidden, self.layers, self.heads, self.kv_heads = vocab, hidden, layers, heads, kv_heads
        self.head_dim, self.experts, self.top, self.width = head_dim, experts, top, width
        self.theta, self.eps, self.positions = theta, eps, positions


def rms(x, weight, eps):
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return y.to(x.dtype) * weight.to(x.dtype)


def rotate(x, cos, sin):
    """x (..., T, D); cos and sin (T, D/2) or (B, 1, T, D/2)."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.compute = None      # type of the residual stream; None: that of the weights
        L, H, E, W = c.layers, c.hidden, c.experts, c.width

        def weight(*shape, scale=1.0):
            return nn.Parameter(torch.randn(*shape) * scale * 0.5 / math.sqrt(shape[-1]))

        self.embed = nn.Parameter(torch.randn(c.vocab, H) * 0.02)
        self.q = weight(L, c.heads * c.head_dim, H)
        self.k = weight(L, c.kv_heads * c.head_dim, H)
        self.v = weight(L, c.kv_heads * c.head_dim, H)
        self.o = weight(L, H, c.heads * c.head_dim, scale=0.3)
        self.gate = weight(L, E, W, H)
        self.up = weight(L, E, W, H)
        self.down = weight(L, E, H, W, scale=0.3)
        self.router = nn.Parameter(torch.randn(L, E, H) * 0.02)
        self.norm_in = nn.Parameter(torch.ones(L, H))
        self.norm_mid = nn.Parameter(torch.ones(L, H))
        self.norm_q = nn.Parameter(torch.ones(L, c.head_dim))
        self.norm_k = nn.Parameter(torch.ones(L, c.head_dim))
        self.norm_out = nn.Parameter(torch.ones(H))

    def matrices(self):
        """The parameters that are stacks of hidden matrices."""
        return [self.q, self.k, self.v, self.o, self.gate, self.up, self.down]

    def others(self):
        return [self.embed, self.router, self.norm_in, self.norm_mid, self.norm_q, self.norm_k, self.norm_out]

    def angles(self, positions):
        D = self.c.head_dim
        inv = self.c.theta ** (-torch.arange(0, D, 2, device=positions.device, dtype=torch.float32) / D)
        a = positions.float()[..., None] * inv
        return a.cos(), a.sin()

    def hidden(self, ids, positions, attend):
        """Residual stream after the last norm, and the balance loss. attend(layer, q, k, v) -> (B, heads, T, D)."""
        c = self.c
        B, T = ids.shape
        cos, sin = self.angles(positions)
        x = F.embedding(ids, self.embed)
        if self.compute is not None:
            x = x.to(self.compute)
        balance = 0.0
        stacks = [t.unbind(0) for t in (self.q, self.k, self.v, self.o, self.gate, self.up, self.down, self.router,
                                        self.norm_in, self.norm_mid, self.norm_q, self.norm_k)]
        for i, (wq, wk, wv, wo, wg, wu, wd, wr, n1, n2, nq, nk) in enumerate(zip(*stacks)):
            h = rms(x, n1, c.eps)
            q = rms(F.linear(h, wq).view(B, T, c.heads, c.head_dim), nq, c.eps).transpose(1, 2)
            k = rms(F.linear(h, wk).view(B, T, c.kv_heads, c.head_dim), nk, c.eps).transpose(1, 2)
            v = F.linear(h, wv).view(B, T, c.kv_heads, c.head_dim).transpose(1, 2)
            a = attend(i, rotate(q, cos, sin), rotate(k, cos, sin), v)
            x = x + F.linear(a.transpose(1, 2).reshape(B, T, c.heads * c.head_dim), wo)
            h = rms(x, n2, c.eps)
            with torch.autocast(device_type=x.device.type, enabled=False):
                p = torch.softmax(F.linear(h.float(), wr.float()), -1)
                top, which = torch.topk(p, c.top, -1)
                share = torch.zeros_like(p).scatter(-1, which, top / top.sum(-1, keepdim=True))
                used = torch.zeros_like(p).scatter(-1, which, 1.0)
                balance = balance + c.experts / c.top * (used.mean((0, 1)) * p.mean((0, 1))).sum()
            g = F.linear(h, wg.reshape(-1, c.hidden))
            u = F.linear(h, wu.reshape(-1, c.hidden))
            m = (F.silu(g) * u).view(B, T, c.experts, c.width) * share.to(g.dtype)[..., None]
            x = x + F.linear(m.view(B, T, -1), wd.permute(1, 0, 2).reshape(c.hidden, -1))
        return rms(x, self.norm_out, c.eps), balance / c.layers

    def logits(self, h):
        return F.linear(h, self.embed)

    def loss(self, ids, targets, weights, positions, attend):
        """Mean of the weighted cross entropies, and the balance loss (1 when the experts share evenly)."""
        h, balance = self.hidden(ids, positions, attend)
        z = self.logits(h).float().flatten(0, 1)
        ce = F.cross_entropy(z, targets.flatten(), reduction="none")
        w = weights.flatten()
        return (ce * w).sum() / w.sum().clamp(min=1.0), balance


def widen(k, heads):
    """Key or value heads repeated for grouped attention."""
    return k if k.shape[1] == heads else k.repeat_interleave(heads // k.shape[1], 1)


def dense_attention(mask):
    """Attention under an explicit mask, (T, S) or (B, 1, T, S), true where a query may look."""
    def attend(layer, q, k, v):
        k, v = widen(k, q.shape[1]), widen(v, q.shape[1])
        if hasattr(F, "scaled_dot_product_attention"):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        s = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
        return torch.softmax(s.masked_fill(~mask, float("-inf")), -1).to(v.dtype) @ v
    return attend


@torch.no_grad()
def generate(model, prompts, stop, most, device):
    """Greedy continuation of all prompts (lists of ids) at once, with a cache of keys and values."""
    c = model.c
    B, T = len(prompts), max(map(len, prompts))
    S = T + most
    ids = torch.zeros(B, T, dtype=torch.long, device=device)
    for i, p in enumerate(prompts):
        ids[i, :len(p)] = torch.tensor(p, device=device)
    length = torch.tensor([len(p) for p in prompts], device=device)
    keys = torch.zeros(c.layers, B, c.kv_heads, S, c.head_dim, device=device)
    vals = torch.zeros_like(keys)
    causal = dense_attention(torch.ones(T, T, dtype=torch.bool, device=device).tril())

    def fill(layer, q, k, v):
        keys[layer][:, :, :T], vals[layer][:, :, :T] = k, v
        return causal(layer, q, k, v)

    h, _ = model.hidden(ids, torch.arange(T, device=device), fill)
    row = torch.arange(B, device=device)
    token = model.logits(h[row, length - 1]).argmax(-1)
    out, done, at = [], torch.zeros(B, dtype=torch.bool, device=device), length.clone()
    for _ in range(most):
        out.append(torch.where(done, torch.full_like(token, stop), token))
        done = done | (token == stop)
        if bool(done.all()):
            break
        look = dense_attention((torch.arange(S, device=device)[None] <= at[:, None])[:, None, None])

        def step(layer, q, k, v):
            keys[layer][row, :, at], vals[layer][row, :, at] = k[:, :, 0], v[:, :, 0]
            return look(layer, q, keys[layer], vals[layer])

        h, _ = model.hidden(token[:, None], at[:, None, None], step)
        token = model.logits(h[:, 0]).argmax(-1)
        at = at + 1
    table = torch.stack(out, 1).tolist()
    return [t[:t.index(stop)] if stop in t else t for t in table]


def export(model):
    """Hugging Face names -> float tensors. The head is the embedding, so it has no tensor of its own."""
    out = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm_out}
    for i in range(model.c.layers):
        p = f"model.layers.{i}."
        for name, t in (("input_layernorm", model.norm_in), ("post_attention_layernorm", model.norm_mid),
                        ("self_attn.q_proj", model.q), ("self_attn.k_proj", model.k), ("self_attn.v_proj", model.v),
                        ("self_attn.o_proj", model.o), ("self_attn.q_norm", model.norm_q),
                        ("self_attn.k_norm", model.norm_k), ("mlp.gate", model.router)):
            out[p + name + ".weight"] = t[i]
        for e in range(model.c.experts):
            for name, t in (("gate_proj", model.gate), ("up_proj", model.up), ("down_proj", model.down)):
                out[f"{p}mlp.experts.{e}.{name}.weight"] = t[i, e]
    return {k: v.detach() for k, v in out.items()}


def config_json(c, end, stop):
    return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": c.vocab,
            "hidden_size": c.hidden, "intermediate_size": 4 * c.hidden, "num_hidden_layers": c.layers,
            "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim,
            "hidden_act": "silu", "max_position_embeddings": c.positions, "rms_norm_eps": c.eps,
            "rope_theta": c.theta, "rope_scaling": None, "tie_word_embeddings": True, "attention_bias": False,
            "attention_dropout": 0.0, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": c.experts,
            "num_experts_per_tok": c.top, "moe_intermediate_size": c.width, "norm_topk_prob": True,
            "output_router_logits": False, "router_aux_loss_coef": 0.001, "initializer_range": 0.02,
            "sliding_window": None, "use_sliding_window": False, "max_window_layers": c.layers, "use_cache": True,
            "torch_dtype": "bfloat16", "bos_token_id": end, "eos_token_id": stop}

"""The tiny model that sees, as it is trained: SmolVLM's mathematics (a SigLIP tower, patches joined two by two, one
projection, a Llama). `export` gives the tensors under Hugging Face's names.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

SIDE, PATCH, JOIN = 96, 12, 2
FEATURES = (SIDE // PATCH // JOIN) ** 2
EPS = 1e-6


class Size:
    def __init__(self, width, layers, ff, heads):
        self.width, self.layers, self.ff, self.heads = width, layers, ff, heads


TOWER, TEXT = Size(96, 4, 256, 3), Size(96, 2, 256, 3)


def weight(*shape, scale=1.0):
    return nn.Parameter(torch.randn(*shape) * scale * 0.5 / math.sqrt(shape[-1]))


def fixed(n, value):
    return nn.Parameter(torch.full((n,), float(value)))


def attend(q, k, v, heads, mask=None):
    b, t, width = q.shape
    q, k, v = (x.reshape(b, t, heads, -1).transpose(1, 2) for x in (q, k, v))
    if mask is not None:
        q, k = rotate(q), rotate(k)
    s = q @ k.transpose(-1, -2) / math.sqrt(width // heads)
    if mask is not None:
        s = s + mask
    return (s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, width)


def rotate(x, theta=10000.0):
    d, t = x.shape[-1], x.shape[-2]
    angle = torch.arange(t)[:, None] * theta ** (-torch.arange(0, d, 2) / d)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class TowerLayer(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.heads, w = s.heads, s.width
        self.n1, self.b1, self.n2, self.b2 = fixed(w, 1), fixed(w, 0), fixed(w, 1), fixed(w, 0)
        self.q, self.k, self.v, self.o = weight(w, w), weight(w, w), weight(w, w), weight(w, w, scale=.4)
        self.bq, self.bk, self.bv, self.bo = fixed(w, 0), fixed(w, 0), fixed(w, 0), fixed(w, 0)
        self.up, self.bup = weight(s.ff, w), fixed(s.ff, 0)
        self.down, self.bdown = weight(w, s.ff, scale=.4), fixed(w, 0)

    def forward(self, x):
        n = F.layer_norm(x, self.n1.shape, self.n1, self.b1, EPS)
        a = attend(F.linear(n, self.q, self.bq), F.linear(n, self.k, self.bk), F.linear(n, self.v, self.bv), self.heads)
        x = x + F.linear(a, self.o, self.bo)
        n = F.layer_norm(x, self.n2.shape, self.n2, self.b2, EPS)
        return x + F.linear(F.gelu(F.linear(n, self.up, self.bup), approximate="tanh"), self.down, self.bdown)


def rms(x, gain):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * gain


class TextLayer(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.heads, w = s.heads, s.width
        self.n1, self.n2 = fixed(w, 1), fixed(w, 1)
        self.q, self.k, self.v, self.o = weight(w, w), weight(w, w), weight(w, w), weight(w, w, scale=.4)
        self.gate, self.up, self.down = weight(s.ff, w), weight(s.ff, w), weight(w, s.ff, scale=.4)

    def forward(self, x, mask):
        n = rms(x, self.n1)
        x = x + F.linear(attend(F.linear(n, self.q), F.linear(n, self.k), F.linear(n, self.v), self.heads, mask), self.o)
        n = rms(x, self.n2)
        return x + F.linear(F.silu(F.linear(n, self.gate)) * F.linear(n, self.up), self.down)


class Model(nn.Module):
    def __init__(self, vocab, helps):
        """helps: sizes of classifiers on the mean feature, which only help training."""
        super().__init__()
        w, t = TOWER.width, TEXT.width
        self.patches, self.patch_bias = weight(w, 3 * PATCH * PATCH), fixed(w, 0)
        self.positions = nn.Parameter(torch.randn((SIDE // PATCH) ** 2, w) * .02)
        self.tower = nn.ModuleList(TowerLayer(TOWER) for _ in range(TOWER.layers))
        self.post, self.post_bias = fixed(w, 1), fixed(w, 0)
        self.project = weight(t, JOIN * JOIN * w)
        self.embed = nn.Parameter(torch.randn(vocab, t) * .02)
        self.text = nn.ModuleList(TextLayer(TEXT) for _ in range(TEXT.layers))
        self.norm = fixed(t, 1)
        self.helps = nn.ParameterList(weight(n, t) for n in helps)

    def see(self, pixels):
        """pixels (B, 3, SIDE, SIDE), 0 to 255 -> features (B, FEATURES, TEXT.width)."""
        n, g = len(pixels), SIDE // PATCH
        x = pixels.float() / 127.5 - 1
        x = x.reshape(n, 3, g, PATCH, g, PATCH).permute(0, 2, 4, 1, 3, 5).reshape(n, g * g, -1)
        x = F.linear(x, self.patches, self.patch_bias) + self.positions
        for layer in self.tower:
            x = layer(x)
        x = F.layer_norm(x, self.post.shape, self.post, self.post_bias, EPS)
        x = x.reshape(n, g // JOIN, JOIN, g // JOIN, JOIN, -1).permute(0, 1, 3, 2, 4, 5)
        return F.linear(x.reshape(n, FEATURES, -1), self.project)

    def read(self, ids, features, at):
        """ids (B, T); the features are rows at, at + 1, ... Returns the normed stream (B, T, width)."""
        x = F.embedding(ids, self.embed)
        if features is not None:
            x = torch.cat((x[:, :at], features, x[:, at + FEATURES:]), 1)
        mask = torch.full((x.shape[1],) * 2, -1e30).triu(1)
        for layer in self.text:
            x = layer(x, mask)
        return rms(x, self.norm)

    def matrices(self):
        return [p for m in (self.tower, self.text) for p in m.parameters() if p.dim() == 2] + [self.project]

    def others(self):
        mine = {id(p) for p in self.matrices()}
        return [p for p in self.parameters() if id(p) not in mine]


def export(m):
    """Tensors under Hugging Face's names."""
    v, c, t = "model.vision_model.", "model.connector.modality_projection.proj.weight", "model.text_model."
    out = {v + "embeddings.patch_embedding.weight": m.patches.reshape(-1, 3, PATCH, PATCH),
           v + "embeddings.patch_embedding.bias": m.patch_bias,
           v + "embeddings.position_embedding.weight": m.positions,
           v + "post_layernorm.weight": m.post, v + "post_layernorm.bias": m.post_bias, c: m.project,
           t + "embed_tokens.weight": m.embed, t + "norm.weight": m.norm}
    for i, x in enumerate(m.tower):
        p = f"{v}encoder.layers.{i}."
        for name, w, b in (("layer_norm1", x.n1, x.b1), ("layer_norm2", x.n2, x.b2), ("self_attn.q_proj", x.q, x.bq),
                           ("self_attn.k_proj", x.k, x.bk), ("self_attn.v_proj", x.v, x.bv),
                           ("self_attn.out_proj", x.o, x.bo), ("mlp.fc1", x.up, x.bup), ("mlp.fc2", x.down, x.bdown)):
            out[p + name + ".weight"], out[p + name + ".bias"] = w, b
    for i, x in enumerate(m.text):
        p = f"{t}layers.{i}."
        for name, w in (("input_layernorm", x.n1), ("post_attention_layernorm", x.n2), ("self_attn.q_proj", x.q),
                        ("self_attn.k_proj", x.k), ("self_attn.v_proj", x.v), ("self_attn.o_proj", x.o),
                        ("mlp.gate_proj", x.gate), ("mlp.up_proj", x.up), ("mlp.down_proj", x.down)):
            out[f"{p}{name}.weight"] = w
    return out


def config(vocab, image_token):
    return {"architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm", "scale_factor": JOIN,
            "image_token_id": image_token, "tie_word_embeddings": True,
            "text_config": {"model_type": "llama", "vocab_size": vocab, "hidden_size": TEXT.width,
                            "intermediate_size": TEXT.ff, "num_hidden_layers": TEXT.layers,
                            "num_attention_heads": TEXT.heads, "num_key_value_heads": TEXT.heads,
                            "head_dim": TEXT.width // TEXT.heads, "hidden_act": "silu", "rms_norm_eps": EPS,
                            "rope_theta": 10000.0, "max_position_embeddings": 1024, "tie_word_embeddings": True},
            "vision_config": {"model_type": "smolvlm_vision", "hidden_size": TOWER.width, "intermediate_size": TOWER.ff,
                              "num_hidden_layers": TOWER.layers, "num_attention_heads": TOWER.heads, "image_size": SIDE,
                              "patch_size": PATCH, "num_channels": 3, "hidden_act": "gelu_pytorch_tanh",
                              "layer_norm_eps": EPS}}

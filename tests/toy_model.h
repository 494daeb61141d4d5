/*
 * A small complete model, written as GGUF (and a hybrid like it: toy_write_hybrid): two layers, four experts of which two are used, a
 * vocabulary of all bytes plus the ChatML tokens, a chat template with thinking and tools. The
 * weights are those of a fixed generator, so it speaks nonsense, but always the same nonsense, mostly
 * printable. For tests of everything that happens around a model.
 */
#ifndef STEEL_TESTS_TOY_MODEL_H
#define STEEL_TESTS_TOY_MODEL_H

#include "base/buf.h"
#include "base/mem.h"
#include "file/gguf_write.h"

#include <stdio.h>
#include <string.h>

enum {
    TOY_EMBD = 64,
    TOY_HEADS = 4,
    TOY_KV_HEADS = 2,
    TOY_HEAD = 16,
    TOY_EXPERTS = 4,
    TOY_FF = 32,
    TOY_LAYERS = 2,
    TOY_CONTEXT = 8192,
    TOY_HYBRID_LAYERS = 4, /* every other one a gated delta net */
    TOY_K_HEADS = 2,
    TOY_V_HEADS = 4,
    TOY_CONV = 4,
    TOY_ENDOFTEXT = 256, /* bytes are tokens 0..255 */
    TOY_IM_START,
    TOY_IM_END,
    TOY_THINK,
    TOY_END_THINK,
    TOY_TOOL,
    TOY_END_TOOL,
    TOY_VOCAB = 288,
};

static inline float toy_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return (float)((double)(z >> 11) * 0x1p-53 * 2 - 1);
}

/* The character byte-level BPE writes for a byte, as UTF-8. */
static inline int toy_byte_name(int b, char *out)
{
    int c = b;
    if (b <= 32)
        c = 256 + b;
    else if (b >= 127 && b <= 160)
        c = 256 + 33 + b - 127;
    else if (b == 173)
        c = 256 + 67;
    if (c < 128) {
        out[0] = (char)c;
        return 1;
    }
    out[0] = (char)(0xc0 | c >> 6);
    out[1] = (char)(0x80 | (c & 63));
    return 2;
}

static inline void toy_set_vocab(struct gguf_writer *w)
{
    static const char *const names[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>",  "<think>",
                                        "</think>",      "<tool_call>",  "</tool_call>"};
    struct buf tokens = {0}, merges = {0};
    int32_t kinds[TOY_VOCAB];
    for (int i = 0; i < TOY_VOCAB; i++) {
        char name[32];
        int n;
        if (i < 256)
            n = toy_byte_name(i, name);
        else if (i <= TOY_END_TOOL)
            n = snprintf(name, sizeof name, "%s", names[i - 256]);
        else
            n = snprintf(name, sizeof name, "<|unused%d|>", i);
        gguf_pack_string(&tokens, name, (size_t)n);
        kinds[i] = i < 256 ? 1 : i <= TOY_IM_END || i > TOY_END_TOOL ? 3 : 4;
    }
    gguf_set_string(w, "tokenizer.ggml.model", "gpt2", 4);
    gguf_set_string(w, "tokenizer.ggml.pre", "qwen2", 5);
    gguf_set_strings(w, "tokenizer.ggml.tokens", &tokens, TOY_VOCAB);
    gguf_set_array(w, "tokenizer.ggml.token_type", META_I32, kinds, TOY_VOCAB);
    gguf_set_strings(w, "tokenizer.ggml.merges", &merges, 0);
    gguf_set_u32(w, "tokenizer.ggml.eos_token_id", TOY_IM_END);
    gguf_set_u32(w, "tokenizer.ggml.padding_token_id", TOY_ENDOFTEXT);
    static const char template[] =
        "{%- if tools %}{{ '<|im_start|>system\\n' }}"
        "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}"
        "{{ '# Tools\\n<tools>' }}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}"
        "{{ '\\n</tools><|im_end|>\\n' }}"
        "{%- elif messages[0].role == 'system' %}"
        "{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}"
        "{%- for m in messages %}"
        "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
        "{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + (m.content or '') }}"
        "{%- for call in m.tool_calls or [] %}"
        "{{ '\\n<tool_call>\\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' }}"
        "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
        "{{ '<|im_end|>\\n' }}"
        "{%- elif m.role == 'tool' %}"
        "{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response>"
        "<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}"
        "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}";
    gguf_set_string(w, "tokenizer.chat_template", template, sizeof template - 1);
    buf_clear(&tokens);
    buf_clear(&merges);
}

struct toy_tensor {
    char name[48];
    int64_t dims[3];
    int n_dims;
    float scale; /* 0: all ones; below 0: decays */
};

static inline int toy_tensors(struct toy_tensor *t)
{
    int n = 0;
    float w = 0.2f;
    t[n++] = (struct toy_tensor){"token_embd.weight", {TOY_EMBD, TOY_VOCAB}, 2, 1};
    t[n++] = (struct toy_tensor){"output.weight", {TOY_EMBD, TOY_VOCAB}, 2, 0.5f};
    t[n++] = (struct toy_tensor){"output_norm.weight", {TOY_EMBD}, 1, 0};
    for (int i = 0; i < TOY_LAYERS; i++) {
        const struct toy_tensor layer[] = {
            {"attn_norm", {TOY_EMBD}, 1, 0},
            {"ffn_norm", {TOY_EMBD}, 1, 0},
            {"attn_q_norm", {TOY_HEAD}, 1, 0},
            {"attn_k_norm", {TOY_HEAD}, 1, 0},
            {"attn_q", {TOY_EMBD, TOY_HEADS * TOY_HEAD}, 2, w},
            {"attn_k", {TOY_EMBD, TOY_KV_HEADS * TOY_HEAD}, 2, w},
            {"attn_v", {TOY_EMBD, TOY_KV_HEADS * TOY_HEAD}, 2, w},
            {"attn_output", {TOY_HEADS * TOY_HEAD, TOY_EMBD}, 2, w},
            {"ffn_gate_inp", {TOY_EMBD, TOY_EXPERTS}, 2, w},
            {"ffn_gate_exps", {TOY_EMBD, TOY_FF, TOY_EXPERTS}, 3, w},
            {"ffn_up_exps", {TOY_EMBD, TOY_FF, TOY_EXPERTS}, 3, w},
            {"ffn_down_exps", {TOY_FF, TOY_EMBD, TOY_EXPERTS}, 3, w},
        };
        for (size_t j = 0; j < sizeof layer / sizeof *layer; j++, n++) {
            t[n] = layer[j];
            snprintf(t[n].name, sizeof t[n].name, "blk.%d.%.20s.weight", i, layer[j].name);
        }
    }
    return n;
}

static inline void toy_set_meta(struct gguf_writer *w)
{
    gguf_set_string(w, "general.architecture", "qwen3moe", 8);
    gguf_set_string(w, "general.name", "toy", 3);
    static const struct {
        const char *key;
        uint32_t v;
    } numbers[] = {
        {"qwen3moe.block_count", TOY_LAYERS},
        {"qwen3moe.context_length", TOY_CONTEXT},
        {"qwen3moe.embedding_length", TOY_EMBD},
        {"qwen3moe.feed_forward_length", TOY_FF},
        {"qwen3moe.expert_feed_forward_length", TOY_FF},
        {"qwen3moe.expert_count", TOY_EXPERTS},
        {"qwen3moe.expert_used_count", 2},
        {"qwen3moe.attention.head_count", TOY_HEADS},
        {"qwen3moe.attention.head_count_kv", TOY_KV_HEADS},
        {"qwen3moe.attention.key_length", TOY_HEAD},
        {"qwen3moe.attention.value_length", TOY_HEAD},
        {"qwen3moe.vocab_size", TOY_VOCAB},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        gguf_set_u32(w, numbers[i].key, numbers[i].v);
    gguf_set_f32(w, "qwen3moe.attention.layer_norm_rms_epsilon", 1e-6f);
    gguf_set_f32(w, "qwen3moe.rope.freq_base", 10000);
    toy_set_vocab(w);
}

/* The layers of a Qwen3.5 with experts. */
static inline int toy_hybrid_tensors(struct toy_tensor *t)
{
    enum {
        KEYS = TOY_K_HEADS * TOY_HEAD,
        VALUES = TOY_V_HEADS * TOY_HEAD,
        CHANNELS = 2 * KEYS + VALUES
    };
    int n = 0;
    float w = 0.2f;
    t[n++] = (struct toy_tensor){"token_embd.weight", {TOY_EMBD, TOY_VOCAB}, 2, 1};
    t[n++] = (struct toy_tensor){"output.weight", {TOY_EMBD, TOY_VOCAB}, 2, 0.5f};
    t[n++] = (struct toy_tensor){"output_norm.weight", {TOY_EMBD}, 1, 0};
    for (int i = 0; i < TOY_HYBRID_LAYERS; i++) {
        const struct toy_tensor net[] = {
            {"attn_qkv.weight", {TOY_EMBD, CHANNELS}, 2, w},
            {"attn_gate.weight", {TOY_EMBD, VALUES}, 2, w},
            {"ssm_conv1d.weight", {TOY_CONV, CHANNELS}, 2, 0.5f},
            {"ssm_dt.bias", {TOY_V_HEADS}, 1, 1},
            {"ssm_a", {TOY_V_HEADS}, 1, -0.2f},
            {"ssm_beta.weight", {TOY_EMBD, TOY_V_HEADS}, 2, w},
            {"ssm_alpha.weight", {TOY_EMBD, TOY_V_HEADS}, 2, w},
            {"ssm_norm.weight", {TOY_HEAD}, 1, 0},
            {"ssm_out.weight", {VALUES, TOY_EMBD}, 2, w},
        };
        const struct toy_tensor attention[] = {
            {"attn_q.weight", {TOY_EMBD, 2 * TOY_HEADS * TOY_HEAD}, 2, w},
            {"attn_k.weight", {TOY_EMBD, TOY_KV_HEADS * TOY_HEAD}, 2, w},
            {"attn_v.weight", {TOY_EMBD, TOY_KV_HEADS * TOY_HEAD}, 2, w},
            {"attn_q_norm.weight", {TOY_HEAD}, 1, 0},
            {"attn_k_norm.weight", {TOY_HEAD}, 1, 0},
            {"attn_output.weight", {TOY_HEADS * TOY_HEAD, TOY_EMBD}, 2, w},
        };
        const struct toy_tensor rest[] = {
            {"attn_norm.weight", {TOY_EMBD}, 1, 0},
            {"post_attention_norm.weight", {TOY_EMBD}, 1, 0},
            {"ffn_gate_inp.weight", {TOY_EMBD, TOY_EXPERTS}, 2, w},
            {"ffn_gate_exps.weight", {TOY_EMBD, TOY_FF, TOY_EXPERTS}, 3, w},
            {"ffn_up_exps.weight", {TOY_EMBD, TOY_FF, TOY_EXPERTS}, 3, w},
            {"ffn_down_exps.weight", {TOY_FF, TOY_EMBD, TOY_EXPERTS}, 3, w},
            {"ffn_gate_inp_shexp.weight", {TOY_EMBD}, 1, w},
            {"ffn_gate_shexp.weight", {TOY_EMBD, TOY_FF}, 2, w},
            {"ffn_up_shexp.weight", {TOY_EMBD, TOY_FF}, 2, w},
            {"ffn_down_shexp.weight", {TOY_FF, TOY_EMBD}, 2, w},
        };
        int n_net = (int)(sizeof net / sizeof *net), n_attn = (int)(sizeof attention / sizeof *net);
        int n_mix = i % 2 ? n_attn : n_net, n_all = n_mix + (int)(sizeof rest / sizeof *rest);
        for (int j = 0; j < n_all; j++, n++) {
            const struct toy_tensor *from = j >= n_mix ? &rest[j - n_mix]
                                            : i % 2    ? &attention[j]
                                                       : &net[j];
            t[n] = *from;
            snprintf(t[n].name, sizeof t[n].name, "blk.%d.%.30s", i, from->name);
        }
    }
    return n;
}

static inline void toy_set_hybrid_meta(struct gguf_writer *w)
{
    gguf_set_string(w, "general.architecture", "qwen35moe", 9);
    gguf_set_string(w, "general.name", "toy", 3);
    static const struct {
        const char *key;
        uint32_t v;
    } numbers[] = {
        {"qwen35moe.block_count", TOY_HYBRID_LAYERS},
        {"qwen35moe.context_length", TOY_CONTEXT},
        {"qwen35moe.embedding_length", TOY_EMBD},
        {"qwen35moe.feed_forward_length", TOY_FF},
        {"qwen35moe.expert_feed_forward_length", TOY_FF},
        {"qwen35moe.expert_shared_feed_forward_length", TOY_FF},
        {"qwen35moe.expert_count", TOY_EXPERTS},
        {"qwen35moe.expert_used_count", 2},
        {"qwen35moe.attention.head_count", TOY_HEADS},
        {"qwen35moe.attention.head_count_kv", TOY_KV_HEADS},
        {"qwen35moe.attention.key_length", TOY_HEAD},
        {"qwen35moe.attention.value_length", TOY_HEAD},
        {"qwen35moe.rope.dimension_count", TOY_HEAD / 4},
        {"qwen35moe.full_attention_interval", 2},
        {"qwen35moe.ssm.conv_kernel", TOY_CONV},
        {"qwen35moe.ssm.state_size", TOY_HEAD},
        {"qwen35moe.ssm.group_count", TOY_K_HEADS},
        {"qwen35moe.ssm.time_step_rank", TOY_V_HEADS},
        {"qwen35moe.ssm.inner_size", TOY_V_HEADS * TOY_HEAD},
        {"qwen35moe.vocab_size", TOY_VOCAB},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        gguf_set_u32(w, numbers[i].key, numbers[i].v);
    gguf_set_f32(w, "qwen35moe.attention.layer_norm_rms_epsilon", 1e-6f);
    gguf_set_f32(w, "qwen35moe.rope.freq_base", 10000);
    toy_set_vocab(w);
}

static inline bool toy_write_as(const char *path, bool hybrid, struct error *err)
{
    struct gguf_writer *w = gguf_writer_new(path, err);
    if (!w)
        return false;
    if (hybrid)
        toy_set_hybrid_meta(w);
    else
        toy_set_meta(w);
    struct toy_tensor t[96];
    int n = hybrid ? toy_hybrid_tensors(t) : toy_tensors(t);
    for (int i = 0; i < n; i++)
        gguf_add_tensor(w, t[i].name, DT_F32, t[i].n_dims, t[i].dims);
    bool ok = gguf_writer_begin(w, err);
    float *values = mem_alloc(sizeof(float) * TOY_EMBD * TOY_VOCAB);
    for (int i = 0; ok && i < n; i++) {
        uint64_t seed = (uint64_t)i + 1;
        int64_t count = 1;
        for (int d = 0; d < t[i].n_dims; d++)
            count *= t[i].dims[d];
        for (int64_t j = 0; j < count; j++) {
            values[j] = t[i].scale > 0 ? t[i].scale * toy_random(&seed) : 1;
            if (t[i].scale < 0) /* a decay */
                values[j] = t[i].scale * (0.1f + (float)(j + 1) / (float)count);
            int64_t token = j / TOY_EMBD;
            if (i == 1 && token != TOY_IM_END && (token < 32 || token > 126))
                values[j] *= 0.02f; /* hardly ever said */
        }
        ok = gguf_writer_put(w, i, 0, values, 4 * (size_t)count);
    }
    mem_free(values);
    ok = ok && gguf_writer_finish(w, err);
    gguf_writer_free(w);
    return ok;
}

static inline bool toy_write(const char *path, struct error *err)
{
    return toy_write_as(path, false, err);
}

static inline bool toy_write_hybrid(const char *path, struct error *err)
{
    return toy_write_as(path, true, err);
}

#endif

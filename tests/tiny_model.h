/*
 * A complete model of a few kilobytes, written as GGUF or as a Hugging Face folder: what tests of
 * files need when the content of the weights does not matter. One llama layer, byte-level BPE of 40
 * tokens. The values are those of a fixed generator.
 */
#ifndef STEEL_TESTS_TINY_MODEL_H
#define STEEL_TESTS_TINY_MODEL_H

#include "base/buf.h"
#include "base/mem.h"
#include "file/gguf_write.h"

#include <stdio.h>
#include <string.h>

enum { TINY_EMBD = 32, TINY_HEADS = 2, TINY_FF = 64, TINY_VOCAB = 40 };

struct tiny_tensor {
    const char *gguf, *hf;
    int cols, rows; /* rows 0: a vector, F32 */
};

/* The last one has a multiple of 32 bytes: no padding, so that every cut goes through data. */
static const struct tiny_tensor tiny_tensors[] = {
    {"token_embd.weight", "model.embed_tokens.weight", TINY_EMBD, TINY_VOCAB},
    {"output_norm.weight", "model.norm.weight", TINY_EMBD, 0},
    {"blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight", TINY_EMBD, 0},
    {"blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight", TINY_EMBD, 0},
    {"blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight", TINY_EMBD, TINY_EMBD},
    {"blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight", TINY_EMBD, TINY_EMBD},
    {"blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight", TINY_EMBD, TINY_EMBD},
    {"blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight", TINY_EMBD, TINY_EMBD},
    {"blk.0.ffn_gate.weight", "model.layers.0.mlp.gate_proj.weight", TINY_EMBD, TINY_FF},
    {"blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight", TINY_EMBD, TINY_FF},
    {"blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight", TINY_FF, TINY_EMBD},
};
enum { TINY_TENSORS = sizeof tiny_tensors / sizeof *tiny_tensors };

static inline uint64_t tiny_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Values of tensor i: norms 1, the rest small. */
static inline void tiny_values(int i, float *out)
{
    const struct tiny_tensor *t = &tiny_tensors[i];
    uint64_t seed = (uint64_t)i + 1;
    int n = t->cols * (t->rows ? t->rows : 1);
    for (int j = 0; j < n; j++)
        out[j] = t->rows ? ((float)(tiny_random(&seed) % 2001) - 1000) / 8000 : 1;
}

/* Token i: letters, then merges of them, then the two special ones. */
static inline const char *tiny_token(int i)
{
    static char one[2];
    static const char *const more[] = {"ab", "cd", "abcd", "\u0120", "\u0120a"};
    if (i < 26) {
        one[0] = (char)('a' + i);
        return one;
    }
    if (i < 31)
        return more[i - 26];
    static char number[16];
    snprintf(number, sizeof number, i == 38 ? "<s>" : i == 39 ? "</s>" : "w%d", i);
    return number;
}

static inline void tiny_set_meta(struct gguf_writer *w, const char *arch)
{
    gguf_set_string(w, "general.architecture", arch, strlen(arch));
    static const struct {
        const char *key;
        uint32_t v;
    } numbers[] = {
        {"block_count", 1},
        {"context_length", 128},
        {"embedding_length", TINY_EMBD},
        {"feed_forward_length", TINY_FF},
        {"attention.head_count", TINY_HEADS},
        {"attention.head_count_kv", TINY_HEADS},
        {"rope.dimension_count", TINY_EMBD / TINY_HEADS},
        {"vocab_size", TINY_VOCAB},
    };
    char key[64];
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        snprintf(key, sizeof key, "%s.%s", arch, numbers[i].key);
        gguf_set_u32(w, key, numbers[i].v);
    }
    snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", arch);
    gguf_set_f32(w, key, 1e-5f);
    snprintf(key, sizeof key, "%s.rope.freq_base", arch);
    gguf_set_f32(w, key, 10000);
    gguf_set_string(w, "tokenizer.ggml.model", "gpt2", 4);
    gguf_set_string(w, "tokenizer.ggml.pre", "qwen2", 5);
    struct buf tokens = {0}, merges = {0};
    int32_t kinds[TINY_VOCAB];
    for (int i = 0; i < TINY_VOCAB; i++) {
        const char *s = tiny_token(i);
        gguf_pack_string(&tokens, s, strlen(s));
        kinds[i] = i >= 38 ? 3 : 1;
    }
    static const char *const merge[] = {"a b", "c d", "ab cd", "\xc4\xa0 a"};
    for (int i = 0; i < 4; i++)
        gguf_pack_string(&merges, merge[i], strlen(merge[i]));
    gguf_set_strings(w, "tokenizer.ggml.tokens", &tokens, TINY_VOCAB);
    gguf_set_array(w, "tokenizer.ggml.token_type", META_I32, kinds, TINY_VOCAB);
    gguf_set_strings(w, "tokenizer.ggml.merges", &merges, 4);
    gguf_set_u32(w, "tokenizer.ggml.bos_token_id", 38);
    gguf_set_u32(w, "tokenizer.ggml.eos_token_id", 39);
    buf_clear(&tokens);
    buf_clear(&merges);
}

static inline bool tiny_write_gguf(const char *path, const char *arch, struct error *err)
{
    struct gguf_writer *w = gguf_writer_new(path, err);
    if (!w)
        return false;
    tiny_set_meta(w, arch);
    for (int i = 0; i < TINY_TENSORS; i++) {
        const struct tiny_tensor *t = &tiny_tensors[i];
        gguf_add_tensor(w, t->gguf, DT_F32, t->rows ? 2 : 1, (int64_t[]){t->cols, t->rows});
    }
    bool ok = gguf_writer_begin(w, err);
    float values[TINY_EMBD * TINY_FF];
    for (int i = 0; ok && i < TINY_TENSORS; i++) {
        const struct tiny_tensor *t = &tiny_tensors[i];
        tiny_values(i, values);
        ok = gguf_writer_put(w, i, 0, values, 4 * (size_t)(t->cols * (t->rows ? t->rows : 1)));
    }
    ok = ok && gguf_writer_finish(w, err);
    gguf_writer_free(w);
    return ok;
}

static inline const char *tiny_config_json(void)
{
    return "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\",\n"
           " \"hidden_size\": 32, \"intermediate_size\": 64, \"num_hidden_layers\": 1,\n"
           " \"num_attention_heads\": 2, \"num_key_value_heads\": 2, \"vocab_size\": 40,\n"
           " \"max_position_embeddings\": 128, \"rms_norm_eps\": 1e-05, \"rope_theta\": 10000.0,\n"
           " \"hidden_act\": \"silu\", \"tie_word_embeddings\": true,\n"
           " \"bos_token_id\": 38, \"eos_token_id\": 39}\n";
}

static inline void tiny_tokenizer_json(struct buf *b)
{
    buf_adds(b, "{\"added_tokens\": [{\"id\": 38, \"content\": \"<s>\", \"special\": true},"
                " {\"id\": 39, \"content\": \"</s>\", \"special\": true}],\n"
                "\"normalizer\": null, \"pre_tokenizer\": {\"type\": \"ByteLevel\","
                " \"add_prefix_space\": false, \"use_regex\": true},\n"
                "\"decoder\": {\"type\": \"ByteLevel\"},\n"
                "\"model\": {\"type\": \"BPE\", \"vocab\": {");
    for (int i = 0; i < 38; i++)
        buf_addf(b, "%s\"%s\": %d", i ? ", " : "", tiny_token(i), i);
    buf_adds(b, "}, \"merges\": [\"a b\", \"c d\", \"ab cd\", \"\xc4\xa0 a\"]}}\n");
}

/* One safetensors file with all tensors, BF16 (the top halves of the floats) or F32. */
static inline void tiny_safetensors(struct buf *out, bool bf16)
{
    struct buf header = {0}, data = {0};
    buf_adds(&header, "{\"__metadata__\":{\"format\":\"pt\"}");
    float values[TINY_EMBD * TINY_FF];
    for (int i = 0; i < TINY_TENSORS; i++) {
        const struct tiny_tensor *t = &tiny_tensors[i];
        tiny_values(i, values);
        size_t begin = data.len;
        for (int j = 0; j < t->cols * (t->rows ? t->rows : 1); j++) {
            uint16_t h = f32_to_bf16(values[j]);
            buf_add(&data, bf16 ? (const void *)&h : &values[j], bf16 ? 2 : 4);
        }
        buf_addf(&header, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->hf, bf16 ? "BF16" : "F32");
        if (t->rows)
            buf_addf(&header, "%d,", t->rows);
        buf_addf(&header, "%d],\"data_offsets\":[%zu,%zu]}", t->cols, begin, data.len);
    }
    buf_addc(&header, '}');
    while (header.len % 8)
        buf_addc(&header, ' ');
    buf_add(out, &(uint64_t){header.len}, 8);
    buf_add(out, header.p, header.len);
    buf_add(out, data.p, data.len);
    buf_clear(&header);
    buf_clear(&data);
}

#endif

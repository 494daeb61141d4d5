/*
 * quantization_config of config.json: the tool that packed the matrices and the parameters that
 * their tensors do not show. Values that would be misread are refused here, naming the field.
 * layout.c recognises each matrix by its tensors.
 */
#include "model/layout.h"
#include "model/reader.h"

#include <string.h>

static bool refuse(const struct meta_reader *in, const char *what, const char *value)
{
    return error_set(in->err, "%s: config.json: quantization_config: %s \"%.40s\" is not supported",
                     in->f->path, what, value);
}

/* Whether s is in a NULL-terminated list. */
static bool is_one_of(const char *s, const char *const *list)
{
    for (; *list; list++)
        if (!strcmp(s, *list))
            return true;
    return false;
}

static bool read_block(const struct meta_reader *in, const json_t *o, const char *key,
                       struct layout_config *out)
{
    const json_t *block = reader_get(o, key, NULL);
    if (!block)
        return true;
    for (int i = 0; i < 2; i++) {
        json_int_t v = json_integer_value(json_array_get(block, (size_t)i));
        if (json_array_size(block) != 2 || v < 1 || v > 1 << 20)
            return error_set(in->err, "%s: config.json: %s: two numbers are expected", in->f->path,
                             key);
        out->block[i] = (int)v;
    }
    return true;
}

/* GPTQ and AWQ */
static bool read_groups(const struct meta_reader *in, const json_t *q, struct layout_config *out)
{
    double bits = 0, group = 0;
    if (!reader_number(in, q, "bits", 1, 16, true, &bits) ||
        !reader_number(in, q, "group_size", -1, 1 << 24, true, &group))
        return false;
    if (bits != 4 && (bits != 8 || out->awq))
        return error_set(
            in->err, "%s: config.json: quantization_config: %s with %g bits is not supported (%s)",
            in->f->path, out->awq ? "AWQ" : "GPTQ", bits, out->awq ? "4 is" : "4 and 8 are");
    if (group == 0)
        return error_set(in->err, "%s: config.json: group_size: 0", in->f->path);
    const char *version = json_string_value(json_object_get(q, "version"));
    out->gemv = out->awq && version && (!strcmp(version, "gemv") || !strcmp(version, "GEMV"));
    out->gemv_fast =
        out->awq && version && (!strcmp(version, "gemv_fast") || !strcmp(version, "GEMV_FAST"));
    if (out->awq && version && strcmp(version, "gemm") && strcmp(version, "GEMM") && !out->gemv &&
        !out->gemv_fast)
        return refuse(in, "version", version);
    const char *format = json_string_value(json_object_get(q, "checkpoint_format"));
    if (format && strncmp(format, "gptq", 4) != 0 && !out->awq)
        return refuse(in, "checkpoint_format", format);
    out->group_len = (int)group;
    out->bits = (int)bits;
    out->mixed = json_object_size(json_object_get(q, "dynamic")) ||
                 json_object_size(json_object_get(q, "extra_config"));
    out->zero_plus = !format || strcmp(format, "gptq_v2") != 0;
    return true;
}

/* AutoRound uses the packing of one of the others. */
static bool read_auto_round(const struct meta_reader *in, const json_t *q,
                            struct layout_config *out)
{
    static const char *const words[] = {"auto_round:auto_gptq", "auto_round:gptq:exllamav2",
                                        "auto_round:auto_awq", NULL};
    static const char *const tensors[] = {"auto_round:llm_compressor", NULL};
    const json_t *packing = reader_get(q, "packing_format", "backend");
    const char *name = packing ? json_string_value(packing) : words[0];
    if (name && is_one_of(name, tensors))
        return true;
    if (!name || !is_one_of(name, words))
        return refuse(in, "packing_format", name ? name : "?");
    out->awq = !strcmp(name, words[2]);
    return read_groups(in, q, out);
}

static bool read_compressed(const struct meta_reader *in, const json_t *q,
                            struct layout_config *out)
{
    static const char *const formats[] = {"pack-quantized",
                                          "int-quantized",
                                          "float-quantized",
                                          "naive-quantized",
                                          "nvfp4-pack-quantized",
                                          "mxfp4-pack-quantized",
                                          "mxfp8-quantized",
                                          "mixed-precision",
                                          "dense",
                                          NULL};
    const char *format = json_string_value(json_object_get(q, "format"));
    if (format && !is_one_of(format, formats))
        return refuse(in, "format", format);
    format = json_string_value(json_object_get(json_object_get(q, "sparsity_config"), "format"));
    if (format && strcmp(format, "dense") != 0)
        return refuse(in, "sparsity_config.format", format);
    const json_t *turns = json_object_get(json_object_get(q, "transform_config"), "config_groups");
    if (json_object_size(turns))
        return refuse(in, "transform_config",
                      json_object_iter_key(json_object_iter((json_t *)(uintptr_t)turns)));
    const char *key;
    json_t *group;
    json_object_foreach(json_object_get(q, "config_groups"), key, group)
    {
        const json_t *weights = json_object_get(group, "weights");
        const char *own = json_string_value(json_object_get(group, "format"));
        if (own && !is_one_of(own, formats))
            return refuse(in, "format", own);
        if (!read_block(in, weights, "block_structure", out))
            return false;
        out->bits = (int)json_integer_value(json_object_get(weights, "num_bits"));
    }
    return true;
}

/* BitNet: how the scale is stored depends on the class of its layers. */
static bool read_bitnet(const struct meta_reader *in, const json_t *q, struct layout_config *out)
{
    const char *class = json_string_value(json_object_get(q, "linear_class"));
    const char *mode = json_string_value(json_object_get(q, "quantization_mode"));
    bool multiplies = class && !strcmp(class, "autobitlinear");
    if (class && !multiplies && strcmp(class, "bitlinear"))
        return refuse(in, "linear_class", class);
    if (mode && strcmp(mode, "offline"))
        return refuse(in, "quantization_mode", mode);
    if (json_is_true(json_object_get(q, "use_rms_norm")))
        return refuse(in, "use_rms_norm", "true");
    out->ternary = true;
    out->divides = !multiplies;
    return true;
}

/* "quantization", which MLX writes, with the parameters of most modules and objects for others. */
static bool read_mlx(const struct meta_reader *in, const json_t *q, struct layout_config *out)
{
    double bits = 0, group = 0;
    const char *mode = json_string_value(json_object_get(q, "mode"));
    if (mode && strcmp(mode, "affine") && strcmp(mode, "mxfp4") && strcmp(mode, "mxfp8") &&
        strcmp(mode, "nvfp4"))
        return error_set(
            in->err,
            "%s: config.json: quantization.mode \"%.40s\" is not supported (affine, mxfp4, "
            "mxfp8 and nvfp4 are)",
            in->f->path, mode);
    if (!reader_number(in, q, "bits", 2, 8, true, &bits) ||
        !reader_number(in, q, "group_size", 16, 1 << 16, true, &group))
        return false;
    out->mlx_bits = (int)bits;
    return true;
}

/* HQQ: its matrices say the rest, and may differ. */
static bool read_hqq(const struct meta_reader *in, const json_t *q, struct layout_config *out)
{
    double bits = 0;
    const json_t *weights =
        json_object_get(json_object_get(q, "quant_config"), "weight_quant_params");
    if (!reader_number(in, weights, "nbits", 1, 8, false, &bits))
        return false;
    out->bits = (int)bits;
    return true;
}

/* torchao: only whether codes are two in a byte matters here. */
static bool read_torchao(const json_t *q, struct layout_config *out)
{
    const json_t *type = json_object_get(json_object_get(q, "quant_type"), "default");
    const char *name = json_string_value(json_object_get(type ? type : q, "_type"));
    out->bits = name && (!strcmp(name, "Int4WeightOnlyConfig") ||
                         !strcmp(name, "Float8DynamicActivationInt4WeightConfig"))
                    ? 4
                    : 8;
    return true;
}

bool layout_read_config(const struct meta_reader *in, struct layout_config *out)
{
    /* their tensors say everything */
    static const char *const plain[] = {"modelopt",   "modelopt_fp4", "modelopt_mixed", "mxfp4",
                                        "fbgemm_fp8", "quark",        "bitsandbytes",   NULL};
    const json_t *q = reader_get(in->f->config, "quantization_config", "compression_config");
    if (!q && in->hf)
        q = reader_get(in->hf, "quantization_config", "compression_config");
    const json_t *mlx = reader_get(in->f->config, "quantization", NULL);
    if (json_is_object(mlx) && !json_object_get(q, "quant_method"))
        return read_mlx(in, mlx, out);
    if (!q)
        return true;
    const char *method = json_string_value(json_object_get(q, "quant_method"));
    if (!method)
        return error_set(in->err, "%s: config.json: quantization_config.quant_method: missing",
                         in->f->path);
    out->awq = !strcmp(method, "awq");
    if (!strcmp(method, "gptq") || out->awq)
        return read_groups(in, q, out);
    if (!strcmp(method, "auto-round") || !strcmp(method, "intel/auto-round"))
        return read_auto_round(in, q, out);
    if (!strcmp(method, "fp8"))
        return read_block(in, q, "weight_block_size", out);
    if (!strcmp(method, "compressed-tensors"))
        return read_compressed(in, q, out);
    if (!strcmp(method, "bitnet"))
        return read_bitnet(in, q, out);
    if (!strcmp(method, "hqq"))
        return read_hqq(in, q, out);
    if (!strcmp(method, "torchao"))
        return read_torchao(q, out);
    return is_one_of(method, plain) ||
           error_set(
               in->err,
               "%s: config.json: quantization_config: quant_method \"%.40s\" is not supported "
               "(auto-round, awq, bitnet, bitsandbytes, compressed-tensors, fp8, gptq, hqq, "
               "modelopt, mxfp4, quark and torchao are)",
               in->f->path, method);
}

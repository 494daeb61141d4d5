/* Types of the KV cache: their names on the command line, and which networks they suit. */
#ifndef STEEL_BACKEND_KV_TYPE_H
#define STEEL_BACKEND_KV_TYPE_H

#include "base/error.h"
#include "quant/quant.h"

struct network; /* backend/layer.h */

/* The cache type of a name such as "q8_0"; DT_NONE if unknown. */
enum dtype kv_type_from_name(const char *name);
const char *kv_type_name(enum dtype t);
#define KV_TYPE_NAMES "f16, bf16, f32, q8_0, fp8 or q4_0"

/* Whether a cache of these types can store what this network's layers need. The error names layer and type. */
bool kv_types_check(const struct network *net, enum dtype k_type, enum dtype v_type,
                    struct error *err);

#endif

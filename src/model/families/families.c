/* The families Steel knows, in the order errors name them. */
#include "model/families/family.h"

const struct family *const families[] = {
    &family_llama,    &family_mistral,       &family_mixtral, &family_ministral3, &family_deepseek2,
    &family_kimi_k2,  &family_glm4_moe_lite, &family_gemma3,  &family_gemma4,     &family_glm4_moe,
    &family_gpt_oss,  &family_minimax_m2,    &family_phi3,    &family_qwen2,      &family_qwen3,
    &family_qwen3moe, &family_qwen3next,     &family_qwen35,  &family_qwen35moe,  NULL,
};

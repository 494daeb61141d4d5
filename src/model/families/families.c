/* All families, in the order that errors list them. */
#include "model/families/family.h"

const struct model_family *const families[] = {
    &family_llama,       &family_mistral,    &family_mixtral,       &family_ministral3,
    &family_deepseek2,   &family_kimi_k2,    &family_glm4_moe_lite, &family_gemma3,
    &family_gemma4,      &family_glm4_moe,   &family_gpt_oss,       &family_minimax_m2,
    &family_phi3,        &family_qwen2,      &family_qwen3,         &family_qwen3moe,
    &family_qwen3next,   &family_qwen35,     &family_qwen35moe,     &family_dots1,
    &family_exaone4,     &family_exaone_moe, &family_gemma2,        &family_granite,
    &family_granitemoe,  &family_hy_v3,      &family_mellum,        &family_olmo2,
    &family_olmo3,       &family_olmoe,      &family_qwen2moe,      &family_seed_oss,
    &family_smollm3,     &family_solar_open, &family_bert,          &family_roberta,
    &family_xlm_roberta, &family_nomic_bert, &family_modern_bert,   NULL,
};

/* Short names of popular models: a row is a name and the repository and quantisation it stands for. */
#include "cli/hub/hub.h"

#include <strings.h>

static const struct {
    const char *name, *full;
} shorts[] = {
    {"qwen3:0.6b", "Qwen/Qwen3-0.6B-GGUF:Q8_0"},
    {"qwen3:1.7b", "Qwen/Qwen3-1.7B-GGUF:Q8_0"},
    {"qwen3:4b", "Qwen/Qwen3-4B-GGUF:Q4_K_M"},
    {"qwen3:8b", "Qwen/Qwen3-8B-GGUF:Q4_K_M"},
    {"qwen3:14b", "Qwen/Qwen3-14B-GGUF:Q4_K_M"},
    {"qwen3:32b", "Qwen/Qwen3-32B-GGUF:Q4_K_M"},
    {"qwen3:30b", "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M"},
    {"qwen3", "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M"},
    {"qwen2.5:7b", "Qwen/Qwen2.5-7B-Instruct-GGUF:Q4_K_M"},
    {"qwen2.5", "Qwen/Qwen2.5-7B-Instruct-GGUF:Q4_K_M"},
    {"qwen2.5-coder:1.5b", "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q8_0"},
    {"qwen2.5-coder:3b", "Qwen/Qwen2.5-Coder-3B-Instruct-GGUF:Q4_K_M"},
    {"qwen2.5-coder:7b", "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M"},
    {"qwen2.5-coder", "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M"},
    {"llama3.2:1b", "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"},
    {"llama3.2", "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M"},
    {"llama3.1", "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M"},
    {"qwen3-coder", "unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF:Q4_K_M"},
    {"gpt-oss", "ggml-org/gpt-oss-20b-GGUF:MXFP4"},
    {"gpt-oss:120b", "ggml-org/gpt-oss-120b-GGUF:MXFP4"},
    {"gemma3", "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M"},
    {"gemma3:12b", "ggml-org/gemma-3-12b-it-GGUF:Q4_K_M"},
    {"gemma3:27b", "ggml-org/gemma-3-27b-it-GGUF:Q4_K_M"},
    {"mistral", "bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M"},
};

const char *hub_short(int i, const char **name)
{
    bool there = i >= 0 && (size_t)i < sizeof shorts / sizeof *shorts;
    *name = there ? shorts[i].name : NULL;
    return there ? shorts[i].full : NULL;
}

const char *hub_full(const char *text)
{
    for (size_t i = 0; i < sizeof shorts / sizeof *shorts; i++)
        if (!strcasecmp(text, shorts[i].name))
            return shorts[i].full;
    return text;
}

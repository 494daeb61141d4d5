/* Facts of a loaded model and of the device it runs on, for servers and commands. Plain values: no tensors, no backend. */
#ifndef STEEL_ENGINE_INFO_H
#define STEEL_ENGINE_INFO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct runtime;

/* Strings are valid as long as the engine. */
struct engine_info {
    const char *path, *architecture;
    bool is_gguf; /* else a folder of safetensors */
    int n_vocab, n_embd, n_layers;
    int context_trained; /* tokens; engine_context() says how many a sequence may have */
    int64_t n_params, n_active;
    size_t weight_bytes;
    const char *device;  /* "cpu", "cuda"; "ref" with STEEL_ISA=ref */
    const char *notice;  /* why a GPU is not used, or ""  */
    size_t device_bytes; /* of the weights: memory of a GPU that they take */
    size_t host_bytes;   /* ... of the host, without experts that stay in the file */
    int max_seqs, n_pages;
    size_t kv_bytes;
    double load_s;
};

struct engine_info runtime_info(const struct runtime *rt);

#endif

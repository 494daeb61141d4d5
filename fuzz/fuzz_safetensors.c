/* libFuzzer entry: any bytes as a safetensors file. */
#include "file/tensorfile.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct error err = {0};
    struct tensorfile *f = tensorfile_open_safetensors_memory(data, size, "fuzz.st", &err);
    if (!f) {
        CHECK(err.msg[0], "failure without a message");
        return 0;
    }
    uint8_t sum = 0;
    for (size_t i = 0; i < f->n_tensors; i++) {
        const struct tensor *t = &f->tensors[i];
        if (t->bytes)
            sum ^= t->data[0] ^ t->data[t->bytes - 1];
        CHECK(tensorfile_find(f, t->name) == t, "tensor not found by name");
    }
    volatile uint8_t keep = sum; /* the reads above must stay */
    (void)keep;
    tensorfile_close(f);
    return 0;
}

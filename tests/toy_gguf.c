/* toy_gguf PATH [hybrid]: writes the model of toy_model.h, for tests that are scripts. */
#include "toy_model.h"

int main(int argc, char **argv)
{
    struct error err = {0};
    bool hybrid = argc == 3 && !strcmp(argv[2], "hybrid"), ok = argc == 2 || hybrid;
    if (ok && toy_write_as(argv[1], hybrid, &err))
        return 0;
    fprintf(stderr, "toy_gguf: %s\n", ok ? err.msg : "usage: toy_gguf PATH [hybrid]");
    return 1;
}

/* toy_gguf PATH: writes the model of toy_model.h, for tests that are scripts. */
#include "toy_model.h"

int main(int argc, char **argv)
{
    struct error err = {0};
    if (argc == 2 && toy_write(argv[1], &err))
        return 0;
    fprintf(stderr, "toy_gguf: %s\n", argc == 2 ? err.msg : "usage: toy_gguf PATH");
    return 1;
}

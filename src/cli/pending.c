/* Temporary: weak stand-ins until the CPU backend lands. */
#include "cli/cli.h"
#pragma weak profile_print
void profile_print(const struct profile *p, FILE *out)
{
    (void)p;
    (void)out;
}

/* The only file recompiled when the version or the commit changes. */
#include "base/version.h"

#ifndef STEEL_VERSION
#define STEEL_VERSION "unknown"
#endif
#ifndef STEEL_COMMIT
#define STEEL_COMMIT ""
#endif
#ifndef STEEL_BUILD
#define STEEL_BUILD ""
#endif

#ifdef __clang__
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif

const char *version_number(void)
{
    return STEEL_VERSION;
}

const char *version_commit(void)
{
    return STEEL_COMMIT;
}

const char *version_build(void)
{
    return COMPILER STEEL_BUILD;
}

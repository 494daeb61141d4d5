/* Steel's version, from the file VERSION, and its commit and compilers, from the build. */
#ifndef STEEL_BASE_VERSION_H
#define STEEL_BASE_VERSION_H

const char *version_number(void); /* "0.2.0" */
const char *version_commit(void); /* "3f4f0f1", "3f4f0f1+changes"; "" outside a git checkout */
const char *version_build(void);  /* "gcc 12.2.0, CUDA 13.0" */

#endif

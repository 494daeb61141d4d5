/* Cooperative matrices: glslc's words of the NV extension become those of the KHR one, which devices of all vendors have. */
#ifndef STEEL_BACKEND_VULKAN_COOP_H
#define STEEL_BACKEND_VULKAN_COOP_H

#include <stddef.h>
#include <stdint.h>

/* The module `words` with instructions of SPV_KHR_cooperative_matrix (mem_free). NULL: the words are no module. */
uint32_t *vulkan_coop_words(const uint32_t *words, size_t n, size_t *n_out);

#endif

/*
 * Marks of the KV cache's pages (--kv-canary). Every page has a mark, kept beside the pool in backend memory. The engine
 * writes a new one when a page changes its owner or its content gets a name, and every step says which marks it expects of
 * the pages in its table. A page with another mark belongs to another sequence: its reader has a wrong page.
 */
#ifndef STEEL_BACKEND_CANARY_H
#define STEEL_BACKEND_CANARY_H

#include <stdint.h>

struct batch;

struct page_mark {
    int32_t page;
    uint32_t mark;
};

struct batch_canary {
    uint32_t *marks;             /* (n_pages) backend memory */
    const struct page_mark *set; /* (n_set) written to marks before the step */
    int n_set;
    const uint32_t *expected; /* (n_seqs, max_pages) of the block table's pages */
    /* (n_seqs) of the host. After end(): 1 + the index of a wrong page of the sequence; 0 = none. A row whose slot is
     * not in the page of its position counts, too. */
    int32_t *wrong;
};

/* For backends whose memory is the host's: writes and checks the marks of b, if it has any. */
void canary_check(const struct batch *b, int page_len);

#endif

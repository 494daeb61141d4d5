/* Checking the marks of pages in host memory: see canary.h. */
#include "backend/canary.h"
#include "backend/batch.h"

/* 1 + the index of a wrong page of sequence i, or 0. */
static int32_t wrong_page(const struct batch *b, int i, int page_len)
{
    const struct batch_canary *c = b->canary;
    const int32_t *pages = b->pages + (size_t)i * (size_t)b->max_pages;
    const uint32_t *expected = c->expected + (size_t)i * (size_t)b->max_pages;
    for (int k = 0; k * page_len < b->kv_len[i]; k++)
        if (c->marks[pages[k]] != expected[k])
            return k + 1;
    for (int t = b->q_start[i]; t < b->q_start[i + 1]; t++) {
        int k = b->pos[t] / page_len;
        if (b->slot[t] >= 0 && b->slot[t] != pages[k] * page_len + b->pos[t] % page_len)
            return k + 1;
    }
    return 0;
}

void canary_check(const struct batch *b, int page_len)
{
    const struct batch_canary *c = b->canary;
    for (int i = 0; c && i < c->n_set; i++)
        c->marks[c->set[i].page] = c->set[i].mark;
    for (int i = 0; c && i < b->n_seqs; i++)
        c->wrong[i] = wrong_page(b, i, page_len);
}

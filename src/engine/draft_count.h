/* Who proposes draft tokens, and how many of each were read and accepted. */
#ifndef STEEL_ENGINE_DRAFT_COUNT_H
#define STEEL_ENGINE_DRAFT_COUNT_H

enum draft_source {
    DRAFT_TEXT,    /* the continuation of equal earlier text (draft_text.h) */
    DRAFT_HEAD,    /* the model's MTP block */
    DRAFT_MODEL,   /* a small model (draft_model.h) */
    DRAFT_GRAMMAR, /* tokens that a constraint forces after other drafts */
    N_DRAFT_SOURCES
};

struct draft_count {
    int drafted, accepted;
};

/* Their names in --draft, usage and metrics. */
static inline const char *draft_source_name(enum draft_source s)
{
    static const char *const names[N_DRAFT_SOURCES] = {"text", "head", "model", "grammar"};
    return names[s];
}

#endif

/*
 * Decides which sequences run in the next step, and how much of each prompt is read. Knows sequences, pages
 * and measured times. Knows nothing of requests, text, threads or the model, so that tests can drive it
 * with made-up costs.
 *
 * A sequence wants all of its tokens in the KV cache; the logits of the last one give the next token. With
 * one token outstanding it decodes. With more it reads: a prompt, or its whole text after preemption. Every
 * decode is part of every step. A decoding sequence has several tokens outstanding where a constraint has
 * determined them; forced_singly() says when those are read. Reading fills the rest of the step's time
 * budget. The costs of steps are learned as they run, so the budget is in milliseconds, not in tokens.
 *
 * Invariants:
 *  1. A sequence is in the waiting list, in the running list, or in none. Both lists are ordered by age.
 *  2. A waiting sequence holds no pages.
 *  3. A sequence is admitted only if its unread tokens fit the pages that the running ones leave free,
 *     minus one page for each of them. So no sequence is preempted right after admission.
 *  4. The oldest running sequence is never preempted. So some sequence always advances, and all end.
 *  5. Clients take turns. Of the clients with waiting sequences, the one with the fewest running is next;
 *     of equals, the one that was served longest ago. A client's own sequences are admitted by age.
 *     When no place is free, a client takes one from a client that runs at least two more than itself.
 *     So nobody is starved, and no client waits for all of another one's sequences to end. A client whose
 *     next sequence lacks pages does not block others: up to max_seqs of their sequences pass it, then
 *     none until it has been admitted.
 *  6. Every full page of a running sequence is indexed (scheduler_commit). A sequence that would compute
 *     tokens which another one is computing waits for a bounded time, and takes its pages (reuse.h).
 *  7. Where layers have states (states.h), a sequence can start after cached pages only where a
 *     checkpoint exists. So checkpoints are saved where others are likely to start (reuse.h). A
 *     sequence that ends or is preempted leaves its own state as a checkpoint.
 *  8. A held sequence (masks.h) is not planned for its last token. It keeps its pages.
 *  9. With a target of inter-token latency, no more sequences are admitted than decode together within it, unless one
 *     alone exceeds it; and a step's prompt part is what fits beside its decodes. With a target of the time to the first
 *     token, a client's prompts are read in order of arrival. Those that will miss it leave all but a part to the others.
 *     Where the targets conflict, the inter-token target wins: a prompt waits rather than delay those that decode.
 * 10. Draws on the host are part of a step's time. Where a client decodes whose draws cost little, the costly draws of
 *     others take at most 1 / DRAW_SHARE of a step, or one of them a step. Their sequences take turns.
 * 11. An image is a thousand tokens that arrive at once. Without a budget or a target, a step that decodes reads at most as many
 *     tokens of prompts with images as make it three times as long.
 */
#ifndef STEEL_ENGINE_SCHEDULER_H
#define STEEL_ENGINE_SCHEDULER_H

#include "engine/kvcache.h"
#include "engine/step.h"
#include "engine/step_cost.h"

enum { SEQ_TURNS = 8 };

struct seq {
    /* set by the caller */
    int32_t *tokens;   /* (cap) the prompt, then generated tokens; owned */
    int n_tokens, cap; /* n_tokens >= 1 */
    int n_prompt;
    uint64_t root;                  /* prefix_root */
    const struct prompt_rows *rows; /* embeddings and positions; NULL = tokens alone */
    const struct lora_pick *loras;  /* (n_loras) adapters */
    int n_loras;
    bool no_cache;   /* uses no page of the index, but its own pages are indexed */
    bool held;       /* its last token is not read: what may follow it is not known yet (masks.h) */
    uint64_t client; /* clients share the machine evenly; 0 is a client like the others */
    double draw_ns;  /* of one draw of its tokens on the host; 0 = the device draws */
    double arrived_ns; /* by the clock of scheduler.now_ns; for the target of its first token */
    int n_draft; /* draft tokens after the last one, for the next step to verify; seq_append drops them */
    bool all_rows; /* logits of every prompt token are wanted; no_cache is set too */
    /* the MTP block has not processed all of its rows: it gets no drafts (draft.h) */
    bool unfollowed;
    int n_open;                    /* unverified draft tokens at the end of kv (draft.h) */
    bool no_draft;                 /* gets no drafts */
    struct draft_seq *draft;       /* what the drafter keeps of it, or NULL */
    int turns[SEQ_TURNS], n_turns; /* seq_turn */
    /* set by the scheduler */
    struct seq *prev, *next;
    struct seq *ahead, *behind; /* neighbours in its client's waiting list */
    struct seq_client *of;
    uint64_t age; /* order of arrival */
    struct kv_seq kv;
    uint64_t chain; /* serial of the last indexed page */
    int n_indexed;  /* pages indexed */
    int branch;     /* tokens up to which cached pages match, where no checkpoint was kept */
    int resumed;    /* tokens of the checkpoint it started from */
    int wanted;     /* tokens up to which another sequence waits for its state; 0 = none does */
    /* While it waits for another sequence to compute common tokens (reuse.h) */
    uint64_t leader; /* the other one's age; 0 = it does not wait */
    int shared;      /* the tokens in common, in whole pages */
    int leader_at;   /* the other one's tokens in the step before */
    int64_t awaited; /* tokens that it has read meanwhile */
    int64_t forgone; /* prompt tokens that this one could have read meanwhile */
    bool impatient;  /* has waited too long and waits no more */
    bool running;
    bool rests;   /* takes no part in the current step: invariant 10 */
    bool entered; /* has been admitted before */
    int n_cached; /* prompt tokens taken from the cache at its first admission */
    int n_preempted;
};

struct seq_list {
    struct seq *first, *last;
    int n;
};

/* A client with sequences. */
struct seq_client {
    struct seq_client *prev, *next;
    uint64_t id;
    int n_seqs, n_waiting, n_running;
    struct seq *first, *last; /* waiting, by age */
    uint64_t let_in;          /* turn of its last admission, or of its arrival */
    uint64_t read;            /* turn in which one of its prompts was last read */
    double debt_ns; /* CPU time beside the steps, not paid yet at debt_at: scheduler_charge */
    double debt_at; /* scheduler.elapsed_ns, then */
    bool draws;     /* in the current step: one of its sequences has costly draws */
    int turn;       /* rotates over its prompts */
    int n_readers, at, share; /* in the current step: prompts, index in readers, tokens */
    int64_t need;             /* unread tokens of its prompts */
    /* its first sequence, if it lacked pages; tried again when `freed` changes */
    const struct seq *blocked;
    uint64_t blocked_at; /* value of freed at that time */
    uint64_t round;      /* value of round at that time */
};

enum {
    MIN_READ = 16, /* least prompt tokens per step, so that a prompt always advances */
};

struct scheduler {
    struct kvcache *kv;
    struct step_limits limits;
    int context;
    double budget_ns; /* 0 = three times the cost of the decodes, at least 250 ms */
    /* Targets, 0 = none; set by the caller. See invariant 9. */
    double itl_ns;  /* between two tokens of a sequence; budget_ns is the same */
    double ttft_ns; /* from arrival to the first token */
    double now_ns;  /* when the next step is planned; set by the caller if ttft_ns is */
    double host_ns; /* between two steps, beside the device's time; set by the caller */
    struct seq_list waiting, running;
    uint64_t next_age;
    struct seq_client *clients; /* those with sequences */
    int max_per_client;         /* running sequences of one client; 0 = no bound */
    bool records;      /* the backend records steps of decodes alone, which makes them cheaper */
    double elapsed_ns; /* time of all steps */
    double mask_ns;    /* part of the next step's time that masks will take; set by the caller */
    double net_ns;     /* time of a step of decodes, less its draws; 0 = unknown */
    double
        draw_scale; /* the share of the draws' time that a step takes for them: threads divide it */
    uint64_t drew;  /* age of the last sequence whose costly draw took part */
    uint64_t entries, reads;     /* turns of admission and of reading so far */
    struct seq_client **reading; /* (max_seqs) scratch: clients with prompts to read */
    struct step_cost cost;
    struct seq **planned;  /* (max_seqs) of the current step */
    struct seq **readers;  /* (max_seqs) scratch */
    struct seq **sorted;   /* (max_seqs) scratch: readers by client */
    int *shares;           /* (max_seqs) scratch */
    uint64_t *content;     /* (page_len) scratch */
    struct reader_table {  /* of a step's readers by what they read next: reuse_reads */
        int *first, *last; /* (size) readers + 1 of a bucket; 0 = none */
        int *next;         /* (max_seqs) the next reader of its bucket, + 1 */
        int size;          /* a power of two */
    } same;
    int n_planned, n_decode, n_read;
    int n_forced;       /* forced tokens of the step; costs are not learned from steps with some */
    bool singly;        /* forced tokens are read one per step: see forced_singly() */
    int client_share;   /* prompt tokens of the step for each client: reuse_begin */
    int n_spare;        /* logits rows of the step beyond one for each running sequence */
    int n_drafted;      /* draft tokens of the step */
    uint64_t freed;     /* counts releases of pages */
    uint64_t round;     /* counts plans */
    struct seq *passed; /* the first sequence that lacked pages and is being passed; NULL = none */
    int n_passes;       /* sequences that have passed it */
    /* totals */
    int64_t n_preempted;
    int64_t cache_queries, cache_hits; /* prompt tokens looked up, found */
};

void scheduler_init(struct scheduler *s, struct kvcache *kv, const struct step_limits *limits,
                    int context, double budget_ms);
void scheduler_clear(struct scheduler *s); /* no sequences may be left */

/* After all others of its client. */
void scheduler_add(struct scheduler *s, struct seq *q);
/* Removes a sequence from either list and releases its pages, which stay indexed. */
void scheduler_remove(struct scheduler *s, struct seq *q);
/* Appends a sampled token. */
void seq_append(struct seq *q, int32_t token);
/* Replaces the draft tokens after its last token. */
void seq_draft(struct seq *q, const int32_t *tokens, int n);
/* A message of the prompt ends after `at` tokens, so other prompts may diverge there. In ascending order; the first is
 * kept, and the last SEQ_TURNS - 1. */
void seq_turn(struct seq *q, int at);
void seq_clear(struct seq *q); /* frees its memory; it must have left the scheduler */
static inline int seq_unread(const struct seq *q)
{
    return q->n_tokens - q->kv.n_tokens;
}

/* The longest span of rows that see each other (step.h): a step has room for it and for one row of each other sequence. */
int scheduler_most_whole(const struct scheduler *s);

/* Admits, preempts, and fills items (max_seqs) for step_run, without samplers. Sequence i of the step is
 * s->planned[i]. Returns the number of items; 0 = nothing to do. */
int scheduler_plan(struct scheduler *s, struct step_item *items);
/* The planned step has run in ns: indexes new pages and learns the cost. Call it before tokens are appended, and not
 * when the step has failed. */
void scheduler_commit(struct scheduler *s, int64_t ns);
/* The same for a step planned before the current one: seqs (n), NULL for sequences that have left since. With
 * n_decode and n_read 0 no cost is learned. */
void scheduler_commit_step(struct scheduler *s, struct seq *const *seqs, int n, int n_decode,
                           int n_read, int64_t ns);

/* Indexes the pages of a sequence that leaves before its step is committed. It has no unverified drafts. */
void scheduler_index(struct scheduler *s, struct seq *q);

/* Whether its draws on the host are costly (10). */
bool seq_draws_much(const struct seq *q);
/* The host's draws in a step of `ns`: they took `wall_ns` of it, and `sum_ns` one after another. */
void scheduler_drew(struct scheduler *s, double ns, double wall_ns, double sum_ns);

/* The learned costs, for tests and metrics. */
/* Charges a sequence's client with CPU time that its masks or draws took. A client may use a part of a core
 * (CHARGE_FREE); what it uses beyond that is its debt, which prompts of other clients gain. */
void scheduler_charge(struct scheduler *s, struct seq *q, int64_t ns);
double scheduler_debt_ns(const struct scheduler *s, const struct seq *q);

double scheduler_decode_ns(const struct scheduler *s, int n_decode);
int scheduler_most_running(const struct scheduler *s); /* as many sequences are admitted */
double scheduler_budget_ns(const struct scheduler *s, int n_decode); /* longer for 0 decodes */
int scheduler_read_tokens(const struct scheduler *s,
                          int n_decode); /* prompt tokens that fit beside n decodes */

#endif

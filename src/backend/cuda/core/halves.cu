/*
 * A step in two halves: while ranks add up what one of them has of a block, the ops of the other run (lanes.h). Both
 * lie in the memory of a whole step, the second behind the first; what a step has but once of (its block, the turns of
 * its positions) there is twice. Ops know nothing of it: they find everything where cuda_half lets it point to.
 */
#include "backend/cuda/heads/mtp.h"

extern "C" {
#include "base/mem.h"
#include "base/ranks.h"
}

bool halves_want(const struct cuda_backend *cu)
{
    return ranks_halve(cu->be->ranks) || lanes_alone(cu);
}

size_t halves_turns(const struct cuda_backend *cu)
{
    return align_up((size_t)cu->shape.max_tokens * (size_t)(cu->ropes.pairs + 1), STEP_ALIGN);
}

/* What belongs to rows, to out rows, and to the second half, so much further on: by 1 or, back again, -1. */
static void shift(struct cuda_backend *cu, int i, int by)
{
    const struct cuda_half *h = &cuda_halves_of(cu)->of[i];
    ptrdiff_t rows = by * h->row, outs = by * h->out, second = by * i, embd = cu->shape.n_embd;
    cu->all += rows * embd;
    cu->d += rows * embd;
    cu->out += outs * embd;
    cu->logits_all += outs * cu->shape.n_vocab;
    cu->shadow += second * NORM_ROWS * embd;
    cu->rope += second * (ptrdiff_t)halves_turns(cu);
    cu->step_dev += second * (ptrdiff_t)cu->step_cap;
    cu->step_host += second * (ptrdiff_t)cu->step_cap;
    cu->step_mapped += second * (ptrdiff_t)cu->step_cap;
    if (cu->beside) {
        cu->beside += rows * embd;
        cu->beside_gate += rows;
    }
    if (cu->layer_embeds)
        cu->layer_embeds += rows * cu->shape.n_layers * cu->net->embed.layers.width;
    lanes_shift(cu, rows, outs);
}

static struct cuda_loras *loras_of(const struct cuda_backend *cu)
{
    return &((struct cuda_whole *)cu->be)->loras;
}

/* Leaves the half in work; its rows stay, and what is to be added to them as rows of its own. */
static void leave(struct cuda_backend *cu)
{
    struct cuda_halves *all = cuda_halves_of(cu);
    struct cuda_half *h = &all->of[all->now];
    resid_add_rows(cu, &cu->resid);
    h->layout = cu->layout;
    h->resid = cu->resid;
    h->loras = loras_of(cu)->step;
    h->mtp = *mtp_of(cu);
    shift(cu, all->now, -1);
}

static void enter(struct cuda_backend *cu, int i)
{
    cuda_halves_of(cu)->now = i;
    shift(cu, i, 1);
}

void cuda_begin_halves(struct backend *be, const struct batch halves[2])
{
    struct cuda_backend *cu = cuda_self(be);
    struct cuda_halves *all = cuda_halves_of(cu);
    CHECK(all->room, "halves of a step, and room for whole ones");
    int rows = halves[0].n_tokens + halves[1].n_tokens, n_out = halves[0].n_out + halves[1].n_out;
    int seqs = halves[0].n_seqs > halves[1].n_seqs ? halves[0].n_seqs : halves[1].n_seqs;
    step_take_turn(cu, rows, seqs, n_out, false);
    if (be->profile)
        be->profile->halved++;
    all->may_wait = cu->may_wait;
    cu->may_wait = false;
    for (int i = 0; i < 2; i++) {
        all->of[i].row = i ? halves[0].n_tokens : 0;
        all->of[i].out = i ? halves[0].n_out : 0;
        enter(cu, i);
        step_take_batch(cu, &halves[i]);
        leave(cu);
    }
    all->now = -1;
}

void cuda_half(struct backend *be, int i)
{
    struct cuda_backend *cu = cuda_self(be);
    struct cuda_halves *all = cuda_halves_of(cu);
    const struct cuda_half *h = &all->of[i];
    if (all->now >= 0)
        leave(cu);
    enter(cu, i);
    cu->layout = h->layout;
    cu->resid = h->resid;
    loras_of(cu)->step = h->loras;
    *mtp_of(cu) = h->mtp;
    lanes_take(cu);
}

void halves_leave(struct cuda_backend *cu)
{
    struct cuda_halves *all = cuda_halves_of(cu);
    if (all->now < 0)
        return;
    leave(cu);
    all->now = -1;
    cu->may_wait = all->may_wait;
}

/* The job, as commands and the server use it: see job.h. */
#include "dist/job.h"
#include "dist/follow.h"
#include "dist/ranks.h"

_Static_assert((int)JOB_ARGUMENTS == (int)RANKS_VALUE,
               "arguments are compared as a value of ranks");

enum job_role job_join(const char *program, const char *arguments, struct error *say)
{
    *say = (struct error){0};
    if (!ranks_launched())
        return JOB_ALONE;
    struct ranks *r = ranks_open(say);
    if (!r) {
        if (!ranks_first())
            *say = (struct error){0};
        return JOB_FAILED;
    }
    *say = r->comm.notice;
    r->program = program;
    r->arguments = arguments;
    return r->rank == 0 ? JOB_FIRST : JOB_WORKER;
}

void job_leave(void)
{
    if (ranks_world() && !ranks_world()->taken)
        follow_send_end(ranks_world());
    ranks_close(ranks_world());
}

int job_size(void)
{
    return ranks_world() ? ranks_world()->size : 1;
}

bool job_arrange(const struct job_options *o, struct error *err)
{
    struct ranks *r = ranks_world();
    const char *placed = o->ep ? "--ep" : o->expert_stats ? "--expert-stats" : NULL;
    if (!r && (o->tp > 1 || o->pp > 1))
        return error_set(err, "--tp and --pp need processes: mpirun -n %d steel ...",
                         (o->tp ? o->tp : 1) * (o->pp ? o->pp : 1));
    if (!r && placed)
        return error_set(err, "%s places experts on processes: mpirun -n N steel ...", placed);
    if (r && placed && (o->tp == 1 || (!o->tp && o->pp == r->size)))
        return error_set(err, "%s needs several --tp ranks to place experts on; there is one",
                         placed);
    if (!r)
        return true;
    r->tp_asked = o->tp;
    r->pp_asked = o->pp;
    r->ep_asked = o->ep;
    r->expert_stats = o->expert_stats;
    ranks_set_timeout(r, o->timeout_s ? o->timeout_s : RANKS_TIMEOUT);
    return true;
}

int job_alarm(void)
{
    return ranks_world() ? ranks_world()->alarm : -1;
}

const char *job_lost(void)
{
    struct ranks *r = ranks_world();
    if (!r ||
        !atomic_load(&r->stop)) /* stop is set before the alarm, and after `lost` is complete */
        return NULL;
    atomic_store(&r->said, true);
    return r->lost.msg;
}

bool job_fail(const char *why)
{
    if (!ranks_world())
        return false;
    ranks_lose(ranks_world(), "%s", why);
    return true;
}

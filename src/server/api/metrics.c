/* /metrics in the Prometheus text format, with Steel's, vLLM's or llama.cpp's names from one table. */
#include "base/mem.h"
#include "server/api/server_int.h"

#include <stdio.h>
#include <string.h>

enum { METRICS_MOST = 80 };
enum metric_kind { GAUGE, COUNTER, HISTOGRAM };

struct metric {
    enum metric_kind kind;
    const char *own, *vllm, *llamacpp; /* NULL = absent in that style */
    const char *help;
    double value;
    const struct histogram *histogram;
    const char *label; /* name="value"; NULL = none */
};

static void write_histogram(struct buf *b, const char *name, const char *label,
                            const struct histogram *h)
{
    uint64_t sum = 0;
    for (int i = 0; i <= HISTOGRAM_BUCKETS; i++) {
        char le[24] = "+Inf";
        if (i < HISTOGRAM_BUCKETS)
            snprintf(le, sizeof le, "%g", histogram_bounds[i]);
        sum += h->count[i];
        buf_addf(b, "%s_bucket{%s,le=\"%s\"} %llu\n", name, label, le, (unsigned long long)sum);
    }
    buf_addf(b, "%s_sum{%s} %.9g\n%s_count{%s} %llu\n", name, label, h->sum, name, label,
             (unsigned long long)sum);
}

static const char *name_in(const struct metric *m, enum metrics_style style)
{
    return style == METRICS_VLLM ? m->vllm : style == METRICS_LLAMACPP ? m->llamacpp : m->own;
}

static void write_metric(struct buf *b, const struct metric *m, enum metrics_style style,
                         const char *model, const char *previous)
{
    static const char *const kinds[] = {"gauge", "counter", "histogram"};
    const char *name = name_in(m, style);
    if (!name)
        return;
    if (name != previous)
        buf_addf(b, "# HELP %s %s\n# TYPE %s %s\n", name, m->help, name, kinds[m->kind]);
    struct buf label = {0};
    buf_adds(&label, "model_name=");
    jsonout_text(&label, model); /* JSON's escapes are a superset of Prometheus' */
    if (m->label)
        buf_addf(&label, ",%s", m->label);
    if (m->kind == HISTOGRAM)
        write_histogram(b, name, label.p, m->histogram);
    else
        buf_addf(b, "%s{%s} %.17g\n", name, label.p, m->value);
    buf_clear(&label);
}

/* Metrics of the embedding and rerank models. */
static void write_embedders(struct server *s, struct buf *out)
{
    static const struct {
        enum metric_kind kind;
        const char *name, *help;
    } rows[] = {
        {GAUGE, "steel_embed_texts_waiting", "Texts waiting to enter a step."},
        {COUNTER, "steel_embed_texts_total", "Texts embedded, or pairs scored."},
        {COUNTER, "steel_embed_tokens_total", "Tokens of these texts."},
        {COUNTER, "steel_embed_steps_total", "Steps of the embedding model."},
        {COUNTER, "steel_embed_rejections_total", "Requests refused because the queue was full."},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *previous = NULL;
        for (const struct loaded *l = s->models->all; l; l = l->next_all) {
            struct embed_stats e;
            if (!l->embedder)
                continue;
            embedder_stats(l->embedder, &e);
            const double values[] = {e.n_waiting, (double)e.n_texts, (double)e.n_tokens,
                                     (double)e.n_steps, (double)e.n_rejected};
            const char *label =
                l->entry->src.task == MODEL_RERANK ? "task=\"rerank\"" : "task=\"embed\"";
            struct metric m = {rows[i].kind, rows[i].name, 0, 0, rows[i].help, values[i], 0, label};
            write_metric(out, &m, s->opt.metrics, l->entry->name, previous);
            previous = rows[i].name;
        }
    }
}
#define N(x) ((double)(x))

static uint64_t total(const uint64_t *by_source)
{
    uint64_t sum = 0;
    for (int i = 0; i < N_DRAFT_SOURCES; i++)
        sum += by_source[i];
    return sum;
}

/* Metrics of one engine; their histograms are e's. Returns their number. */
static int list_engine(const struct engine_stats *stats, struct metric out[METRICS_MOST])
{
    const struct engine_stats e = *stats;
    double pages = e.pages_total ? e.pages_total : 1;
    static const char done[] = "steel_requests_finished_total",
                      vdone[] = "vllm:request_success_total";
    const char *const done_help = "Answers ended, by reason.";
    const struct metric list[] = {
        {GAUGE, "steel_requests_running", "vllm:num_requests_running",
         "llamacpp:requests_processing", "Sequences in the batch.", N(e.n_running), 0, 0},
        {GAUGE, "steel_requests_waiting", "vllm:num_requests_waiting", "llamacpp:requests_deferred",
         "Sequences waiting to enter the batch.", N(e.n_waiting), 0, 0},
        {GAUGE, "steel_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc",
         "llamacpp:kv_cache_usage_ratio", "Fraction of KV pages held by running sequences.",
         e.pages_held / pages, 0, 0},
        {GAUGE, "steel_kv_pages", 0, 0, "KV pages by state.", N(e.pages_held), 0, "state=\"held\""},
        {GAUGE, "steel_kv_pages", 0, 0, "", N(e.pages_idle), 0, "state=\"cached\""},
        {GAUGE, "steel_kv_pages", 0, 0, "", pages - e.pages_held - e.pages_idle, 0,
         "state=\"free\""},
        {COUNTER, "steel_prompt_tokens_total", "vllm:prompt_tokens_total",
         "llamacpp:prompt_tokens_total", "Tokens of started prompts.", N(e.prompt_tokens), 0, 0},
        {COUNTER, "steel_prompt_tokens_computed_total", 0, 0,
         "Prompt tokens computed by the model (not cached; again after preemption).",
         N(e.read_tokens), 0, 0},
        {COUNTER, "steel_generation_tokens_total", "vllm:generation_tokens_total",
         "llamacpp:tokens_predicted_total", "Tokens generated.", N(e.generated_tokens), 0, 0},
        {COUNTER, "steel_forced_tokens_total", 0, 0,
         "Generated tokens that a constraint determined.", N(e.n_forced), 0, 0},
        {COUNTER, "steel_mask_waits_total", 0, 0,
         "Times a sequence sat steps out until the mask of its constraint was computed.",
         N(e.n_held), 0, 0},
        {COUNTER, "steel_mask_seconds_total", 0, 0, "CPU seconds spent on masks of constraints.",
         e.mask_s, 0, 0},
        {COUNTER, "steel_draft_tokens_total", "vllm:spec_decode_num_draft_tokens_total", 0,
         "Draft tokens verified.", N(total(e.n_drafted)), 0, 0},
        {COUNTER, "steel_draft_tokens_by_source_total", 0, 0,
         "Draft tokens verified, by where they came from.", N(e.n_drafted[DRAFT_TEXT]), 0,
         "source=\"text\""},
        {COUNTER, "steel_draft_tokens_by_source_total", 0, 0, "", N(e.n_drafted[DRAFT_HEAD]), 0,
         "source=\"head\""},
        {COUNTER, "steel_draft_tokens_by_source_total", 0, 0, "", N(e.n_drafted[DRAFT_MODEL]), 0,
         "source=\"model\""},
        {COUNTER, "steel_draft_tokens_by_source_total", 0, 0, "", N(e.n_drafted[DRAFT_GRAMMAR]), 0,
         "source=\"grammar\""},
        {COUNTER, "steel_draft_tokens_accepted_total", "vllm:spec_decode_num_accepted_tokens_total",
         0, "Draft tokens accepted.", N(total(e.n_accepted)), 0, 0},
        {COUNTER, "steel_draft_tokens_accepted_by_source_total", 0, 0,
         "Draft tokens accepted, by where they came from.", N(e.n_accepted[DRAFT_TEXT]), 0,
         "source=\"text\""},
        {COUNTER, "steel_draft_tokens_accepted_by_source_total", 0, 0, "",
         N(e.n_accepted[DRAFT_HEAD]), 0, "source=\"head\""},
        {COUNTER, "steel_draft_tokens_accepted_by_source_total", 0, 0, "",
         N(e.n_accepted[DRAFT_MODEL]), 0, "source=\"model\""},
        {COUNTER, "steel_draft_tokens_accepted_by_source_total", 0, 0, "",
         N(e.n_accepted[DRAFT_GRAMMAR]), 0, "source=\"grammar\""},
        {COUNTER, "steel_prefix_cache_queries_total", "vllm:prefix_cache_queries_total", 0,
         "Prompt tokens looked up in the prefix cache.", N(e.cache_queries), 0, 0},
        {COUNTER, "steel_prefix_cache_hits_total", "vllm:prefix_cache_hits_total", 0,
         "Prompt tokens found in the prefix cache.", N(e.cache_hits), 0, 0},
        {COUNTER, "steel_prefix_disk_tokens_total", 0, 0,
         "Prompt tokens read from disk into the prefix cache.", N(e.disk_tokens), 0, 0},
        {COUNTER, "steel_prefix_disk_read_bytes_total", 0, 0, "Bytes of prefixes read from disk.",
         N(e.disk_read), 0, 0},
        {COUNTER, "steel_prefix_disk_read_seconds_total", 0, 0,
         "Time in which prefixes were read from disk; wait and call are parts of all, copy and pin "
         "of "
         "call.",
         e.disk_times.all, 0, "part=\"all\""},
        {COUNTER, "steel_prefix_disk_read_seconds_total", 0, 0, "", e.disk_times.wait, 0,
         "part=\"wait\""},
        {COUNTER, "steel_prefix_disk_read_seconds_total", 0, 0, "", e.disk_times.call, 0,
         "part=\"call\""},
        {COUNTER, "steel_prefix_disk_read_seconds_total", 0, 0, "", e.disk_times.copy, 0,
         "part=\"copy\""},
        {COUNTER, "steel_prefix_disk_read_seconds_total", 0, 0, "", e.disk_times.pin, 0,
         "part=\"pin\""},
        {COUNTER, "steel_prefix_disk_written_bytes_total", 0, 0,
         "Bytes of prefixes written to disk.", N(e.disk_written), 0, 0},
        {COUNTER, "steel_prefix_disk_damaged_total", 0, 0,
         "Files of prefixes that were damaged, and were removed.", N(e.disk_damaged), 0, 0},
        {COUNTER, "steel_prefix_cache_evictions_total", 0, 0, "Cached pages evicted.",
         N(e.n_evicted), 0, 0},
        {COUNTER, "steel_image_views_total", 0, 0, "Views of images that the tower has computed.",
         N(e.images.n_views), 0, 0},
        {COUNTER, "steel_image_steps_total", 0, 0, "Steps of the image tower.", N(e.images.n_steps),
         0, 0},
        {COUNTER, "steel_image_seconds_total", 0, 0, "Time of images, by part.", e.images.decode, 0,
         "part=\"decode\""},
        {COUNTER, "steel_image_seconds_total", 0, 0, "", e.images.patches, 0, "part=\"patches\""},
        {COUNTER, "steel_image_seconds_total", 0, 0, "", e.images.rows, 0, "part=\"rows\""},
        {COUNTER, "steel_image_seconds_total", 0, 0, "", e.images.waiting, 0, "part=\"waiting\""},
        {COUNTER, "steel_image_seconds_total", 0, 0, "", e.images.steps, 0, "part=\"steps\""},
        {COUNTER, "steel_image_seconds_total", 0, 0, "", e.images.fetch, 0, "part=\"fetch\""},
        {COUNTER, "steel_image_seconds_total", 0, 0, "", e.images.copy, 0, "part=\"copy\""},
        {COUNTER, "steel_preemptions_total", "vllm:num_preemptions_total", 0,
         "Sequences preempted because no KV page was free.", N(e.n_preempted), 0, 0},
        {COUNTER, "steel_kv_wrong_pages_total", 0, 0,
         "Sequences ended because a page of the KV cache was another one's (--kv-canary).",
         N(e.n_wrong_pages), 0, 0},
        {COUNTER, done, vdone, 0, done_help, N(e.finished[FINISH_STOP]), 0,
         "finished_reason=\"stop\""},
        {COUNTER, done, vdone, 0, done_help, N(e.finished[FINISH_LENGTH]), 0,
         "finished_reason=\"length\""},
        {COUNTER, done, vdone, 0, done_help, N(e.finished[FINISH_CANCEL]), 0,
         "finished_reason=\"abort\""},
        {COUNTER, done, vdone, 0, done_help, N(e.finished[FINISH_ERROR]), 0,
         "finished_reason=\"error\""},
        {COUNTER, "steel_cancellations_total", 0, 0, "Sequences cancelled.",
         N(e.finished[FINISH_CANCEL]), 0, 0},
        {COUNTER, "steel_rejections_total", 0, 0, "Requests refused because the queue was full.",
         N(e.n_rejected), 0, 0},
        {COUNTER, "steel_steps_total", 0, "llamacpp:n_decode_total", "Steps of the engine.",
         N(e.n_steps), 0, 0},
        {COUNTER, "steel_steps_ahead_total", 0, 0,
         "Steps that began before the previous one had ended.", N(e.n_ahead), 0, 0},
        {COUNTER, "steel_steps_read_total", 0, 0,
         "Steps with several tokens of a sequence: prompts, forced tokens.", N(e.n_read_steps), 0,
         0},
        {COUNTER, "steel_step_seconds_total", 0, 0, "Time in steps that read prompts.", e.read_s, 0,
         "kind=\"read\""},
        {COUNTER, "steel_step_seconds_total", 0, 0, "", e.decode_s, 0, "kind=\"decode\""},
        {COUNTER, 0, 0, "llamacpp:prompt_seconds_total", "Time in steps that read prompts.",
         e.read_s, 0, 0},
        {COUNTER, 0, 0, "llamacpp:tokens_predicted_seconds_total", "Time in other steps.",
         e.decode_s, 0, 0},
        {GAUGE, 0, 0, "llamacpp:prompt_tokens_seconds", "Average prompt speed, tokens a second.",
         e.read_s > 0 ? N(e.read_tokens) / e.read_s : 0, 0, 0},
        {GAUGE, 0, 0, "llamacpp:predicted_tokens_seconds",
         "Average generation speed, tokens a second.",
         e.busy_s > 0 ? N(e.generated_tokens) / e.busy_s : 0, 0, 0},
        {GAUGE, "steel_decode_step_seconds", 0, 0,
         "Estimated time of a step with the current decodes.", e.decode_ms * 1e-3, 0, 0},
        {GAUGE, "steel_step_budget_seconds", 0, 0, "Target time of a step while sequences decode.",
         e.budget_ms * 1e-3, 0, 0},
        {GAUGE, "steel_target_seconds", 0, 0, "Targets (--itl-ms, --ttft-ms); 0 = none.",
         e.itl_ms * 1e-3, 0, "of=\"itl\""},
        {GAUGE, "steel_target_seconds", 0, 0, "", e.ttft_ms * 1e-3, 0, "of=\"ttft\""},
        {COUNTER, "steel_target_answers_total", 0, 0,
         "Answers that met the targets: of the mean time between tokens, of the first token, both; "
         "and all that were judged.",
         N(e.n_itl_met), 0, "met=\"itl\""},
        {COUNTER, "steel_target_answers_total", 0, 0, "", N(e.n_ttft_met), 0, "met=\"ttft\""},
        {COUNTER, "steel_target_answers_total", 0, 0, "", N(e.n_both_met), 0, "met=\"both\""},
        {COUNTER, "steel_target_answers_total", 0, 0, "", N(e.n_judged), 0, "met=\"any\""},
        {GAUGE, "steel_sequences_admitted", 0, 0,
         "Sequences that may run at once: the batch size, or what --itl-ms allows.",
         N(e.most_running), 0, 0},
        {GAUGE, "steel_prompt_token_seconds", 0, 0,
         "Estimated time that a prompt token adds to a step.", e.read_us * 1e-6, 0, 0},
        {HISTOGRAM, "steel_time_to_first_token_seconds", "vllm:time_to_first_token_seconds", 0,
         "Time from the request to its first token.", 0, &stats->first_token, 0},
        {HISTOGRAM, "steel_inter_token_latency_seconds", "vllm:inter_token_latency_seconds", 0,
         "Time between two tokens of a sequence.", 0, &stats->inter_token, 0},
        {HISTOGRAM, "steel_e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds", 0,
         "Time from the request to the end of its output.", 0, &stats->total, 0},
        {HISTOGRAM, "steel_request_queue_time_seconds", "vllm:request_queue_time_seconds", 0,
         "Time from the request to its first step.", 0, &stats->queued, 0},
    };
    _Static_assert(sizeof list / sizeof *list <= METRICS_MOST, "more metrics");
    memcpy(out, list, sizeof list);
    return sizeof list / sizeof *list;
}

/* Metrics of the server itself. */
static int list_server(struct server *s, struct metric out[METRICS_MOST])
{
    struct jobs_count jobs = jobs_count(s->jobs), slow = {0};
    if (s->slow_jobs)
        slow = jobs_count(s->slow_jobs);
    static const char http[] = "steel_http_replies_total";
    const char *const http_help = "HTTP replies, by status class.";
    const struct metric list[] = {
        {GAUGE, "steel_connections", 0, 0, "Open connections.", N(http_n_conns(s->http)), 0, 0},
        {GAUGE, "steel_body_bytes", 0, 0, "Bytes of request bodies being received or prepared.",
         N(http_buffered(s->http)), 0, 0},
        {GAUGE, "steel_unsent_bytes", 0, 0, "Bytes of output that clients have not read yet.",
         N(s->kept), 0, 0},
        {GAUGE, "steel_jobs", 0, 0, "Requests at the workers, by state.", N(jobs.waiting), 0,
         "state=\"waiting\""},
        {GAUGE, "steel_jobs", 0, 0, "", N(jobs.running_short), 0, "state=\"short\""},
        {GAUGE, "steel_jobs", 0, 0, "", N(jobs.running_long), 0, "state=\"long\""},
        {GAUGE, "steel_jobs", 0, 0, "", N(slow.waiting + slow.running_long), 0, "state=\"slow\""},
        {COUNTER, "steel_log_lines_dropped_total", 0, 0,
         "Log lines dropped because stderr was blocked.", N(log_dropped()), 0, 0},
        {COUNTER, http, 0, 0, http_help, N(s->n_http[2]), 0, "status=\"2xx\""},
        {COUNTER, http, 0, 0, http_help, N(s->n_http[3]), 0, "status=\"3xx\""},
        {COUNTER, http, 0, 0, http_help, N(s->n_http[4]), 0, "status=\"4xx\""},
        {COUNTER, http, 0, 0, http_help, N(s->n_http[5]), 0, "status=\"5xx\""},
        {GAUGE, "steel_models_loaded", 0, 0, "Models in memory.", N(s->models->n_loaded), 0, 0},
        {GAUGE, "steel_models_bytes", 0, 0, "Bytes of the host's memory that models take.",
         N(s->models->bytes), 0, 0},
        {GAUGE, "steel_models_waiting", 0, 0, "Requests that wait for a model to load.",
         N(s->models->n_waiting), 0, 0},
    };
    memcpy(out, list, sizeof list);
    return sizeof list / sizeof *list;
}
#undef N

/* Samples of a metric are together: one for each model in memory. Without a model they are 0. */
static void write_engines(struct server *s, struct buf *out)
{
    struct models *m = s->models;
    enum { MOST = 64 };
    static const struct engine_stats none;
    struct engine_stats *stats = mem_zalloc(MOST, sizeof *stats);
    const char *names[MOST];
    struct metric one[METRICS_MOST];
    int n = 0, n_metrics = 0;
    for (const struct loaded *l = m->all; l && n < MOST; l = l->next_all)
        if (l->engine) {
            names[n] = l->entry->name;
            engine_stats(l->engine, &stats[n++]);
        }
    if (!n) {
        names[n] = m->first ? m->first->name : "";
        stats[n++] = none;
    }
    const char *previous = NULL;
    n_metrics = list_engine(&stats[0], one);
    for (int i = 0, next; i < n_metrics; i = next) {
        /* Metrics that share a name differ in their labels. */
        const char *name = name_in(&one[i], s->opt.metrics);
        for (next = i + 1; next < n_metrics && name && name_in(&one[next], s->opt.metrics) == name;)
            next++;
        for (int k = 0; k < n; k++) {
            struct metric mine[METRICS_MOST];
            list_engine(&stats[k], mine);
            for (int j = i; j < next; j++) {
                write_metric(out, &mine[j], s->opt.metrics, names[k], previous);
                previous = name ? name : previous;
            }
        }
    }
    mem_free(stats);
}

void metrics_write(struct server *s, struct buf *out)
{
    struct metric list[METRICS_MOST];
    const char *previous = NULL;
    pthread_mutex_lock(&s->models->lock);
    write_engines(s, out);
    int n = list_server(s, list);
    for (int i = 0; i < n; i++) {
        write_metric(out, &list[i], s->opt.metrics, s->models->first ? s->models->first->name : "",
                     previous);
        previous = name_in(&list[i], s->opt.metrics);
    }
    write_embedders(s, out);
    pthread_mutex_unlock(&s->models->lock);
}

/*
 * Measures how fast the CPU multiplies: see probe.h. A network of equal mlps is computed without a model: one pass over
 * all of them with few rows, which reads more memory than any cache holds, and over one of them with many rows.
 */
#include "engine/probe.h"
#include "backend/backend.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/cpu.h"
#include "base/mem.h"
#include "base/os.h"
#include "base/pool.h"
#include "base/sysmem.h"
#include "base/version.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

const int probe_rows[PROBE_POINTS] = {1, 8, 64, 512};

enum {
    WIDTH = 2048,
    HIDDEN = 6144,
    SMALL = 256, /* width and hidden units of mlps whose weights take no time */
    SMALL_LAYERS = 64,
    REPEATS = 3,
    FILE_MAX = 1 << 20,
};
static const size_t PASS_BYTES = 256 << 20, PASS_MOST = 1 << 30;

/* A network of equal mlps, and the memory that its raw weights point to. */
struct bench_net {
    struct backend *be;
    struct network net;
    struct weight *weights; /* (2 * n_layers) */
    float *gain;
    double values; /* of one layer */
};

/* Bytes that a pass over all layers should read: more than the caches hold. */
static size_t pass_bytes(void)
{
    long l3 = 0;
#ifdef _SC_LEVEL3_CACHE_SIZE
    l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    size_t want = l3 > 0 ? 2 * (size_t)l3 : 0, free = sysmem_available("") / 4;
    want = want < PASS_BYTES ? PASS_BYTES : want > PASS_MOST ? PASS_MOST : want;
    return free && want > free ? free : want;
}

static bool upload_zeros(struct bench_net *b, enum dtype t, int n_in, int n_out, struct weight *w,
                         struct error *err)
{
    enum { GROUP = 128 };
    size_t bytes = dtype_bytes(t, (size_t)n_in) * (size_t)n_out;
    size_t planes = (size_t)n_out * (size_t)(n_in / GROUP) * sizeof(uint16_t);
    uint8_t *zeros = mem_zalloc(bytes + planes, 1);
    const uint8_t *data[] = {zeros}, *zero[] = {zeros};
    const void *scale[] = {zeros};
    bool planar = t == DT_GPTQ4;
    struct raw_weight raw = {
        .n_in = n_in, .n_out = n_out, .n_expert = 1, .n_seg = 1, .transient = true};
    raw.seg[0] = (struct raw_seg){.type = t,
                                  .rows = n_out,
                                  .data = data,
                                  .scale = planar ? scale : NULL,
                                  .zero = planar ? zero : NULL,
                                  .group_len = planar ? GROUP : 0};
    *w = (struct weight){.n_in = n_in, .n_out = n_out, .n_expert = 1};
    bool ok = b->be->ops->upload(b->be, &raw, WEIGHT_LINEAR, w, err);
    mem_free(zeros);
    return ok;
}

static void net_clear(struct bench_net *b)
{
    for (int i = 0; b->weights && i < 2 * b->net.n_layers; i++)
        if (b->weights[i].impl)
            b->be->ops->release(b->be, &b->weights[i]);
    b->be->ops->free(b->be, b->gain, WIDTH * sizeof(float));
    mem_free(b->weights);
    mem_free(b->net.layers);
}

static bool net_init(struct bench_net *b, struct backend *be, enum dtype t, int width, int hidden,
                     int n_layers, struct error *err)
{
    *b = (struct bench_net){.be = be,
                            .net = {.n_layers = n_layers, .n_embd = width, .n_vocab = width},
                            .values = 3.0 * width * hidden};
    b->net.layers = mem_zalloc((size_t)n_layers, sizeof *b->net.layers);
    b->weights = mem_zalloc(2 * (size_t)n_layers, sizeof *b->weights);
    b->gain = be->ops->alloc(be, WIDTH * sizeof(float), "a gain", err);
    for (int i = 0; b->gain && i < n_layers; i++) {
        struct mlp *m = &b->net.layers[i].mlp;
        struct weight *w = &b->weights[2 * (size_t)i];
        b->net.layers[i].mixer.kind = MIXER_NONE;
        m->block.in = (struct norm){.kind = NORM_RMS, .gain = b->gain, .eps = 1e-6f};
        m->dense = (struct ffn){.gate_up = &w[0], .down = &w[1]};
        if (!upload_zeros(b, t, width, 2 * hidden, &w[0], err) ||
            !upload_zeros(b, t, hidden, width, &w[1], err))
            return false;
    }
    int most = probe_rows[PROBE_POINTS - 1];
    struct bounds bounds = {.page_len = 16,
                            .n_pages = 1,
                            .k_type = DT_F16,
                            .v_type = DT_F16,
                            .max_tokens = most,
                            .max_seqs = 1,
                            .max_out = 1,
                            .max_pages = 1};
    return b->gain && be->ops->prepare(be, &b->net, &bounds, err);
}

/* Seconds of one pass over the first n_layers; the least of several. */
static double time_pass(struct bench_net *b, int rows, int n_layers)
{
    struct backend *be = b->be;
    int32_t out_row = 0, pos[512] = {0};
    struct error err;
    float *stream = mem_zalloc((size_t)rows * (size_t)b->net.n_embd, sizeof *stream);
    struct batch batch = {
        .n_tokens = rows, .n_seqs = 1, .n_out = 1, .tokens = pos, .pos = pos, .out_rows = &out_row};
    double least = INFINITY;
    for (int i = 0; i < REPEATS; i++) {
        be->ops->begin(be, &batch);
        be->ops->stream->put(be, stream, rows);
        int64_t start = clock_ns();
        for (int k = 0; k < n_layers; k++)
            be->ops->mlp(be, &b->net.layers[k].mlp, k);
        be->ops->launch(be);
        be->ops->end(be, NULL, &err);
        least = fmin(least, (double)(clock_ns() - start) * 1e-9);
    }
    mem_free(stream);
    return least;
}

static bool measure_product(struct backend *be, struct probe *out, struct error *err)
{
    struct bench_net b;
    bool ok = net_init(&b, be, DT_F32, SMALL, SMALL, SMALL_LAYERS, err);
    if (ok)
        out->product = time_pass(&b, 1, SMALL_LAYERS) / (2 * SMALL_LAYERS);
    net_clear(&b);
    return ok;
}

static bool measure_format(struct backend *be, enum dtype t, struct probe *out, struct error *err)
{
    struct bench_net b;
    size_t each = dtype_bytes(t, 3 * (size_t)WIDTH * HIDDEN), n = pass_bytes() / each;
    int n_layers = n < 1 ? 1 : (int)n;
    bool ok = net_init(&b, be, t, WIDTH, HIDDEN, n_layers, err);
    for (int i = 0; ok && i < PROBE_POINTS; i++) {
        int layers = probe_rows[i] <= 8 || n_layers == 1 ? n_layers : 1;
        double s = time_pass(&b, probe_rows[i], layers) / layers - 2 * out->product;
        out->seconds[t][i] = fmax(s, 1e-12) / b.values;
    }
    net_clear(&b);
    return ok;
}

/* The file: an object of machines, each an object of formats and "product" */

/* Names this machine, so that a home folder that several machines share works. */
static void machine_key(const struct backend_options *opt, struct buf *out)
{
    enum isa isa = ISA_REF;
    struct error ignored;
    char cpu[200];
    os_cpu_model(cpu, sizeof cpu);
    for (char *c = cpu; *c; c++)
        if ((unsigned char)*c < ' ' || (unsigned char)*c > '~')
            *c = '?';
    isa_choose(&isa, &ignored);
    buf_addf(out, "%s, %s, %d threads, steel %s", cpu, isa_name(isa),
             opt->threads > 0 ? opt->threads : pool_cpu_count(), version_number());
}

static bool is_time(const json_t *v)
{
    double x = json_number_value(v);
    return json_is_number(v) && isfinite(x) && x > 0 && x < 1;
}

static void take_known(const json_t *machine, struct probe *out)
{
    const json_t *product = json_object_get(machine, "product");
    if (is_time(product))
        out->product = json_number_value(product);
    for (int t = 0; t < DT_COUNT; t++) {
        const json_t *a = json_object_get(machine, dtype_name((enum dtype)t));
        bool ok = json_array_size(a) == PROBE_POINTS;
        for (size_t i = 0; ok && i < PROBE_POINTS; i++)
            ok = is_time(json_array_get(a, i));
        for (size_t i = 0; ok && i < PROBE_POINTS; i++)
            out->seconds[t][i] = json_number_value(json_array_get(a, i));
    }
}

static json_t *to_json(const struct probe *p)
{
    json_t *o = json_pack("{s:f}", "product", p->product);
    for (int t = 0; t < DT_COUNT; t++) {
        if (!(p->seconds[t][0] > 0))
            continue;
        json_t *a = json_array();
        for (int i = 0; i < PROBE_POINTS; i++)
            json_array_append_new(a, json_real(p->seconds[t][i]));
        json_object_set_new(o, dtype_name((enum dtype)t), a);
    }
    return o;
}

static json_t *read_file(const char *path)
{
    struct stat st;
    json_error_t why;
    bool small = path && !stat(path, &st) && S_ISREG(st.st_mode) && st.st_size <= FILE_MAX;
    json_t *all = small ? json_load_file(path, 0, &why) : NULL;
    if (json_is_object(all))
        return all;
    json_decref(all); /* a damaged file is measured anew */
    return json_object();
}

/* Replaces the file as a whole. A folder that cannot be written is no error: the next plan measures again. */
static void write_file(const char *path, json_t *all)
{
    struct buf temp = {0};
    buf_adds(&temp, path);
    for (char *c = temp.p + 1; (c = strchr(c, '/')); c++) {
        *c = 0;
        mkdir(temp.p, 0755);
        *c = '/';
    }
    buf_addf(&temp, ".%ld", (long)getpid());
    if (json_dump_file(all, temp.p, JSON_INDENT(1)) || rename(temp.p, path))
        unlink(temp.p);
    buf_clear(&temp);
}

bool probe_place(struct buf *out)
{
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (xdg && xdg[0] == '/')
        buf_addf(out, "%s/steel/speed.json", xdg);
    else if (home && home[0] == '/')
        buf_addf(out, "%s/.cache/steel/speed.json", home);
    return out->len > 0;
}

bool probe_run(const struct backend_options *opt, const bool wanted[DT_COUNT], const char *path,
               struct probe *out, struct error *err)
{
    struct buf key = {0};
    struct backend *be = NULL;
    bool ok = true;
    json_t *all = read_file(path);
    machine_key(opt, &key);
    *out = (struct probe){.cached = true};
    take_known(json_object_get(all, key.p), out);
    for (int t = 0; ok && t < DT_COUNT; t++) {
        if (!wanted[t] || out->seconds[t][0] > 0)
            continue;
        if (!be) {
            struct backend_options cpu = {.device = "cpu", .threads = opt->threads};
            out->cached = false;
            be = backend_open(&cpu, err);
            ok = be && (out->product > 0 || measure_product(be, out, err));
        }
        ok = ok && measure_format(be, (enum dtype)t, out, err);
    }
    if (ok && !out->cached && path) {
        json_object_set_new(all, key.p, to_json(out));
        write_file(path, all);
    }
    if (be)
        be->ops->close(be);
    json_decref(all);
    buf_clear(&key);
    return ok;
}

double probe_seconds(const struct probe *p, enum dtype t, double rows)
{
    const double *s = p->seconds[t];
    int last = PROBE_POINTS - 1, i = 0;
    if (rows <= 1)
        return s[0];
    if (rows >= probe_rows[last])
        return s[last] * rows / probe_rows[last];
    while (i + 1 < last && rows > probe_rows[i + 1])
        i++;
    double at = log(rows / probe_rows[i]) / log((double)probe_rows[i + 1] / probe_rows[i]);
    return s[i] * pow(s[i + 1] / s[i], at);
}

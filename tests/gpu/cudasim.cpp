/*
 * The implementation of cudasim.h: fibers, barriers, MMA fragments, and a runtime whose streams
 * execute operations at once. x86-64 only (the fiber switch); single-threaded.
 */
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif
#include "cudasim.h"

#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <malloc.h>
#include <map>
#include <sched.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

sim_thread_id sim_self;

static void die(const char *what)
{
    fprintf(stderr, "cudasim: %s (block %u,%u,%u thread %u)\n", what, blockIdx.x, blockIdx.y,
            blockIdx.z, threadIdx.x);
    abort();
}

/* Fibers */

enum { MAX_THREADS = 1024, STACK = 128 << 10, MAX_SHARED = 232448 };

struct copy {
    void *dst;
    const void *src;
    int bytes, group;
};

struct fiber {
    void *sp;
    dim3 thread;
    bool done;
    const unsigned *gate; /* waits while *gate == gate_value */
    unsigned gate_value;
    std::vector<copy> copies;
    int group;
};

struct warp {
    unsigned generation;
    int arrived;
    uint64_t slot[32];
    uint32_t a[32][4], b[32][2];
    const void *row[32];
};

static fiber fibers[MAX_THREADS];
static warp warps[MAX_THREADS / 32];
static char *stacks;
alignas(1024) static uint8_t shared_memory[MAX_SHARED];
static size_t shared_size;
static unsigned block_generation, block_arrived, live, wg_generation[8], wg_arrived[8];
static unsigned named_generation[16], named_arrived[16];
static int n_threads, current;
static void *scheduler_sp;
static const std::function<void()> *body;

extern "C" void sim_switch(void **save, void *to);
asm(".text\n.globl sim_switch\nsim_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");

static void yield()
{
    fiber *f = &fibers[current];
    sim_switch(&f->sp, scheduler_sp);
}

static void wait_gate(const unsigned *gate, unsigned value)
{
    fibers[current].gate = gate;
    fibers[current].gate_value = value;
    yield();
}

void sim_pause()
{
    static const unsigned open = 0;
    wait_gate(&open, 1);
}

void sim_wait_for_host()
{
    sched_yield();
    sim_pause();
}

static void finish_thread()
{
    fiber *f = &fibers[current];
    f->done = true;
    live--;
    if (live && block_arrived == live) {
        block_arrived = 0;
        block_generation++;
    }
    yield();
    die("a finished thread ran on");
}

static void fiber_main()
{
    (*body)();
    finish_thread();
}

void __syncthreads()
{
    unsigned g = block_generation;
    if (++block_arrived == live) {
        block_arrived = 0;
        block_generation++;
        return;
    }
    wait_gate(&block_generation, g);
}

void sim_warp_barrier(uint32_t mask)
{
    warp *w = &warps[current / 32];
    unsigned g = w->generation;
    if (!(mask >> (current & 31) & 1))
        die("a lane outside the mask at a warp barrier");
    if (++w->arrived == __builtin_popcount(mask)) {
        w->arrived = 0;
        w->generation++;
        return;
    }
    wait_gate(&w->generation, g);
}

void sim_wg_barrier()
{
    int i = current / 128;
    unsigned g = wg_generation[i];
    if (++wg_arrived[i] == 128) {
        wg_arrived[i] = 0;
        wg_generation[i]++;
        return;
    }
    wait_gate(&wg_generation[i], g);
}

uint64_t sim_exchange(uint32_t mask, uint64_t value, int from)
{
    warp *w = &warps[current / 32];
    w->slot[current & 31] = value;
    sim_warp_barrier(mask);
    if (!(mask >> from & 1))
        die("a shuffle from a lane outside the mask");
    uint64_t r = w->slot[from];
    sim_warp_barrier(mask);
    return r;
}

uint32_t sim_ballot(uint32_t mask, bool pred)
{
    warp *w = &warps[current / 32];
    w->slot[current & 31] = pred;
    sim_warp_barrier(mask);
    uint32_t r = 0;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1 && w->slot[i])
            r |= 1u << i;
    sim_warp_barrier(mask);
    return r;
}

uint8_t *sim_shared()
{
    return shared_memory;
}

static uint64_t random_state;
static unsigned random_next()
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(random_state >> 33);
}

static void shuffle(std::vector<int> &v)
{
    for (size_t i = v.size(); i > 1; i--)
        std::swap(v[i - 1], v[random_next() % i]);
}

static void run_block(dim3 grid, dim3 block, dim3 index)
{
    n_threads = (int)(block.x * block.y * block.z);
    if (n_threads > MAX_THREADS || n_threads % 32 || block.y != 1 || block.z != 1)
        die("a block of an unsupported shape");
    sim_self.grid_dim = grid;
    sim_self.block_dim = block;
    sim_self.block = index;
    memset(shared_memory, 0xff, shared_size); /* NaNs */
    memset(warps, 0, sizeof warps);
    memset(wg_arrived, 0, sizeof wg_arrived);
    memset(named_arrived, 0, sizeof named_arrived);
    block_arrived = 0;
    live = (unsigned)n_threads;
#ifdef __SANITIZE_ADDRESS__ /* poison left on the stacks by threads of the previous block */
    __asan_unpoison_memory_region(stacks, (size_t)n_threads * STACK);
#endif
    for (int i = 0; i < n_threads; i++) {
        fiber *f = &fibers[i];
        f->thread = dim3((unsigned)i, 0, 0);
        f->done = false;
        f->gate = NULL;
        f->copies.clear();
        f->group = 0;
        uint64_t *top = (uint64_t *)(stacks + (size_t)(i + 1) * STACK);
        *--top = 0; /* return address of fiber_main, never used: keeps the stack aligned */
        *--top = (uint64_t)(uintptr_t)fiber_main;
        for (int r = 0; r < 6; r++)
            *--top = 0;
        f->sp = top;
    }
    std::vector<int> order((size_t)n_threads);
    for (int i = 0; i < n_threads; i++)
        order[(size_t)i] = i;
    shuffle(order);
    while (live) {
        bool moved = false;
        for (int i : order) {
            fiber *f = &fibers[i];
            if (f->done || (f->gate && *f->gate == f->gate_value))
                continue;
            f->gate = NULL;
            current = i;
            sim_self.thread = f->thread;
            moved = true;
            sim_switch(&scheduler_sp, f->sp);
        }
        if (!moved)
            die("deadlock: threads wait at different barriers");
    }
}

static void run_grid(dim3 grid, dim3 block, size_t shared, const std::function<void()> &fn)
{
    if (!stacks) {
        stacks = (char *)mmap(NULL, (size_t)MAX_THREADS * STACK, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        const char *seed = getenv("SIM_SEED");
        random_state = seed ? strtoull(seed, NULL, 10) : 1;
    }
    if (shared > MAX_SHARED)
        die("too much shared memory");
    shared_size = shared;
    body = &fn;
    size_t n = (size_t)grid.x * grid.y * grid.z;
    std::vector<int> order(n);
    for (size_t i = 0; i < n; i++)
        order[i] = (int)i;
    shuffle(order);
    for (int i : order) {
        unsigned b = (unsigned)i;
        run_block(grid, block, dim3(b % grid.x, b / grid.x % grid.y, b / (grid.x * grid.y)));
    }
}

/* Numbers */

float sim_half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
    uint32_t u;
    float f;
    if (e == 31)
        u = sign | 0x7f800000 | m << 13;
    else if (e)
        u = sign | (e + 112) << 23 | m << 13;
    else {
        f = ldexpf((float)m, -24);
        memcpy(&u, &f, 4);
        u |= sign;
    }
    memcpy(&f, &u, 4);
    return f;
}

/* Rounds a double once to fp16. Products and sums of fp16 values are exact in double. */
static uint16_t double_to_half(double d)
{
    uint16_t sign = signbit(d) ? 0x8000 : 0;
    d = fabs(d);
    if (isnan(d))
        return sign | 0x7e00;
    if (d >= 65520)
        return sign | 0x7c00;
    if (d < 0x1p-14)
        return (uint16_t)(sign | (uint16_t)nearbyint(d * 0x1p24));
    int e;
    double m = frexp(d, &e); /* m in [0.5, 1) */
    uint32_t q = (uint32_t)nearbyint(m * 2048);
    if (q == 2048) {
        q = 1024;
        e++;
    }
    return (uint16_t)(sign | (uint32_t)(e + 14) << 10 | (q & 1023));
}

uint16_t sim_float_to_half(float f)
{
    return double_to_half(f);
}

uint16_t sim_float_to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(u >> 16 | 64);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static float bf16_float(uint16_t b)
{
    uint32_t u = (uint32_t)b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

uint32_t sim_half2_fma(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t r = 0;
    for (int s = 0; s < 32; s += 16) {
        double v = (double)sim_half_to_float((uint16_t)(a >> s)) *
                       (double)sim_half_to_float((uint16_t)(b >> s)) +
                   (double)sim_half_to_float((uint16_t)(c >> s));
        r |= (uint32_t)double_to_half(v) << s;
    }
    return r;
}

uint32_t sim_byte_perm(uint32_t a, uint32_t b, uint32_t sel)
{
    uint64_t all = a | (uint64_t)b << 32;
    uint32_t r = 0;
    for (int i = 0; i < 4; i++)
        r |= (uint32_t)(all >> (8 * (sel >> 4 * i & 7)) & 255) << 8 * i;
    return r;
}

/* Every fp16 value, as the tensor cores see it. */
struct half_table {
    float value[1 << 16];
    half_table()
    {
        for (int i = 0; i < 1 << 16; i++)
            value[i] = sim_half_to_float((uint16_t)i);
    }
};
static const half_table halves;

static double element(uint32_t pair, int i, bool bf16)
{
    uint16_t h = (uint16_t)(pair >> 16 * i);
    return (double)(bf16 ? bf16_float(h) : halves.value[h]);
}

/* Row `row_half` of this lane's group in an A fragment of 16 columns. */
static void fragment_row(const warp *w, int g, int row_half, bool bf16, double (&x)[16])
{
    for (int k = 0; k < 16; k++)
        x[k] = element(w->a[g * 4 + k % 8 / 2][row_half + 2 * (k / 8)], k % 2, bf16);
}

void sim_mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool bf16)
{
    warp *w = &warps[current / 32];
    int lane = current & 31, g = lane / 4, c = lane % 4;
    memcpy(w->a[lane], a, sizeof a);
    w->b[lane][0] = b0;
    w->b[lane][1] = b1;
    sim_warp_barrier(0xffffffffu);
    double x[2][16], y[2][16];
    for (int i = 0; i < 2; i++) {
        fragment_row(w, g, i, bf16, x[i]);
        for (int k = 0; k < 16; k++)
            y[i][k] = element(w->b[(2 * c + i) * 4 + k % 8 / 2][k / 8], k % 2, bf16);
    }
    for (int o = 0; o < 4; o++) {
        double sum = d[o];
        for (int k = 0; k < 16; k++)
            sum += x[o / 2][k] * y[o % 2][k];
        d[o] = (float)sum;
    }
    sim_warp_barrier(0xffffffffu);
}

/* 16x32 unsigned bytes times 32x8 signed bytes. */
void sim_mma_u8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    warp *w = &warps[current / 32];
    int lane = current & 31, g = lane / 4, c = lane % 4;
    memcpy(w->a[lane], a, sizeof a);
    w->b[lane][0] = b0;
    w->b[lane][1] = b1;
    sim_warp_barrier(0xffffffffu);
    for (int o = 0; o < 4; o++) {
        int row_half = o / 2, col = 2 * c + o % 2;
        for (int k = 0; k < 32; k++) {
            int kc = k % 16 / 4, shift = k % 4 * 8, kh = k / 16;
            d[o] += (uint8_t)(w->a[g * 4 + kc][row_half + 2 * kh] >> shift) *
                    (int8_t)(w->b[col * 4 + kc][kh] >> shift);
        }
    }
    sim_warp_barrier(0xffffffffu);
}

void sim_mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    warp *w = &warps[current / 32];
    int lane = current & 31, g = lane / 4, c = lane % 4;
    memcpy(w->a[lane], a, sizeof a);
    w->b[lane][0] = b0;
    w->b[lane][1] = b1;
    sim_warp_barrier(0xffffffffu);
    for (int o = 0; o < 4; o++) {
        double sum = d[o];
        for (int k = 0; k < 8; k++) {
            uint32_t x = w->a[g * 4 + k % 4][o / 2 + 2 * (k / 4)] & 0xffffe000u;
            uint32_t y = w->b[(2 * c + o % 2) * 4 + k % 4][k / 4] & 0xffffe000u;
            float fx, fy;
            memcpy(&fx, &x, 4);
            memcpy(&fy, &y, 4);
            sum += (double)fx * (double)fy;
        }
        d[o] = (float)sum;
    }
    sim_warp_barrier(0xffffffffu);
}

void sim_ldmatrix(uint32_t (&r)[4], const void *row, bool trans)
{
    warp *w = &warps[current / 32];
    int lane = current & 31, g = lane / 4, c = lane % 4;
    if ((uintptr_t)row % 16)
        die("ldmatrix from an unaligned row");
    w->row[lane] = row;
    sim_warp_barrier(0xffffffffu);
    for (int m = 0; m < 4; m++) {
        uint16_t e[2];
        for (int i = 0; i < 2; i++)
            e[i] = trans ? ((const uint16_t *)w->row[8 * m + 2 * c + i])[g]
                         : ((const uint16_t *)w->row[8 * m + g])[2 * c + i];
        r[m] = e[0] | (uint32_t)e[1] << 16;
    }
    sim_warp_barrier(0xffffffffu);
}

/* wgmma m64nN. Accumulators: 16 rows per warp, tiles of 8 columns laid out as mma's d. B: (N,
 * 16) fp16, K contiguous, in 128-byte swizzled rows; the descriptor's address field points at
 * the 16-byte unit where it starts. transposed: (16, 64) fp16, N contiguous, for every 64 of N. */
void sim_wgmma(float *d, int n, const uint32_t *a, uint64_t desc, bool bf16, bool transposed)
{
    warp *w = &warps[current / 32];
    int lane = current & 31, g = lane / 4, c = lane % 4;
    memcpy(w->a[lane], a, 16);
    sim_wg_barrier();
    size_t start = (size_t)(desc & 0x3fff) << 4, panel = (size_t)(desc >> 16 & 0x3fff) << 4;
    size_t group = (size_t)(desc >> 32 & 0x3fff) << 4; /* bytes between groups of 8 rows */
    double x[2][16];
    for (int i = 0; i < 2; i++)
        fragment_row(w, g, i, bf16, x[i]);
    for (int t = 0; t < n / 8; t++)
        for (int i = 0; i < 2; i++) {
            int col = 8 * t + 2 * c + i;
            double sum[2] = {d[4 * t + i], d[4 * t + 2 + i]};
            for (int k = 0; k < 16; k++) {
                size_t row = (size_t)(transposed ? k : col),
                       in_row = (size_t)(transposed ? col : k);
                size_t at = start + row / 8 * group + row % 8 * 128 + in_row % 64 * 2;
                at += transposed ? in_row / 64 * panel : 0;
                at ^= (at >> 7 & 7) << 4;
                uint16_t h;
                memcpy(&h, shared_memory + at, 2);
                double y = element(h, 0, bf16);
                sum[0] += x[0][k] * y;
                sum[1] += x[1][k] * y;
            }
            d[4 * t + i] = (float)sum[0];
            d[4 * t + 2 + i] = (float)sum[1];
        }
    sim_wg_barrier();
}

/* Asynchronous copies. The data arrives when the issuing thread waits. */

void sim_copy_async(void *dst, const void *src, int bytes)
{
    if ((uintptr_t)dst % 16 || (bytes && (uintptr_t)src % 16))
        die("an unaligned asynchronous copy");
    if ((uint8_t *)dst < shared_memory || (uint8_t *)dst + 16 > shared_memory + shared_size)
        die("an asynchronous copy outside shared memory");
    fibers[current].copies.push_back({dst, src, bytes, fibers[current].group});
}

void sim_copy_commit()
{
    fibers[current].group++;
}

void sim_copy_wait(int left)
{
    fiber *f = &fibers[current];
    size_t keep = 0;
    for (const copy &c : f->copies) {
        if (c.group < f->group - left) {
            memset(c.dst, 0, 16);
            memcpy(c.dst, c.src, (size_t)c.bytes);
        } else
            f->copies[keep++] = c;
    }
    f->copies.resize(keep);
}

/* An mbarrier: phase, expected arrivals, missing arrivals, and bytes in flight / 16. */
struct bar {
    uint32_t phase;
    uint32_t count : 10, missing : 10, units : 12;
};

static bar *bar_at(uint64_t *p)
{
    if ((uint8_t *)p < shared_memory || (uint8_t *)(p + 1) > shared_memory + shared_size)
        die("a barrier outside shared memory");
    return (bar *)p;
}

static void bar_flip(bar *b)
{
    if (b->missing || b->units)
        return;
    b->missing = b->count;
    b->phase++;
}

void sim_bar_init(uint64_t *p, int count)
{
    bar b = {0, (uint32_t)count & 1023, (uint32_t)count & 1023, 0};
    *bar_at(p) = b;
}

void sim_bar_arrive(uint64_t *p, int bytes)
{
    bar *b = bar_at(p);
    if (!b->missing)
        die("one too many at a barrier");
    b->missing--;
    b->units = (b->units + (uint32_t)bytes / 16) & 4095;
    bar_flip(b);
}

void sim_bar_copy(uint64_t *p, void *dst, const void *src, int bytes)
{
    bar *b = bar_at(p);
    if ((uintptr_t)dst % 16 || (uintptr_t)src % 16 || bytes % 16 || (uint32_t)bytes / 16 > b->units)
        die("a copy its barrier does not expect");
    if ((uint8_t *)dst < shared_memory || (uint8_t *)dst + bytes > shared_memory + shared_size)
        die("a copy outside shared memory");
    memcpy(dst, src, (size_t)bytes);
    b->units = (b->units - (uint32_t)bytes / 16) & 4095;
    bar_flip(b);
}

void sim_bar_wait(uint64_t *p, int parity)
{
    bar *b = bar_at(p);
    while ((int)(b->phase & 1) == parity)
        wait_gate(&b->phase, b->phase);
}

void sim_named_barrier_arrive(int id, int threads)
{
    if (++named_arrived[id] < (unsigned)threads)
        return;
    named_arrived[id] = 0;
    named_generation[id]++;
}

void sim_named_barrier_sync(int id, int threads)
{
    unsigned g = named_generation[id];
    sim_named_barrier_arrive(id, threads);
    if (named_generation[id] == g)
        wait_gate(&named_generation[id], g);
}

/* The runtime */

static const size_t MEMORY = (size_t)1 << 32;
static std::atomic<size_t> device_bytes; /* allocated of it */

struct sim_graph {
    std::vector<std::function<void()>> nodes;
};
struct sim_stream {
    sim_graph *capture;
    /* A stream that has waited for another stream's event may run concurrently with it. Its work
     * is deferred as long as possible, so missing synchronisation gives wrong results. */
    bool late;
    std::vector<std::function<void()>> deferred;
};
struct sim_event {
    cudaStream_t on; /* the stream of the last record */
};

static std::atomic<bool> device_stuck; /* nothing runs any more */

static void catch_up(cudaStream_t s)
{
    std::vector<std::function<void()>> now;
    if (s)
        now.swap(s->deferred);
    for (auto &fn : now)
        if (!device_stuck)
            fn();
}

static void enqueue(cudaStream_t s, std::function<void()> fn)
{
    if (s && s->capture)
        s->capture->nodes.push_back(std::move(fn));
    else if (s && s->late)
        s->deferred.push_back(std::move(fn));
    else if (!device_stuck)
        fn();
}

bool sim_dry()
{
    static const bool dry = getenv("SIM_DRY") != NULL;
    return dry;
}

/* Function names by address from the program's symbol table. Kernels are static, so the dynamic
 * table does not list them. */
static std::map<uintptr_t, const char *> read_symbols()
{
    std::map<uintptr_t, const char *> names;
    uintptr_t base = 0;
    dl_iterate_phdr(
        [](dl_phdr_info *info, size_t, void *to) {
            *(uintptr_t *)to = info->dlpi_addr;
            return 1; /* the first is the program */
        },
        &base);
    FILE *f = fopen("/proc/self/exe", "rb");
    if (!f)
        return names;
    fseek(f, 0, SEEK_END);
    long size = ftell(f);
    rewind(f);
    char *d = (char *)malloc((size_t)size); /* never freed: the map points into it */
    bool whole = fread(d, 1, (size_t)size, f) == (size_t)size;
    fclose(f);
    const Elf64_Ehdr *head = (const Elf64_Ehdr *)d;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(d + head->e_shoff);
    for (int i = 0; whole && i < head->e_shnum; i++) {
        if (sections[i].sh_type != SHT_SYMTAB)
            continue;
        const Elf64_Sym *syms = (const Elf64_Sym *)(d + sections[i].sh_offset);
        const char *text = d + sections[sections[i].sh_link].sh_offset;
        for (size_t j = 0; j < sections[i].sh_size / sizeof *syms; j++)
            if (ELF64_ST_TYPE(syms[j].st_info) == STT_FUNC && syms[j].st_value)
                names[base + syms[j].st_value] = text + syms[j].st_name;
    }
    return names;
}

cudaError_t cudaFuncGetName(const char **name, const void *fn)
{
    static const std::map<uintptr_t, const char *> names = read_symbols();
    auto at = names.find((uintptr_t)fn);
    *name = at == names.end() ? NULL : at->second;
    return *name ? 0 : cudaErrorMemoryAllocation;
}

/* Faults */

static const char *const call_names[SIM_CALLS] = SIM_CALL_NAMES;

static struct sim_faults *map_faults()
{
    const char *path = getenv("SIM_FAULTS");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return NULL;
    void *p = mmap(NULL, sizeof(struct sim_faults), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return p == MAP_FAILED ? NULL : (struct sim_faults *)p;
}

static std::atomic<bool> device_lost;
static thread_local cudaError_t last_error;

bool sim_call_fails(enum sim_call call)
{
    static struct sim_faults *const f = map_faults();
    if (!f)
        return false;
    int n = ++f->count[call], all = ++f->count[SIM_ANY], at = f->at;
    bool now = at && (f->call == SIM_ANY ? all == at : f->call == call && n == at);
    if (now)
        f->n_failed++;
    if (now && f->lost)
        device_lost = true;
    if (now && getenv("SIM_FAULTS_SAY"))
        fprintf(stderr, "cudasim: %s %d fails\n", call_names[call], n);
    return now || device_lost;
}

void sim_get_stuck()
{
    device_stuck = true;
}

/* The result of a call that may fail. */
static cudaError_t called(enum sim_call call)
{
    if (!sim_call_fails(call))
        return cudaSuccess;
    bool memory = !device_lost && (call == SIM_ALLOC || call == SIM_HOST);
    return last_error = memory ? cudaErrorMemoryAllocation : cudaErrorUnknown;
}
#define MAY_FAIL(call)                                                                             \
    do {                                                                                           \
        cudaError_t e_ = called(call);                                                             \
        if (e_ != cudaSuccess)                                                                     \
            return e_;                                                                             \
    } while (0)

cudaError_t sim_launch(cudaStream_t s, dim3 grid, dim3 block, size_t shared,
                       std::function<void()> fn)
{
    if (sim_dry() && grid.x * grid.y * grid.z * block.x > 32)
        return cudaSuccess;
    MAY_FAIL(SIM_LAUNCH);
    enqueue(s, [=] { run_grid(grid, block, shared, fn); });
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return 0;
}
cudaError_t cudaGetDeviceCount(int *n)
{
    MAY_FAIL(SIM_DEVICE);
    const char *gpus = getenv("SIM_GPUS");
    *n = gpus ? atoi(gpus) : 1;
    return 0;
}
cudaError_t cudaSetDevice(int)
{
    MAY_FAIL(SIM_DEVICE);
    return 0;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device)
{
    MAY_FAIL(SIM_DEVICE);
    memset(p, 0, sizeof *p);
    p->uuid.bytes[0] = (char)(device + 1);
    snprintf(p->name, sizeof p->name, "simulated GPU");
    const char *sm = getenv("SIM_SM");
    int v = sm ? atoi(sm) : 90;
    p->major = v / 10;
    p->minor = v % 10;
    const char *sms = getenv("SIM_SMS");
    p->multiProcessorCount = sms ? atoi(sms) : 4;
    p->l2CacheSize = 1 << 20;
    p->totalGlobalMem = MEMORY;
    const char *limit = getenv("SIM_SHARED"); /* simulates a GPU with less shared memory */
    p->sharedMemPerBlockOptin = limit ? (size_t)atoi(limit) : MAX_SHARED;
    p->sharedMemPerMultiprocessor = p->sharedMemPerBlockOptin + 1024;
    return 0;
}
cudaError_t cudaMemGetInfo(size_t *free, size_t *total)
{
    MAY_FAIL(SIM_DEVICE);
    *total = MEMORY;
    *free = MEMORY - device_bytes;
    return 0;
}
static cudaError_t allocate(void **p, size_t bytes)
{
    if (bytes > (size_t)1 << 36)
        return cudaErrorMemoryAllocation;
    if (posix_memalign(p, 256, bytes ? bytes : 1))
        return cudaErrorMemoryAllocation;
    memset(*p, 0xff, bytes);
    return 0;
}
cudaError_t cudaMalloc(void **p, size_t bytes)
{
    *p = NULL;
    MAY_FAIL(SIM_ALLOC);
    cudaError_t e = allocate(p, bytes);
    if (*p)
        device_bytes += malloc_usable_size(*p);
    return e;
}
cudaError_t cudaFree(void *p)
{
    if (p)
        device_bytes -= malloc_usable_size(p);
    free(p); /* also if it fails: what a lost device held is gone */
    return device_lost ? last_error = cudaErrorUnknown : cudaSuccess;
}
/* Host memory is the device's already. */
cudaError_t cudaHostRegister(void *, size_t, unsigned)
{
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *)
{
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned)
{
    *p = NULL;
    MAY_FAIL(SIM_HOST);
    return allocate(p, bytes);
}
cudaError_t cudaFreeHost(void *p)
{
    free(p);
    return 0;
}
cudaError_t cudaHostGetDevicePointer(void **d, void *h, unsigned)
{
    *d = NULL;
    MAY_FAIL(SIM_HOST);
    *d = h;
    return 0;
}
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, cudaMemcpyKind, cudaStream_t st)
{
    MAY_FAIL(SIM_COPY);
    enqueue(st, [=] { memcpy(d, s, n); });
    return 0;
}
cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t st)
{
    MAY_FAIL(SIM_COPY);
    enqueue(st, [=] { memset(d, v, n); });
    return 0;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned)
{
    MAY_FAIL(SIM_EVENT);
    *s = new sim_stream();
    return 0;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int)
{
    return cudaStreamCreateWithFlags(s, flags);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *lowest, int *highest)
{
    *lowest = 0;
    *highest = -5;
    return 0;
}
cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    delete s;
    return 0;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    MAY_FAIL(SIM_SYNC);
    if (s && s->capture)
        die("a synchronisation inside a captured step");
    catch_up(s);
    return 0;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned)
{
    MAY_FAIL(SIM_EVENT);
    if (s->capture)
        die("another stream's event inside a captured step");
    if (e->on && e->on->late)
        catch_up(e->on);
    else if (e->on != s)
        s->late = true;
    return 0;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, int)
{
    MAY_FAIL(SIM_GRAPH);
    s->capture = new sim_graph();
    return 0;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g)
{
    *g = NULL;
    if (sim_call_fails(SIM_GRAPH)) {
        delete s->capture;
        s->capture = NULL;
        return last_error = cudaErrorUnknown;
    }
    *g = s->capture;
    s->capture = NULL;
    return 0;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long)
{
    MAY_FAIL(SIM_GRAPH);
    *e = new sim_graph(*g);
    return 0;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t)
{
    MAY_FAIL(SIM_GRAPH);
    for (auto &fn : e->nodes)
        if (!device_stuck)
            fn();
    return 0;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g)
{
    delete g;
    return 0;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e)
{
    delete e;
    return 0;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned)
{
    MAY_FAIL(SIM_EVENT);
    *e = new sim_event();
    return 0;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    MAY_FAIL(SIM_EVENT);
    e->on = s;
    return 0;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    MAY_FAIL(SIM_SYNC);
    catch_up(e->on);
    return 0;
}
cudaError_t cudaEventQuery(cudaEvent_t e)
{
    MAY_FAIL(SIM_SYNC);
    if (device_stuck)
        return cudaErrorNotReady;
    catch_up(e->on);
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t, cudaEvent_t)
{
    MAY_FAIL(SIM_EVENT);
    *ms = 0;
    return 0;
}
cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    delete e;
    return 0;
}
cudaError_t cudaGetLastError()
{
    cudaError_t e = device_lost ? (cudaError_t)cudaErrorUnknown : last_error;
    last_error = cudaSuccess;
    return e;
}
const char *cudaGetErrorString(cudaError_t e)
{
    return e ? "simulated failure" : "no error";
}
const char *cudaGetErrorName(cudaError_t e)
{
    return e ? "simFailure" : "simSuccess";
}

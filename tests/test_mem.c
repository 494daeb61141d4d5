/* Running out of memory: jobs that are given up leave nothing behind, the reserve helps out once, and
 * without either the process ends with one line. malloc and its like fail on demand (the Makefile
 * wraps them). */
#include "base/buf.h"
#include "base/mem.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static long until_failure = -1; /* allocations that still work; -1 = all */
static long n_live, n_asked;

static bool fails(void)
{
    n_asked++;
    return until_failure >= 0 && until_failure-- == 0;
}

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
void __real_free(void *p);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t n);
void __wrap_free(void *p);

void *__wrap_malloc(size_t n)
{
    if (fails())
        return NULL;
    n_live++;
    return __real_malloc(n);
}

void *__wrap_calloc(size_t n, size_t size)
{
    if (fails())
        return NULL;
    n_live++;
    return __real_calloc(n, size);
}

void *__wrap_realloc(void *p, size_t n)
{
    return fails() ? NULL : __real_realloc(p, n);
}

void __wrap_free(void *p)
{
    n_live -= p != NULL;
    __real_free(p);
}

/* Allocates in every way, frees some of it, and leaves a list behind. */
struct node {
    struct node *next;
    char *text;
};
static struct node *list;

static void work(void *arg)
{
    int n = *(int *)arg;
    list = NULL;
    for (int i = 0; i < n; i++) {
        struct node *x = mem_zalloc(1, sizeof *x);
        struct buf b = {0};
        for (int k = 0; k < i % 50; k++)
            buf_addf(&b, "%d, %s", k, "and so on and on");
        x->text = buf_take(&b);
        char *more = mem_strdup(x->text);
        mem_free(more);
        x->next = list;
        list = x;
        if (i % 3 == 0) { /* not in the order in which they came */
            struct node *gone = list->next;
            if (gone) {
                list->next = gone->next;
                mem_free(gone->text);
                mem_free(gone);
            }
        }
    }
}

static void clear(void)
{
    for (struct node *x = list, *next; x; x = next) {
        next = x->next;
        mem_free(x->text);
        mem_free(x);
    }
    list = NULL;
}

static void test_job(void **state)
{
    (void)state;
    int n = 300;
    long before = n_live;
    n_asked = 0;
    assert_true(mem_try(work, &n));
    long all = n_asked;
    assert_true(all > 1000);
    clear(); /* what a job leaves is the caller's */
    assert_int_equal(n_live, before);
    for (long k = 0; k < all; k++) {
        until_failure = k;
        assert_false(mem_try(work, &n));
        assert_int_equal(until_failure, -1);
        assert_int_equal(n_live, before);
    }
    assert_true(mem_try(work, &n));
    clear();
    assert_int_equal(n_live, before);
}

static void outer(void *arg)
{
    char *p = mem_alloc(10);
    assert_true(mem_try(work, arg)); /* part of this job: does not come back if it fails */
    mem_free(p);
}

static void test_nested(void **state)
{
    (void)state;
    int n = 20;
    long before = n_live;
    assert_true(mem_try(outer, &n));
    clear();
    until_failure = 30;
    assert_false(mem_try(outer, &n));
    assert_int_equal(n_live, before);
}

/* What a child does with its memory; its exit code, what it wrote to stderr counted in lines. */
static int child(void (*fn)(void), int *lines)
{
    int fd[2], status;
    assert_int_equal(pipe(fd), 0);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(fd[1], 2);
        fn();
        _exit(0);
    }
    close(fd[1]);
    char text[1024];
    *lines = 0;
    for (ssize_t n; (n = read(fd[0], text, sizeof text)) > 0;)
        for (ssize_t i = 0; i < n; i++)
            *lines += text[i] == '\n';
    close(fd[0]);
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void end_without_reserve(void)
{
    until_failure = 0;
    mem_alloc(10);
}

static void live_with_reserve(void)
{
    int n = 20;
    mem_reserve();
    until_failure = 0;
    memset(mem_alloc(10), 1, 10); /* the reserve went */
    if (!mem_try(work, &n))
        _exit(2); /* memory is back, so is the reserve */
    until_failure = 0;
    memset(mem_zalloc(10, 10), 1, 100);
}

static void ask(void)
{
    until_failure = 0;
    if (mem_ask((size_t)1 << 20))
        _exit(3);
    char *p = mem_ask(100);
    until_failure = 0;
    if (!p || mem_ask_again(p, 1 << 20))
        _exit(4);
    p[99] = 1; /* still there */
    mem_free(p);
}

static void test_process(void **state)
{
    (void)state;
    int lines;
    assert_int_equal(child(end_without_reserve, &lines), 1);
    assert_int_equal(lines, 1);
    assert_int_equal(child(live_with_reserve, &lines), 0);
    assert_int_equal(lines, 0);
    assert_int_equal(child(ask, &lines), 0);
    assert_int_equal(lines, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_job),
        cmocka_unit_test(test_nested),
        cmocka_unit_test(test_process),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

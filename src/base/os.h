/*
 * What C does not have and not every Unix has, macOS among them, each call once. All of it is in os.c, so a port to another
 * system is one file beside that. cpu.c and sysmem.c read Linux's files of limits; elsewhere there are none, which means no limit.
 */
#ifndef STEEL_BASE_OS_H
#define STEEL_BASE_OS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>

/* Wakes a thread in poll(): a descriptor that is readable from os_wake to os_woken. Any thread may wake. */
int os_wake_fd(void); /* -1: none is left */
void os_wake(int fd);
void os_woken(int fd);

bool os_random(void *to, size_t n); /* n <= 256; false: the system has none */

/* Sleeps while *word is `seen`, or until os_wake_all. May return early. */
void os_sleep_while(_Atomic uint32_t *word, uint32_t seen);
void os_wake_all(_Atomic uint32_t *word);

int os_cpus(void); /* CPUs this process may run on */
/* The same as a set, bit by bit (n_words of 64); false: it is not known. */
bool os_cpu_set(uint64_t *bits, int n_words);
void os_cpu_model(char *out, size_t size);

void os_name_thread(const char *name); /* this thread; at most 15 characters */
/* Naps of this thread, and of threads that it creates from here on, end on time. */
void os_exact_naps(void);
/* This thread, and threads that it creates from here on, yield to others: beside a busy one they get a quarter of a core.
 * It cannot be undone. */
void os_background(void);
/* Requests a scheduler slice for this thread: with a short one it preempts others when it wakes. Its share of the core
 * stays the same. A request only: Linux before 6.12 ignores it. */
void os_short_slice(uint64_t ns);

/* Ends the process and its threads at once, also in a signal handler. Not _exit, which sanitizers intercept to report the
 * threads that still run as leaks. */
_Noreturn void os_exit(int status);
void os_end_with_parent(int sig); /* this process gets `sig` when its parent ends */
/* The path of this program; "" = unknown. */
void os_program(char *out, size_t size);
/* Becomes this program anew, with other arguments. Returns only where that fails. */
void os_run_self(char **argv);
/* Names the network namespace: two processes with the same name reach each other at 127.0.0.1. */
void os_network_name(char *out, size_t size);

/* Opens the file of fd once more, for reads that bypass the page cache: offset, length and memory are multiples of 4096.
 * -1: the system or the file system cannot. */
int os_open_direct(int fd);
/* Reserves blocks of a file. False with errno. */
bool os_reserve_file(int fd, off_t bytes);

/* A file's pages in memory: it will be read from its start to its end; a range of it will not be read again. */
void os_read_in_order(int fd);
void os_forget_range(int fd, off_t from, off_t bytes);
struct timespec os_file_time(const struct stat *st); /* of the last change */

/* Descriptors that programs started from here do not inherit. -1 or false with errno. */
int os_socket(int family, int type, int protocol, bool blocks);
int os_accept(int listener); /* the connection does not block */
bool os_pipe(int ends[2]);
/* send() without a signal where the peer is gone. waits: for room in the socket's buffer, if the socket
 * blocks. */
ssize_t os_send(int fd, const void *data, size_t n, bool waits);
ssize_t os_send_parts(int fd, struct iovec *parts, int n); /* does not wait */
/* A peer that is gone is found after idle_s seconds of silence and `count` questions, interval_s apart. */
void os_keep_alive(int fd, int idle_s, int interval_s, int count);

/* A condition whose waits end by the clock of clock_ns (base/clock.h). */
void os_cond_init(pthread_cond_t *c);
int os_cond_wait_until(pthread_cond_t *c, pthread_mutex_t *m,
                       int64_t until_ns); /* as pthread_cond_timedwait */

/* qsort with a last argument for the comparison. */
void os_sort(void *list, size_t n, size_t size, int (*compare)(const void *, const void *, void *),
             void *with);
void os_sincos(double x, double *sine, double *cosine);

/* Freed blocks of at least a quarter of a megabyte return to the system at once. n_arenas 0: as many as there are. */
void os_bound_heap(int n_arenas);
void os_trim_heap(void);

#endif

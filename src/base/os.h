/*
 * What neither C nor POSIX has, each call once. All of it that Linux alone has is in os.c, so a port to another system is
 * one file beside that. cpu.c and sysmem.c read Linux's files of limits; elsewhere there are none, which means no limit.
 */
#ifndef STEEL_BASE_OS_H
#define STEEL_BASE_OS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Wakes a thread in poll(): a descriptor that is readable from os_wake to os_woken. Any thread may wake. */
int os_wake_fd(void); /* -1: none is left */
void os_wake(int fd);
void os_woken(int fd);

bool os_random(void *to, size_t n); /* n <= 256; false: the system has none */

/* Sleeps while *word is `seen`, or until os_wake_all. May return early. */
void os_sleep_while(_Atomic uint32_t *word, uint32_t seen);
void os_wake_all(_Atomic uint32_t *word);

int os_cpus(void); /* CPUs this process may run on */
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

/* Freed blocks of at least a quarter of a megabyte return to the system at once. n_arenas 0: as many as there are. */
void os_bound_heap(int n_arenas);
void os_trim_heap(void);

#endif

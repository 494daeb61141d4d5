/*
 * The server's log on stderr, as text or JSON. A line is a message and key-value pairs. Any thread may
 * log.
 *
 * Between log_start and log_stop a thread writes the lines from a ring of LOG_RING bytes, so that a
 * blocked stderr blocks only that thread. Lines are dropped and counted while the ring is full, and a
 * later line logs their number.
 */
#ifndef STEEL_SERVER_LOG_H
#define STEEL_SERVER_LOG_H

#include <stdbool.h>
#include <stdint.h>

enum { LOG_RING = 256 << 10 };

enum log_level { LOG_DEBUG, LOG_INFO, LOG_WARN, LOG_ERROR };

struct log_field {
    const char *key;
    const char *text; /* NULL: the number */
    double number;
};
#define LOG_TEXT(k, v) ((struct log_field){.key = (k), .text = (v)})
#define LOG_NUM(k, v)  ((struct log_field){.key = (k), .number = (double)(v)})

void log_setup(enum log_level least, bool json);
void log_start(void); /* if no thread can be started, callers write their lines */
void log_stop(void);  /* waits a short time for the ring to drain */
uint64_t log_dropped(void);
void log_fields(enum log_level level, const char *msg, const struct log_field *f, int n);
#define log_line(level, msg, ...)                                                                  \
    log_fields(level, msg, (struct log_field[]){__VA_ARGS__},                                      \
               (int)(sizeof((struct log_field[]){__VA_ARGS__}) / sizeof(struct log_field)))

#endif

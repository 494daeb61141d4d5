/*
 * The server's log: one line per fact on stderr, as text for people or as JSON for machines. A line
 * is a message and key-value pairs. Any thread.
 *
 * Between log_start and log_stop lines go through a ring of LOG_RING bytes to a thread that writes
 * them, so that a stderr nobody reads blocks that thread and nobody else. What finds the ring full is
 * dropped and counted; the log says how many lines are missing once it flows again.
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
void log_start(void); /* without a thread for it, lines are written by those who log */
void log_stop(void);  /* waits for the ring to empty, but not for long */
uint64_t log_dropped(void);
void log_fields(enum log_level level, const char *msg, const struct log_field *f, int n);
#define log_line(level, msg, ...)                                                                  \
    log_fields(level, msg, (struct log_field[]){__VA_ARGS__},                                      \
               (int)(sizeof((struct log_field[]){__VA_ARGS__}) / sizeof(struct log_field)))

#endif

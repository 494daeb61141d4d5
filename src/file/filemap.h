/*
 * Read-only maps of files that may shrink or fail while mapped. Touching a lost page raises SIGBUS,
 * which would end the program. Here the page becomes zeros and the map is marked damaged, which its
 * owner checks after reading. The first map installs the handler. A SIGBUS outside these maps goes
 * to the previous handler.
 */
#ifndef STEEL_FILE_FILEMAP_H
#define STEEL_FILE_FILEMAP_H

#include <stdbool.h>
#include <stddef.h>

/* Watches `bytes` of fd mapped at p, until filemap_unwatch (before munmap and close). Returns a
 * number, or -1 if the table is full and the map is not watched. */
int filemap_watch(const void *p, size_t bytes, int fd);
void filemap_unwatch(int watch);
bool filemap_is_damaged(int watch); /* a lost page was read */

#endif

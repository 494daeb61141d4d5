/*
 * Files mapped for reading that may shrink or fail while they are mapped. Touching what is no longer
 * there raises SIGBUS, which would end the program; here it becomes zeros and a note on the map, for
 * its owner to ask about once it has read. Installs the handler with the first map; a SIGBUS that is
 * not about one of these maps does what it would have done.
 */
#ifndef STEEL_FILE_FILEMAP_H
#define STEEL_FILE_FILEMAP_H

#include <stdbool.h>
#include <stddef.h>

/* Watches bytes of fd that are mapped at p, until filemap_unwatch (before munmap and close). Returns
 * its number, or -1: too many are watched, this one is not. */
int filemap_watch(const void *p, size_t bytes, int fd);
void filemap_unwatch(int watch);
bool filemap_is_damaged(int watch); /* something was read that was not there */

#endif

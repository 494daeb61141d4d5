/* See input.h. */
#include "base/input.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool is_inherited(const char *path)
{
    static const char *const places[] = {"/dev/stdin", "/dev/fd/", "/proc/self/fd/"};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        if (!strncmp(path, places[i], strlen(places[i])))
            return true;
    return false;
}

FILE *input_open(const char *path, struct error *err)
{
    struct stat st;
    /* Without O_NONBLOCK, opening a pipe that nobody writes would wait already. */
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st)) {
        error_set(err, "%s: %s", path, strerror(errno));
        if (fd >= 0)
            close(fd);
        return NULL;
    }
    if (S_ISFIFO(st.st_mode) && !is_inherited(path)) {
        error_set(err, "%s: it is a named pipe, not a file", path);
        close(fd);
        return NULL;
    }
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
    FILE *f = fdopen(fd, "rb");
    if (!f) {
        error_set(err, "%s: %s", path, strerror(errno));
        close(fd);
    }
    return f;
}

/* Loads libcurl. */
#include "base/curl.h"

#include <dlfcn.h>
#include <string.h>

struct curl_functions curl;

bool curl_load(const char *what, struct error *err)
{
    static const char *const names[] = {"libcurl.so.4", "libcurl-gnutls.so.4"};
    static bool loaded;
    const struct {
        const char *name;
        void *to;
    } symbols[] = {{"curl_global_init", &curl.global_init},
                   {"curl_easy_init", &curl.easy_init},
                   {"curl_easy_cleanup", &curl.easy_cleanup},
                   {"curl_easy_setopt", &curl.easy_setopt},
                   {"curl_easy_getinfo", &curl.easy_getinfo},
                   {"curl_easy_perform", &curl.easy_perform},
                   {"curl_easy_strerror", &curl.easy_strerror},
                   {"curl_slist_append", &curl.slist_append},
                   {"curl_slist_free_all", &curl.slist_free_all},
                   {"curl_multi_init", &curl.multi_init},
                   {"curl_multi_cleanup", &curl.multi_cleanup},
                   {"curl_multi_add_handle", &curl.multi_add_handle},
                   {"curl_multi_remove_handle", &curl.multi_remove_handle},
                   {"curl_multi_perform", &curl.multi_perform},
                   {"curl_multi_poll", &curl.multi_poll},
                   {"curl_multi_info_read", &curl.multi_info_read}};
    if (loaded)
        return true;
    void *lib = NULL;
    for (size_t i = 0; !lib && i < sizeof names / sizeof *names; i++)
        lib = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!lib)
        return error_set(
            err, "%s libcurl, which is not installed here (Debian: apt install libcurl4)", what);
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *at = dlsym(lib, symbols[i].name);
        if (!at)
            return error_set(err, "the installed libcurl is too old: it has no %s",
                             symbols[i].name);
        memcpy(symbols[i].to, &at, sizeof at);
    }
    if (curl.global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK)
        return error_set(err, "libcurl cannot be initialised");
    loaded = true;
    return true;
}

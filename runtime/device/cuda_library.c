// SPDX-License-Identifier: Apache-2.0
#include "runtime/device/cuda_library.h"

#include <dlfcn.h>
#include <glob.h>
#include <stdio.h>
#include <string.h>

#include "runtime/device/cuda_places.h"

static nd_status resolve(const char *what, void *handle, const nd_cuda_symbol *symbols,
                         size_t count)
{
    for (size_t i = 0; i < count; i++) {
        void *symbol = dlsym(handle, symbols[i].name);
        if (!symbol) {
            return nd_fail(ND_ERR_CONFIG,
                           "%s has no %s: it is older than this program needs (%s); install the "
                           "version that docs/cuda.md names",
                           what, symbols[i].name, dlerror());
        }
        *symbols[i].to = symbol;
    }
    return ND_OK;
}

/* The first in the places that loads, and its path. */
static void *load_from_places(const char *name, int flags, char path[PATH_MAX])
{
    char program[PATH_MAX];
    nd_cuda_places places = nd_cuda_places_here(program);
    void *handle = NULL;
    for (int n = 0; !handle && nd_cuda_places_find(&places, name, n, path); n++) {
        handle = dlopen(path, flags);
    }
    return handle;
}

static void add_reason(char *reasons, size_t size)
{
    const char *reason = dlerror();
    size_t used = strlen(reasons);
    snprintf(reasons + used, size - used, "%s%s", used ? "; " : "", reason ? reason : "");
}

nd_status nd_cuda_library_load(const char *what, const char *const *sonames, bool everywhere,
                               void **handle)
{
    const int flags = RTLD_NOW | (everywhere ? RTLD_GLOBAL : RTLD_LOCAL);
    char reasons[512] = "", path[PATH_MAX];
    void *found = NULL;
    for (int i = 0; sonames[i] && !found; i++) {
        found = dlopen(sonames[i], flags);
        if (!found) {
            add_reason(reasons, sizeof reasons);
            found = load_from_places(sonames[i], flags, path);
        }
    }
    if (!found) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s is needed for device cuda and cannot be opened: %s; install it, name "
                       "its folder in LD_LIBRARY_PATH, or the toolkit that has it in CUDA_HOME",
                       what, reasons);
    }
    *handle = found;
    return ND_OK;
}

nd_status nd_cuda_library_open(const char *what, const char *const *sonames,
                               const nd_cuda_symbol *symbols, size_t count)
{
    void *handle = NULL;
    ND_TRY(nd_cuda_library_load(what, sonames, false, &handle));
    return resolve(what, handle, symbols, count);
}

static void load_beside(char path[PATH_MAX], const char *pattern, int flags)
{
    size_t folder = (size_t)(strrchr(path, '/') + 1 - path);
    glob_t files = {0};
    if (snprintf(path + folder, PATH_MAX - folder, "%s", pattern) < (int)(PATH_MAX - folder) &&
        glob(path, 0, NULL, &files) == 0) {
        for (size_t i = 0; i < files.gl_pathc; i++) {
            (void)dlopen(files.gl_pathv[i], flags);
        }
    }
    globfree(&files);
}

void nd_cuda_library_preload(const char *name, const char *beside)
{
    const int flags = RTLD_NOW | RTLD_GLOBAL;
    char path[PATH_MAX];
    if (!dlopen(name, flags) && load_from_places(name, flags, path) && beside) {
        load_beside(path, beside, flags);
    }
}

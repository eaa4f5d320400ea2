// SPDX-License-Identifier: Apache-2.0
#include "runtime/device/cuda_library.h"

#include <dlfcn.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/device/cuda_toolkit.h"

/* A search that ends at the n-th file. */
typedef struct search {
    const char *name;
    int left; /* files that are still to be passed over */
    char *found;
} search;

/* A folder's own name may hold characters that mean something in a pattern. */
static bool escape(const char *folder, size_t length, char out[PATH_MAX])
{
    size_t used = 0;
    for (size_t i = 0; i < length; i++) {
        if (used + 3 > PATH_MAX) {
            return false;
        }
        if (strchr("*?[]\\", folder[i])) {
            out[used++] = '\\';
        }
        out[used++] = folder[i];
    }
    out[used] = '\0';
    return true;
}

/* Looks for FOLDER/within/NAME, where `within` is a pattern; `length` characters of the folder. */
static bool look(search *s, const char *folder, size_t length, const char *within)
{
    char escaped[PATH_MAX], pattern[PATH_MAX];
    glob_t files = {0};
    bool done = false;
    if (length == 0 || !escape(folder, length, escaped) ||
        snprintf(pattern, sizeof pattern, "%s/%s/%s", escaped, within, s->name) >=
            (int)sizeof pattern) {
        return false;
    }
    if (glob(pattern, 0, NULL, &files) == 0) {
        for (size_t i = 0; i < files.gl_pathc && !done; i++) {
            done = s->left-- == 0 && strlen(files.gl_pathv[i]) < PATH_MAX;
            if (done) {
                strcpy(s->found, files.gl_pathv[i]);
            }
        }
    }
    globfree(&files);
    return done;
}

static bool look_in_toolkit(search *s, const char *root)
{
    static const char *const within[] = {"lib64", "lib", "targets/*/lib"};
    bool done = false;
    for (size_t i = 0; root && i < sizeof within / sizeof *within && !done; i++) {
        done = look(s, root, strlen(root), within[i]);
    }
    return done;
}

/* Debian calls the folder dist-packages. */
static bool is_packages(const char *folder, size_t length)
{
    static const char *const names[] = {"/site-packages", "/dist-packages"};
    bool is = false;
    for (int i = 0; i < 2; i++) {
        size_t size = strlen(names[i]);
        is = is || (length > size && strncmp(folder + length - size, names[i], size) == 0);
    }
    return is;
}

/* From the program's folder upwards, without the root of the file system. */
static bool look_in_environments(search *s, const char *program)
{
    bool done = false;
    for (size_t length = strlen(program); length > 0 && !done;) {
        while (length > 0 && program[length - 1] != '/') {
            length--;
        }
        length -= length > 0;
        done = is_packages(program, length)
                   ? look(s, program, length, "nvidia/*/lib")
                   : look(s, program, length, "lib/python3*/*-packages/nvidia/*/lib");
    }
    return done;
}

bool nd_cuda_places_find(const nd_cuda_places *places, const char *name, int n,
                         char found[PATH_MAX])
{
    search s = {name, n, found};
    return look_in_toolkit(&s, places->home) || look_in_toolkit(&s, places->path) ||
           look_in_environments(&s, places->program) || look_in_toolkit(&s, places->toolkit);
}

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
    ssize_t length = readlink("/proc/self/exe", program, PATH_MAX - 1);
    program[length > 0 ? length : 0] = '\0';
    const nd_cuda_places places = {.home = getenv("CUDA_HOME"),
                                   .path = getenv("CUDA_PATH"),
                                   .program = program,
                                   .toolkit = ND_BUILT_TOOLKIT};
    void *handle = NULL;
    for (int n = 0; !handle && nd_cuda_places_find(&places, name, n, path); n++) {
        handle = dlopen(path, flags);
    }
    return handle;
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
            const char *reason = dlerror();
            size_t used = strlen(reasons);
            snprintf(reasons + used, sizeof reasons - used, "%s%s", used ? "; " : "",
                     reason ? reason : "");
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

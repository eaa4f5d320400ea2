// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/ucx/ucx.h"

#include <dlfcn.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/library.h"

ucx_library nd_ucx;

/* ND_ERR_CONFIG with what to install. The library stays open: its own threads may run. */
nd_status nd_ucx_load(void)
{
    ucx_library library;
    void *handle, *found;
    if (nd_ucx.ucp_get_version_string) {
        return ND_OK;
    }
    /* While it is loaded it would take the handlers of this program's signals, and wait for a
     * socket in /tmp, which any user can make, to show its state there. */
    setenv("UCX_HANDLE_ERRORS", "none", 1);
    setenv("UCX_DEBUG_SIGNO", "0", 1);
    setenv("UCX_VFS_ENABLE", "n", 1);
    /* Its thread would otherwise reserve 64 MiB of addresses (ulimit -v) for its few bytes. */
    mallopt(M_ARENA_MAX, 1);
    /* Its plugins look for its symbols among the global ones. */
    ND_TRY(nd_library_open("libucp.so.0", RTLD_NOW | RTLD_GLOBAL, &handle));
    if (!handle) {
        const char *why = dlerror();
        return nd_fail(ND_ERR_CONFIG,
                       "CPU workers talk to each other over UCX, which cannot be opened: %s; "
                       "install it (Debian: libucx0) on every host, or run one worker",
                       why ? why : "libucp.so.0 is missing");
    }
#define FIND(name)                                                                                 \
    found = dlsym(handle, #name);                                                                  \
    if (!found) {                                                                                  \
        return nd_fail(ND_ERR_CONFIG, "libucp.so.0 has no function %s; install UCX 1.13 or newer", \
                       #name);                                                                     \
    }                                                                                              \
    memcpy(&library.name, &found,                                                                  \
           sizeof found); /* a function's address, which C does not convert */
    ND_UCX_FUNCTIONS(FIND)
#undef FIND
    nd_ucx = library;
    return ND_OK;
}

const char *nd_transport_ucx_version(void)
{
    if (nd_ucx_load() != ND_OK) {
        nd_error_clear();
        return "not installed";
    }
    return nd_ucx.ucp_get_version_string();
}

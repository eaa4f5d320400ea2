// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/ucx/ucx.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/log.h"
#include "runtime/comm/comm.h"

/*
 * dlopen with the working directory "/", since a library may read files of the working directory
 * while it is loaded, and such a file may come with data or a model that somebody else made. The
 * directory is the process's own again afterwards: no other thread may use a relative path
 * meanwhile. ND_OK with *out NULL where dlopen fails, whose reason
 * dlerror has. ND_ERR_IO when the working directory cannot be left or entered again.
 */
static nd_status open_apart(const char *name, int flags, void **out)
{
    int here = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    /* EACCES: this user may not search the working directory, and neither can a library. */
    bool leave = here >= 0 || errno != EACCES;
    if (leave && (here < 0 || chdir("/") != 0)) {
        nd_status status = nd_fail(ND_ERR_IO,
                                   "%s is not opened: the working directory cannot be "
                                   "left: %s",
                                   name, strerror(errno));
        if (here >= 0) {
            close(here);
        }
        return status;
    }
    *out = dlopen(name, flags);
    if (leave && fchdir(here) != 0) {
        nd_status status = nd_fail(ND_ERR_IO, "the working directory cannot be entered again: %s",
                                   strerror(errno));
        close(here);
        return status;
    }
    if (leave) {
        close(here);
    }
    return ND_OK;
}

ucx_library nd_ucx;

/* The program sets these; those without a value later, or in UCX's configuration (ucx.c). While UCX
 * is loaded it would take the handlers of this program's signals, and wait for a socket in /tmp,
 * which any user can make, to show its state there. */
static const char *const own_variables[][2] = {
    {"UCX_TLS", NULL},
    {"UCX_POSIX_DIR", NULL},
    {"UCX_ADAPTIVE_PROGRESS", NULL},
    {"UCX_HANDLE_ERRORS", "none"},
    {"UCX_DEBUG_SIGNO", "0"},
    {"UCX_VFS_ENABLE", "n"},
};

static void set_own_variables(bool warn)
{
    char set[160] = "";
    for (size_t i = 0; i < sizeof own_variables / sizeof *own_variables; i++) {
        const char *const *variable = own_variables[i];
        if (getenv(variable[0])) {
            snprintf(set + strlen(set), sizeof set - strlen(set), " %s", variable[0]);
        }
        if (variable[1]) {
            setenv(variable[0], variable[1], 1);
        }
    }
    if (warn && set[0]) {
        nd_log_warning("the program replaces the values of these variables, which have no "
                       "effect:%s; unset them",
                       set);
    }
}

/* UCX's own line about a copy from the memory of a rank that has ended is not printed: the worker's
 * message names that rank (guard, ucx.c). */
static ucs_log_func_rc_t leave_out_ended(const char *file, unsigned line, const char *function,
                                         ucs_log_level_t level,
                                         const ucs_log_component_config_t *component,
                                         const char *format, va_list arguments)
{
    char text[256];
    vsnprintf(text, sizeof text, format, arguments);
    return strncmp(text, "process_vm_", strlen("process_vm_")) == 0 && strstr(text, strerror(ESRCH))
               ? UCS_LOG_FUNC_RC_STOP
               : UCS_LOG_FUNC_RC_CONTINUE;
}

/* ND_ERR_CONFIG with what to install. The library stays open: its own threads may run. */
nd_status nd_ucx_load(bool warn)
{
    ucx_library library;
    void *handle = NULL, *found;
    if (nd_ucx.ucp_get_version_string) {
        return ND_OK;
    }
    set_own_variables(warn);
    /* Its thread would otherwise reserve 64 MiB of addresses (ulimit -v) for its few bytes. */
    mallopt(M_ARENA_MAX, 1);
    /* Its plugins look for its symbols among the global ones. */
    ND_TRY(open_apart("libucp.so.0", RTLD_NOW | RTLD_GLOBAL, &handle));
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
    nd_ucx.ucs_log_push_handler(leave_out_ended);
    return ND_OK;
}

const char *nd_transport_ucx_version(bool open)
{
    if (!open && !nd_ucx.ucp_get_version_string) {
        return "not used";
    }
    if (nd_ucx_load(false) != ND_OK) {
        nd_error_clear();
        return "not installed";
    }
    return nd_ucx.ucp_get_version_string();
}

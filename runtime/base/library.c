// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/library.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

nd_status nd_library_open(const char *name, int flags, void **out)
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

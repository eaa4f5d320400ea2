// SPDX-License-Identifier: Apache-2.0
/*
 * Preloaded into workers: rank ND_POISON_RANK's matrix product number ND_POISON_CALL, counted from
 * 1 in its process, gets a NaN as its first element, or, with ND_POISON_BYTE, a number of four such
 * bytes. A fault that comes once, as of a bad board. ND_POISON_COMMAND is run right before it.
 */
#include <dlfcn.h>
#include <dnnl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef dnnl_status_t execute(const_dnnl_primitive_t, dnnl_stream_t, int, const dnnl_exec_arg_t *);

static long number(const char *name)
{
    const char *text = getenv(name);
    return text ? atol(text) : -1;
}

dnnl_status_t dnnl_primitive_execute(const_dnnl_primitive_t primitive, dnnl_stream_t stream,
                                     int count, const dnnl_exec_arg_t *args)
{
    static atomic_long calls;
    execute *real;
    *(void **)&real = dlsym(RTLD_NEXT, "dnnl_primitive_execute");
    dnnl_status_t status = real(primitive, stream, count, args);
    if (number("RANK") != number("ND_POISON_RANK") ||
        atomic_fetch_add(&calls, 1) + 1 != number("ND_POISON_CALL")) {
        return status;
    }
    const char *command = getenv("ND_POISON_COMMAND");
    if (command && system(command) != 0) {
        abort();
    }
    for (int i = 0; i < count; i++) {
        void *data = NULL;
        if (args[i].arg == DNNL_ARG_DST && !dnnl_memory_get_data_handle(args[i].memory, &data)) {
            long byte = number("ND_POISON_BYTE");
            memset(data, byte < 0 ? 0xff : (int)byte, 4); /* 0xff: NaN in BF16 and F32 */
        }
    }
    return status;
}

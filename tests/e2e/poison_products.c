// SPDX-License-Identifier: Apache-2.0
/*
 * Preloaded into workers: rank ND_POISON_RANK's matrix product number ND_POISON_CALL, counted from
 * 1 in its process, gets a NaN as its first element, or, with ND_POISON_BYTE, a number of four such
 * bytes. A fault that comes once, as of a bad board. ND_POISON_COMMAND is run right before it.
 *
 * ND_POISON_CALL may be a list, as 20n,35s,50d,61t,80k: a NaN, a number of four bytes 0x46, a NaN
 * behind the command, TERM, KILL. ND_POISON_COUNT names a file that gets the number of calls when
 * the process ends.
 */
#include <dlfcn.h>
#include <dnnl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef dnnl_status_t execute(const_dnnl_primitive_t, dnnl_stream_t, int, const dnnl_exec_arg_t *);

static atomic_long calls;

static long number(const char *name)
{
    const char *text = getenv(name);
    return text ? atol(text) : -1;
}

/* What the list has for a call: its letter, 'x' where there is none, 0 for another call. */
static char event_of(long call)
{
    const char *text = getenv("ND_POISON_CALL");
    while (text && *text) {
        char *end;
        if (strtol(text, &end, 10) == call) {
            return *end && *end != ',' ? *end : 'x';
        }
        text = strchr(text, ',');
        text = text ? text + 1 : NULL;
    }
    return 0;
}

__attribute__((destructor)) static void leave_count(void)
{
    const char *name = getenv("ND_POISON_COUNT");
    FILE *file = name && number("RANK") == number("ND_POISON_RANK") ? fopen(name, "w") : NULL;
    if (file) {
        fprintf(file, "%ld\n", atomic_load(&calls));
        fclose(file);
    }
}

dnnl_status_t dnnl_primitive_execute(const_dnnl_primitive_t primitive, dnnl_stream_t stream,
                                     int count, const dnnl_exec_arg_t *args)
{
    execute *real;
    *(void **)&real = dlsym(RTLD_NEXT, "dnnl_primitive_execute");
    dnnl_status_t status = real(primitive, stream, count, args);
    char event = 0;
    if (number("RANK") == number("ND_POISON_RANK")) {
        event = event_of(atomic_fetch_add(&calls, 1) + 1);
    }
    const char *command = event == 'x' || event == 'd' ? getenv("ND_POISON_COMMAND") : NULL;
    if (command && system(command) != 0) {
        abort();
    }
    if (event == 'k' || event == 't') {
        raise(event == 'k' ? SIGKILL : SIGTERM);
    }
    for (int i = 0; i < count && event && !strchr("kt", event); i++) {
        void *data = NULL;
        if (args[i].arg == DNNL_ARG_DST && !dnnl_memory_get_data_handle(args[i].memory, &data)) {
            long byte = event == 's' ? 0x46 : event == 'x' ? number("ND_POISON_BYTE") : -1;
            memset(data, byte < 0 ? 0xff : (int)byte, 4); /* 0xff: NaN in BF16 and F32 */
        }
    }
    return status;
}

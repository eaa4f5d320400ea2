// SPDX-License-Identifier: Apache-2.0
#include <ctype.h>
#include <omp.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/cpu/context.h"
#include "kernels/ops.h"

static const unsigned long long stack_bytes_max = 1ull << 47; /* more than can be addressed */

/* The stack that libgomp gives each thread by this variable, read as libgomp does: a number of KiB,
 * or of the unit behind it. 0: it is not set, or libgomp does not take it. */
static unsigned long long read_stack_bytes(const char *variable)
{
    const char *text = getenv(variable);
    char *end = NULL;
    unsigned long long number = text ? strtoull(text, &end, 10) : 0;
    int shift = 10;
    if (!text || end == text) {
        return 0;
    }
    end += strspn(end, " \t");
    if (*end) {
        static const char units[] = "bkmg";
        const char *unit = strchr(units, tolower((unsigned char)*end));
        if (!unit || end[1 + strspn(end + 1, " \t")] != '\0') {
            return 0;
        }
        shift = 10 * (int)(unit - units);
    }
    return number <= stack_bytes_max >> shift ? number << shift : stack_bytes_max;
}

int64_t nd_ops_cpu_stack_bytes(void)
{
    pthread_attr_t attributes;
    size_t bytes = 8 << 20;
    unsigned long long set = read_stack_bytes("OMP_STACKSIZE");
    set = set > 0 ? set : read_stack_bytes("GOMP_STACKSIZE");
    if ((int64_t)set >= sysconf(_SC_THREAD_STACK_MIN)) { /* libgomp passes over a smaller one */
        return (int64_t)set;
    }
    if (pthread_getattr_default_np(&attributes) == 0) {
        pthread_attr_getstacksize(&attributes, &bytes);
        pthread_attr_destroy(&attributes);
    }
    return (int64_t)bytes;
}

static void *wait_for(void *gate)
{
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

/* As many threads at once as the ops will have, with the stacks that libgomp will give its own.
 * sets: 1, ours, or 2, libgomp's too; each beside the calling thread. */
static nd_status try_threads(int wanted, int sets, pthread_t *threads)
{
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_attr_t attributes;
    nd_status status = ND_OK;
    const int count = sets * (wanted - 1);
    const size_t stack = (size_t)nd_ops_cpu_stack_bytes();
    int started = 0, code = 0;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, stack);
    pthread_mutex_lock(&gate);
    while (code == 0 && started < count) {
        code = pthread_create(&threads[started], &attributes, wait_for, &gate);
        started += code == 0;
    }
    if (code != 0) {
        status = nd_cpu_refuse_threads(wanted, started / sets + 1, code, stack);
    }
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
    }
    pthread_mutex_destroy(&gate);
    pthread_attr_destroy(&attributes);
    return status;
}

/* libgomp starts its threads in its first region, and keeps them. */
static void start_libgomp(int wanted)
{
    int running = 0;
    omp_set_num_threads(wanted);
#pragma omp parallel
    {
#pragma omp atomic
        running++; /* the compiler leaves out a region that does nothing */
    }
}

nd_status nd_ops_cpu_start_threads(nd_device *device, bool f32)
{
    int wanted = device->threads;
    pthread_t *threads = NULL;
    if (wanted == 1) {
        return ND_OK;
    }
    ND_TRY(nd_cpu_context_create(device));
    nd_cpu_context *context = device->native;
    const bool library = f32 || !context->gemm;
    ND_TRY(ND_ALLOC(2 * wanted, &threads));
    const nd_status status = try_threads(wanted, library ? 2 : 1, threads);
    free(threads);
    ND_TRY(status);
    ND_TRY(nd_team_start(context->team, (size_t)nd_ops_cpu_stack_bytes()));
    if (library) {
        start_libgomp(wanted);
    }
    return ND_OK;
}

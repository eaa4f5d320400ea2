// SPDX-License-Identifier: Apache-2.0
#include <omp.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/ops.h"
#include "runtime/base/process.h"

static void *wait_for(void *gate)
{
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

/* As many threads at once as the ops will have, or the error of the first that did not start. */
static int try_threads(pthread_t *threads, int count, int *started)
{
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    int code = 0;
    *started = 0;
    pthread_mutex_lock(&gate);
    while (code == 0 && *started < count) {
        code = pthread_create(&threads[*started], NULL, wait_for, &gate);
        *started += code == 0;
    }
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < *started; i++) {
        pthread_join(threads[i], NULL);
    }
    pthread_mutex_destroy(&gate);
    return code;
}

static nd_status fail_threads(int wanted, int started, int code)
{
    nd_memory_limit limit = nd_limits_read_memory();
    return nd_fail(ND_ERR_RESOURCE,
                   "a worker of %d threads cannot start more than %d here: %s (%s); use a smaller "
                   "launch.threads_per_worker, or raise that limit",
                   wanted, started, strerror(code),
                   limit.option ? limit.option : "ulimit -u, or pids.max of the control group");
}

nd_status nd_ops_cpu_start_threads(const nd_device *device)
{
    int wanted = device->threads, started = 0;
    pthread_t *threads = NULL;
    if (wanted == 1) {
        return ND_OK;
    }
    ND_TRY(ND_ALLOC(wanted, &threads));
    int code = try_threads(threads, wanted - 1, &started);
    free(threads);
    if (code != 0) {
        return fail_threads(wanted, started + 1, code); /* the calling thread is one */
    }
    omp_set_num_threads(wanted);
#pragma omp parallel
    {
    }
    return ND_OK;
}

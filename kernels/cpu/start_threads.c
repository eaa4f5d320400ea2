// SPDX-License-Identifier: Apache-2.0
#include <ctype.h>
#include <omp.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/cpu/context.h"
#include "kernels/ops.h"
#include "runtime/base/process.h"

static const unsigned long long stack_bytes_max = 1ull << 47; /* more than can be addressed */
static const size_t beside_stack = 1 << 20;

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

/* What forbade a thread. */
typedef struct thread_refusal {
    int started, code;     /* code 0: all have started */
    bool lacks_room;       /* for its stack; otherwise there are too many threads or processes */
    nd_memory_limit limit; /* at that moment */
} thread_refusal;

static bool has_room(size_t bytes)
{
    void *room = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (room == MAP_FAILED) {
        return false;
    }
    munmap(room, bytes);
    return true;
}

/* As many threads at once as the ops will have, with the stacks that libgomp will give its own. */
static thread_refusal try_threads(pthread_t *threads, int count)
{
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_attr_t attributes;
    thread_refusal refusal = {0};
    size_t stack = (size_t)nd_ops_cpu_stack_bytes();
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, stack);
    pthread_mutex_lock(&gate);
    while (refusal.code == 0 && refusal.started < count) {
        refusal.code = pthread_create(&threads[refusal.started], &attributes, wait_for, &gate);
        refusal.started += refusal.code == 0;
    }
    if (refusal.code != 0) {
        refusal.lacks_room = !has_room(stack + beside_stack);
        refusal.limit = nd_limits_read_memory();
    }
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < refusal.started; i++) {
        pthread_join(threads[i], NULL);
    }
    pthread_mutex_destroy(&gate);
    pthread_attr_destroy(&attributes);
    return refusal;
}

static nd_status fail_threads(int wanted, const thread_refusal *r)
{
    int64_t stack = nd_ops_cpu_stack_bytes(), room = stack + (int64_t)beside_stack;
    int most = r->started / 2 + 1; /* the calling thread is one, each other has one of libgomp */
    if (r->lacks_room && (!r->limit.option || r->limit.left >= room)) {
        return nd_fail(ND_ERR_RESOURCE,
                       "a worker of %d threads cannot start more than %d here: a stack of %lld KiB "
                       "has no room (OMP_STACKSIZE, ulimit -s); use a smaller "
                       "launch.threads_per_worker, or make the stacks smaller",
                       wanted, most, (long long)stack / 1024);
    }
    return nd_fail(ND_ERR_RESOURCE,
                   "a worker of %d threads cannot start more than %d here: %s (%s); use a smaller "
                   "launch.threads_per_worker, or raise that limit",
                   wanted, most, strerror(r->code),
                   r->lacks_room ? r->limit.option : "ulimit -u, or pids.max of the control group");
}

nd_status nd_ops_cpu_start_threads(nd_device *device)
{
    int wanted = device->threads;
    pthread_t *threads = NULL;
    if (wanted == 1) {
        return ND_OK;
    }
    ND_TRY(nd_cpu_context_create(device));
    ND_TRY(ND_ALLOC(2 * wanted, &threads));
    thread_refusal refusal = try_threads(threads, 2 * (wanted - 1));
    free(threads);
    if (refusal.code != 0) {
        return fail_threads(wanted, &refusal);
    }
    nd_cpu_context *context = device->native;
    ND_TRY(nd_team_start(context->team, (size_t)nd_ops_cpu_stack_bytes()));
    int running = 0;
    omp_set_num_threads(wanted);
#pragma omp parallel
    {
#pragma omp atomic
        running++; /* the compiler leaves out a region that does nothing */
    }
    return ND_OK;
}

// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/team.h"

#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>

#include "runtime/base/process.h"

static const size_t beside_stack = 1 << 20;

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

nd_status nd_cpu_refuse_threads(int wanted, int most, int code, size_t stack_bytes)
{
    const bool lacks_room = !has_room(stack_bytes + beside_stack);
    const nd_memory_limit limit = nd_limits_read_memory();
    if (lacks_room && (!limit.option || limit.left >= (int64_t)(stack_bytes + beside_stack))) {
        return nd_fail(ND_ERR_RESOURCE,
                       "a worker of %d threads cannot start more than %d here: a stack of %lld KiB "
                       "has no room (OMP_STACKSIZE, ulimit -s); use a smaller "
                       "launch.threads_per_worker, or make the stacks smaller",
                       wanted, most, (long long)stack_bytes / 1024);
    }
    return nd_fail(ND_ERR_RESOURCE,
                   "a worker of %d threads cannot start more than %d here: %s (%s); use a smaller "
                   "launch.threads_per_worker, or raise that limit",
                   wanted, most, strerror(code),
                   lacks_room ? limit.option : "ulimit -u, or pids.max of the control group");
}

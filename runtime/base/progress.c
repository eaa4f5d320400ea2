// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/progress.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(sizeof(nd_progress_slot) == 192, "slots keep to themselves three cache lines");

const char *nd_phase_name(nd_phase phase)
{
    static const char *const names[ND_PHASE_COUNT] = {"start",      "rendezvous", "init",
                                                      "forward",    "backward",   "optimizer",
                                                      "validation", "save",       "done"};
    return phase >= 0 && phase < ND_PHASE_COUNT ? names[phase] : "unknown";
}

static nd_status map_slots(int fd, int count, nd_progress *out)
{
    size_t bytes = (size_t)count * sizeof(nd_progress_slot);
    int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (p == MAP_FAILED) {
        return nd_fail(ND_ERR_INTERNAL, "the progress page of %zu bytes cannot be mapped: %s",
                       bytes, strerror(errno));
    }
    *out = (nd_progress){.slots = p, .count = count, .fd = fd};
    return ND_OK;
}

nd_status nd_progress_create(int count, nd_progress *out)
{
    int fd = memfd_create("nd-progress", 0);
    if (fd < 0 || ftruncate(fd, (off_t)((size_t)count * sizeof(nd_progress_slot))) != 0) {
        nd_status status =
            nd_fail(ND_ERR_INTERNAL, "the progress page cannot be created: %s", strerror(errno));
        if (fd >= 0) {
            close(fd);
        }
        return status;
    }
    nd_status status = map_slots(fd, count, out);
    if (status != ND_OK) {
        close(fd);
        return status;
    }
    for (int i = 0; i < count; i++) {
        atomic_store(&out->slots[i].rank, -1);
    }
    return ND_OK;
}

nd_status nd_progress_open(int fd, int count, nd_progress *out)
{
    struct stat st;
    if (fd >= 0 &&
        (fstat(fd, &st) != 0 || st.st_size < (off_t)((size_t)count * sizeof(nd_progress_slot)))) {
        return nd_fail(ND_ERR_INTERNAL,
                       "the inherited progress page (descriptor %d) is not one of %d slots", fd,
                       count);
    }
    return map_slots(fd, count, out);
}

void nd_progress_close(nd_progress *progress)
{
    if (progress && progress->slots) {
        munmap(progress->slots, (size_t)progress->count * sizeof(nd_progress_slot));
        if (progress->fd >= 0) {
            close(progress->fd);
        }
        progress->slots = NULL;
    }
}

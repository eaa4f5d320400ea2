// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/failure_page.h"

#include <errno.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/clock.h"

nd_status nd_failure_page_create(int count, nd_failure_page *out)
{
    size_t bytes = (size_t)count * sizeof(nd_failure_slot);
    int fd = memfd_create("nd-failure", MFD_CLOEXEC);
    void *p = MAP_FAILED;
    if (fd >= 0 && ftruncate(fd, (off_t)bytes) == 0) {
        p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    if (p == MAP_FAILED) {
        nd_status status = nd_fail_system(errno, "the failure page of %zu bytes", bytes);
        if (fd >= 0) {
            close(fd);
        }
        return status;
    }
    *out = (nd_failure_page){.slots = p, .count = count, .fd = fd};
    return ND_OK;
}

void nd_failure_page_close(nd_failure_page *page)
{
    if (page && page->slots) {
        munmap(page->slots, (size_t)page->count * sizeof(nd_failure_slot));
        close(page->fd);
        page->slots = NULL;
    }
}

/* Maps all slots: a single one need not begin at a page. NULL without a launcher. */
static nd_failure_slot *map_slots(const nd_identity *identity, size_t *bytes)
{
    struct stat st;
    *bytes = (size_t)identity->local_world_size * sizeof(nd_failure_slot);
    if (identity->failure_fd < 0 || fstat(identity->failure_fd, &st) != 0 ||
        st.st_size < (off_t)*bytes) {
        return NULL;
    }
    void *p = mmap(NULL, *bytes, PROT_READ | PROT_WRITE, MAP_SHARED, identity->failure_fd, 0);
    return p == MAP_FAILED ? NULL : p;
}

void nd_failure_report(const nd_identity *identity, const nd_error *error)
{
    size_t bytes;
    nd_failure_slot *slots = map_slots(identity, &bytes);
    if (!slots) {
        return;
    }
    nd_failure_slot *slot = &slots[identity->local_rank];
    if (atomic_load(&slot->time_ns) == 0) {
        slot->status = (int32_t)error->status;
        slot->cause = (int32_t)error->cause;
        snprintf(slot->message, sizeof slot->message, "%s", error->message);
        atomic_store(&slot->time_ns, nd_clock_ns());
    }
    munmap(slots, bytes);
}

void nd_failure_set_device(const nd_identity *identity, const char *device)
{
    size_t bytes;
    nd_failure_slot *slots = map_slots(identity, &bytes);
    if (slots) {
        nd_failure_slot *slot = &slots[identity->local_rank];
        snprintf(slot->device, sizeof slot->device, "%s", device);
        munmap(slots, bytes);
    }
}

void nd_failure_set_ready(const nd_identity *identity)
{
    size_t bytes;
    nd_failure_slot *slots = map_slots(identity, &bytes);
    if (slots) {
        atomic_store(&slots[identity->local_rank].ready, 1);
        munmap(slots, bytes);
    }
}

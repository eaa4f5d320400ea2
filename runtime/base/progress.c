// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/progress.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/clock.h"

_Static_assert(sizeof(nd_progress_slot) == 192, "slots keep to themselves three cache lines");
_Static_assert(sizeof(nd_progress_job) % 64 == 0, "the slots behind it begin at a cache line");

const char *nd_phase_name(nd_phase phase)
{
    static const char *const names[ND_PHASE_COUNT] = {"start",      "rendezvous", "init",
                                                      "forward",    "backward",   "optimizer",
                                                      "validation", "save",       "done"};
    return phase >= 0 && phase < ND_PHASE_COUNT ? names[phase] : "unknown";
}

static size_t page_bytes(int count)
{
    return sizeof(nd_progress_job) +
           (size_t)count * (sizeof(nd_progress_slot) + sizeof(nd_failure_slot));
}

static nd_status map_page(int fd, int count, bool begins, nd_progress *out)
{
    size_t bytes = page_bytes(count);
    int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (p == MAP_FAILED) {
        return nd_fail_system(errno, "the map of the progress page (%zu bytes)", bytes);
    }
    nd_progress_job *job = p;
    void *slots = job + 1, *failures = (nd_progress_slot *)slots + count;
    *out =
        (nd_progress){.job = job, .slots = slots, .failures = failures, .count = count, .fd = fd};
    if (begins) { /* no other process uses the page yet */
        atomic_store(&job->first_step, -1);
        atomic_store(&job->durable_step, -1);
    }
    return ND_OK;
}

nd_status nd_progress_create(int count, nd_progress *out)
{
    int fd = memfd_create("nd-progress", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)page_bytes(count)) != 0) {
        nd_status status = nd_fail_system(errno, "the progress page");
        if (fd >= 0) {
            close(fd);
        }
        return status;
    }
    nd_status status = map_page(fd, count, true, out);
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
    if (fd >= 0 && (fstat(fd, &st) != 0 || st.st_size < (off_t)page_bytes(count))) {
        return nd_fail(ND_ERR_INTERNAL,
                       "the inherited progress page (descriptor %d) is not one of %d slots", fd,
                       count);
    }
    return map_page(fd, count, fd < 0, out);
}

void nd_progress_close(nd_progress *progress)
{
    if (progress && progress->slots) {
        munmap(progress->job, page_bytes(progress->count));
        if (progress->fd >= 0) {
            close(progress->fd);
        }
        progress->job = NULL;
        progress->slots = NULL;
    }
}

nd_status nd_progress_set_run_folder(nd_progress *progress, const char *path)
{
    nd_progress_job *job = progress->job;
    if (path[0] != '/' || strlen(path) >= sizeof job->run_folder) {
        return nd_fail(
            ND_ERR_CANTCREATE,
            "the run folder %.100s... cannot be handed to ndlaunch: it needs an absolute "
            "path of at most %zu characters",
            path, sizeof job->run_folder - 1);
    }
    if (atomic_load_explicit(&job->has_folder, memory_order_relaxed) == 0) {
        snprintf(job->run_folder, sizeof job->run_folder, "%s", path);
        atomic_store_explicit(&job->has_folder, 1, memory_order_release);
    }
    return ND_OK;
}

const char *nd_progress_run_folder(const nd_progress *progress)
{
    const nd_progress_job *job = progress->job;
    return atomic_load_explicit(&job->has_folder, memory_order_acquire) ? job->run_folder : "";
}

void nd_progress_set_stepped(nd_progress *progress)
{
    int64_t none = 0;
    atomic_compare_exchange_strong(&progress->job->stepped_ns, &none, nd_clock_ns());
}

int64_t nd_progress_completed_steps(const nd_progress_slot *slot)
{
    int64_t step = atomic_load_explicit(&slot->step, memory_order_relaxed);
    int32_t phase = atomic_load_explicit(&slot->phase, memory_order_relaxed);
    bool inside = phase >= ND_PHASE_FORWARD && phase <= ND_PHASE_OPTIMIZER;
    return inside ? step - 1 : step;
}

void nd_failure_record(const nd_progress *page, int local_rank, const nd_error *error)
{
    nd_failure_slot *slot = nd_failure_slot_of(page, local_rank);
    if (slot && atomic_load(&slot->time_ns) == 0) {
        slot->status = (int32_t)error->status;
        slot->cause = (int32_t)error->cause;
        snprintf(slot->message, sizeof slot->message, "%s", error->message);
        atomic_store(&slot->time_ns, nd_clock_ns());
    }
}

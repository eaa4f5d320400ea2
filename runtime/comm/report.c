// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/backend.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"

void nd_report_add(nd_report *to, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(to->text + to->used, sizeof to->text - to->used, format, args);
    va_end(args);
    to->used += n > 0 ? (size_t)n : 0;
    if (to->used >= sizeof to->text) {
        to->used = sizeof to->text - 1;
    }
}

const nd_progress_slot *nd_report_slot(const nd_transport *transport, int rank)
{
    if (!transport->page || !transport->slot_of_rank) {
        return NULL;
    }
    int slot = transport->slot_of_rank(transport->slot_context, rank);
    return slot >= 0 && slot < transport->page->count ? &transport->page->slots[slot] : NULL;
}

#define LOAD(field) atomic_load_explicit(&slot->field, memory_order_relaxed)

void nd_report_rank(const nd_transport *transport, int rank, const char *absent,
                    const char *process, nd_report *to)
{
    const nd_progress_slot *slot = nd_report_slot(transport, rank);
    if (!slot) {
        nd_report_add(to, "; rank %d has not answered%s", rank, process);
        return;
    }
    int group = LOAD(group), kind = LOAD(op);
    int64_t since = LOAD(since_ns), sequence = LOAD(sequence);
    bool known = group >= 0 && group < ND_GROUP_COUNT && kind >= 0 && kind <= ND_COMM_SETUP;
    if (known && since > 0) {
        nd_report_add(to, "; rank %d is in %s of %s", rank, nd_comm_op_name((nd_comm_op)kind),
                      nd_group_name((nd_group_kind)group));
        if (sequence > 0) {
            nd_report_add(to, ", operation %lld", (long long)sequence);
        }
        nd_report_add(to, ", since %.1f s%s", (double)(nd_clock_ns() - since) * 1e-9, process);
        return;
    }
    nd_report_add(to, "; rank %d %s: phase %s, step %lld", rank, absent,
                  nd_phase_name((nd_phase)LOAD(phase)), (long long)LOAD(step));
    if (known && sequence > 0) {
        nd_report_add(to, ", last in %s of %s, operation %lld", nd_comm_op_name((nd_comm_op)kind),
                      nd_group_name((nd_group_kind)group), (long long)sequence);
    }
    nd_report_add(to, "%s", process);
}

nd_status nd_report_host(const char *const *spaces, uint64_t *out)
{
    static const char boot_id[] = "/proc/sys/kernel/random/boot_id";
    char text[64], path[64];
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    nd_fs_read_kernel(boot_id, text, sizeof text);
    if (!text[0]) {
        return nd_fail_local(ND_ERR_IO,
                             "%s cannot be read, by which ranks of one host know each "
                             "other; mount /proc",
                             boot_id);
    }
    for (const char *c = text; *c; c++) {
        h = (h ^ (unsigned char)*c) * UINT64_C(0x100000001b3);
    }
    for (; *spaces; spaces++) {
        struct stat space;
        snprintf(path, sizeof path, "/proc/self/ns/%s", *spaces);
        if (stat(path, &space) != 0) {
            return nd_fail_local(ND_ERR_IO,
                                 "%s cannot be read, by which ranks of one host know "
                                 "each other: %s",
                                 path, strerror(errno));
        }
        h = (h ^ (uint64_t)space.st_ino) * UINT64_C(0x100000001b3);
    }
    *out = h;
    return ND_OK;
}

static const char *state_in_words(char letter)
{
    switch (letter) {
    case 'T':
    case 't':
        return "stopped by a signal or a debugger";
    case 'Z':
    case 'X':
    case '\0':
        return "not there any more";
    case 'D':
        return "in uninterruptible I/O";
    case 'S':
        return "sleeping";
    default:
        return "running";
    }
}

bool nd_report_process(int pid, char *text, size_t size)
{
    char path[64], line[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    nd_fs_read_kernel(path, line, sizeof line);
    const char *name_end = strrchr(line, ')'); /* the letter is the first field behind the name */
    const char letter = name_end && name_end[1] == ' ' ? name_end[2] : '\0';
    snprintf(text, size, " (process %d is %s)", pid, state_in_words(letter));
    return letter == 'T' || letter == 't';
}

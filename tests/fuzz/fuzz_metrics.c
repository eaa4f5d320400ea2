// SPDX-License-Identifier: Apache-2.0
/* metrics.jsonl read back: whatever it holds, one thread and several find the same. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "trainer/view/metrics.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* NaN equals NaN here: bytes are compared. */
static void compare(const nd_metrics *a, const nd_metrics *b)
{
    ND_ASSERT(a->row_count == b->row_count && a->validation_count == b->validation_count &&
              a->event_count == b->event_count && a->repeated == b->repeated &&
              a->half_line == b->half_line);
    for (size_t i = 0; i < a->row_count; i++) {
        ND_ASSERT(a->rows[i].step == b->rows[i].step && a->rows[i].skipped == b->rows[i].skipped);
        ND_ASSERT(memcmp(a->rows[i].value, b->rows[i].value, sizeof a->rows[i].value) == 0);
    }
    ND_ASSERT(a->source_count == b->source_count && a->set_count == b->set_count &&
              a->health_count == b->health_count && a->source_names.count == b->source_names.count);
    for (size_t i = 0; i < a->source_count; i++) {
        ND_ASSERT(a->sources[i].step == b->sources[i].step &&
                  a->sources[i].source == b->sources[i].source);
    }
    for (size_t i = 0; i < a->event_count; i++) {
        ND_ASSERT(a->events[i].step == b->events[i].step &&
                  strcmp(a->events[i].text, b->events[i].text) == 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1;
    static char path[64];
    nd_metrics one, several;
    if (fd < 0) {
        fd = memfd_create("metrics", MFD_CLOEXEC);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    ND_ASSERT(ftruncate(fd, 0) == 0 && nd_fs_pwrite(fd, "input", data, size, 0) == ND_OK);
    nd_status status = nd_metrics_read(path, 1, &one);
    nd_status again = nd_metrics_read(path, 3, &several);
    ND_ASSERT(status == again);
    if (status == ND_OK) {
        compare(&one, &several);
        nd_metrics_fini(&one);
        nd_metrics_fini(&several);
    }
    return 0;
}

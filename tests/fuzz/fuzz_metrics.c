// SPDX-License-Identifier: Apache-2.0
/* metrics.jsonl read back, whatever it holds. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "trainer/view/metrics.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Steps are those of lines, and every column is as long as its table. */
static void check_table(const nd_metrics *m, const nd_metric_table *table)
{
    const double *step = nd_metrics_column(m, table, "step");
    static volatile double sum; /* every value is read */
    for (size_t i = 0; i < table->rows; i++) {
        ND_ASSERT(step[i] >= 0 && step[i] < 1e15);
        for (int k = 0; k < m->name_count; k++) {
            sum = sum + (table->columns[k] ? table->columns[k][i] : m->none[i]);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1;
    static char path[64];
    nd_metrics metrics;
    if (fd < 0) {
        fd = memfd_create("metrics", MFD_CLOEXEC);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    ND_ASSERT(ftruncate(fd, 0) == 0 && nd_fs_pwrite(fd, "input", data, size, 0) == ND_OK);
    if (nd_metrics_read(path, &metrics) == ND_OK) {
        check_table(&metrics, &metrics.steps);
        check_table(&metrics, &metrics.validations);
        check_table(&metrics, &metrics.health);
        nd_metrics_fini(&metrics);
    }
    return 0;
}

// SPDX-License-Identifier: Apache-2.0
/* metrics.jsonl read back, whatever it holds. */
#include <stdio.h>
#include <string.h>

#include "runtime/base/printable.h"
#include "tests/fuzz/fuzz.h"
#include "trainer/view/metrics.h"

/* Steps are those of lines, and names are texts. */
static void check_column(const nd_column *column)
{
    static volatile double sum; /* every value is read */
    for (size_t i = 0; i < column->count; i++) {
        ND_ASSERT(column->points[i].step >= 0 && column->points[i].step < 1e15);
        sum = sum + column->points[i].value;
    }
    ND_ASSERT(strlen(column->name) < ND_COLUMN_NAME && nd_is_printable(column->name));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int fd;
    const char *path = fuzz_file(data, size, &fd);
    nd_metrics metrics;
    if (nd_metrics_read(path, &metrics) == ND_OK) {
        for (int k = 0; k < metrics.count; k++) {
            check_column(&metrics.columns[k]);
        }
        nd_metrics_fini(&metrics);
    }
    return 0;
}

// SPDX-License-Identifier: Apache-2.0
/* Reads what stands already in a metrics.jsonl that a run appends to. */
#include "trainer/report/report.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "runtime/base/fs.h"

/* The line looked for lies at most BEFORE_BYTES before `from`, which is room for a step and for a
 * validation of ND_DATA_SOURCES_MAX sources with long names. What counts in a line is in its
 * first PART_BYTES. */
enum { PART_BYTES = 1024, BEFORE_BYTES = 1 << 18 };

/* Changes the answer as the line with this beginning asks. */
static void take_line(const char *line, int64_t step, bool *has)
{
    long long at = 0;
    int end = 0;
    if (sscanf(line, "{\"step\":%lld,\"validation_loss\":%n", &at, &end) == 1 && end > 0) {
        *has = *has || at == step;
    } else if (sscanf(line, "{\"event\":\"resumed\",\"step\":%lld,%n", &at, &end) == 1 && end > 0) {
        *has = *has && at >= step;
    }
}

nd_status nd_jsonl_has_validation(const char *path, int64_t from, int64_t step, bool *out)
{
    char part[PART_BYTES];
    bool there = false;
    FILE *f = NULL;
    *out = false;
    ND_TRY(nd_fs_exists(path, &there));
    if (!there) {
        return ND_OK;
    }
    ND_TRY(nd_fs_stream_own(path, ND_ERR_DATA, &f));
    nd_status status = ND_OK;
    if (from > BEFORE_BYTES && fseeko(f, from - BEFORE_BYTES, SEEK_SET) != 0) {
        status = nd_fail(ND_ERR_IO, "cannot read \"%s\": %s", path, strerror(errno));
    }
    bool begins = from <= BEFORE_BYTES; /* the part begins a line */
    while (status == ND_OK && fgets(part, sizeof part, f)) {
        if (begins) {
            take_line(part, step, out);
        }
        begins = strchr(part, '\n') != NULL;
    }
    if (status == ND_OK && ferror(f)) {
        status = nd_fail(ND_ERR_IO, "cannot read \"%s\": %s", path, strerror(errno));
    }
    fclose(f);
    return status;
}

// SPDX-License-Identifier: Apache-2.0
/* What a metrics.jsonl that a run appends to says already. */
#include "trainer/report/report.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* Lines are shorter than LINE_BYTES; the line looked for lies at most this far before `from`. */
enum { LINE_BYTES = 1024, BEFORE_BYTES = 64 * LINE_BYTES };

/* What one line changes about the answer. */
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
    char line[LINE_BYTES];
    FILE *f = fopen(path, "re");
    *out = false;
    if (!f) {
        return errno == ENOENT
                   ? ND_OK
                   : nd_fail(ND_ERR_IO, "cannot read \"%s\": %s", path, strerror(errno));
    }
    nd_status status = ND_OK;
    if (from > BEFORE_BYTES && fseeko(f, from - BEFORE_BYTES, SEEK_SET) != 0) {
        status = nd_fail(ND_ERR_IO, "cannot read \"%s\": %s", path, strerror(errno));
    }
    while (status == ND_OK && fgets(line, sizeof line, f)) {
        take_line(line, step, out);
    }
    if (status == ND_OK && ferror(f)) {
        status = nd_fail(ND_ERR_IO, "cannot read \"%s\": %s", path, strerror(errno));
    }
    fclose(f);
    return status;
}

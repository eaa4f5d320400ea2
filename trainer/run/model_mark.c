// SPDX-License-Identifier: Apache-2.0
/* Which state RUN/model has. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "trainer/run/run_folder.h"

static const char mark_name[] = ".model-saved";

static const char *mark_text(char text[64], int64_t step, nd_weights_dtype dtype)
{
    snprintf(text, 64, "step %lld, %s\n", (long long)step,
             dtype == ND_WEIGHTS_FP32 ? "fp32" : "bf16");
    return text;
}

void nd_run_model_mark(const nd_run_files *files, int64_t step, nd_weights_dtype dtype)
{
    char text[64], *path = NULL;
    nd_status status = files->dir ? nd_fs_format(&path, "%s/%s", files->dir, mark_name) : ND_OK;
    if (status == ND_OK && path) {
        mark_text(text, step, dtype);
        status = nd_fs_write_atomic(path, text, strlen(text));
    }
    if (status != ND_OK) { /* a later start saves the model again */
        nd_log_debug("the saved model is not marked: %s", nd_error_last()->message);
        nd_error_clear();
    }
    free(path);
}

void nd_run_model_unmark(const nd_run_files *files)
{
    char path[4352];
    if (files->dir) {
        snprintf(path, sizeof path, "%s/%s", files->dir, mark_name);
        unlink(path);
    }
}

nd_status nd_run_model_is_marked(const nd_run_files *files, int64_t step, nd_weights_dtype dtype,
                                 bool *out)
{
    char path[4352], text[64], *line = NULL;
    size_t size;
    bool there = false;
    *out = false;
    if (!files->dir) {
        return ND_OK;
    }
    snprintf(path, sizeof path, "%s/model/config.json", files->dir);
    ND_TRY(nd_fs_exists(path, &there));
    snprintf(path, sizeof path, "%s/%s", files->dir, mark_name);
    ND_TRY(there ? nd_fs_exists(path, &there) : ND_OK);
    if (there) {
        ND_TRY(nd_fs_read(path, sizeof text, ND_ERR_DATA, &line, &size));
        *out = strcmp(line, mark_text(text, step, dtype)) == 0;
        free(line);
    }
    return ND_OK;
}

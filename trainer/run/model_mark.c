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

/* A folder in its place would stay there, and have every start save the model. */
static nd_status write_mark(const char *path, const char *text)
{
    bool folder = false;
    ND_TRY(nd_fs_is_folder(path, &folder));
    ND_TRY(folder ? nd_fs_set_aside(path, "old", NULL) : ND_OK);
    return nd_fs_write_atomic(path, text, strlen(text));
}

void nd_run_model_mark(const nd_run_files *files, int64_t step, nd_weights_dtype dtype)
{
    char text[64], *path = NULL;
    nd_status status = files->dir ? nd_fs_format(&path, "%s/%s", files->dir, mark_name) : ND_OK;
    if (status == ND_OK && path) {
        status = write_mark(path, mark_text(text, step, dtype));
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
    char path[4352], text[64], line[sizeof text] = "";
    struct stat st;
    bool there = false;
    int fd = -1;
    *out = false;
    if (!files->dir) {
        return ND_OK;
    }
    snprintf(path, sizeof path, "%s/model/config.json", files->dir);
    ND_TRY(nd_fs_exists(path, &there));
    snprintf(path, sizeof path, "%s/%s", files->dir, mark_name);
    ND_TRY(there ? nd_fs_exists(path, &there) : ND_OK);
    if (!there) {
        return ND_OK;
    }
    nd_status status = nd_fs_open_own(path, ND_ERR_DATA, &fd, &st);
    if (status == ND_ERR_DATA) { /* a link, a folder, a pipe: not what nd_run_model_mark writes */
        nd_log_warning("%s; the model is saved again", nd_error_last()->message);
        nd_error_clear();
        return ND_OK;
    }
    ND_TRY(status);
    const size_t size = strlen(mark_text(text, step, dtype));
    if (st.st_size == (off_t)size) {
        status = nd_fs_pread(fd, path, line, size, 0);
        *out = status == ND_OK && memcmp(line, text, size) == 0;
    }
    close(fd);
    return status;
}

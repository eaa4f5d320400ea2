// SPDX-License-Identifier: Apache-2.0
#include "trainer/report/metrics.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/fsio.h"

static const char *const mend = "Give another folder as output.dir.";

static nd_status fail_create(const char *path)
{
    return nd_fail(ND_ERR_CANTCREATE, "the run folder %s cannot be created: %s. %s", path,
                   strerror(errno), mend);
}

static nd_status make_path(const char *path)
{
    return nd_fs_make_folders(path, "the run folder", mend);
}

static nd_status open_given(const char *dir)
{
    static const char *const marks[] = {"run.json", "metrics.jsonl", "trace.json", "model"};
    struct stat st;
    ND_TRY(make_path(dir));
    if (stat(dir, &st) != 0) {
        return fail_create(dir);
    }
    if (!S_ISDIR(st.st_mode)) {
        return nd_fail(ND_ERR_CANTCREATE, "output.dir %s is a file, not a folder. %s", dir, mend);
    }
    if (access(dir, W_OK | X_OK) != 0) {
        return nd_fail(ND_ERR_CANTCREATE, "the run folder %s cannot be written to: %s. %s", dir,
                       strerror(errno), mend);
    }
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) {
        char path[4352];
        snprintf(path, sizeof path, "%s/%s", dir, marks[i]);
        if (access(path, F_OK) == 0) {
            return nd_fail(ND_ERR_CANTCREATE,
                           "the folder %s already holds a run (%s), and nothing is written over. "
                           "Give another folder as output.dir, or none for a fresh one in runs/.",
                           dir, marks[i]);
        }
    }
    return ND_OK;
}

/* File name of the configuration without folder and suffix; "run" when there was no file. */
static void name_of(const nd_config *config, char name[128])
{
    const char *source = config->source && config->source[0] ? config->source : "run";
    const char *slash = strrchr(source, '/');
    snprintf(name, 128, "%s", slash ? slash + 1 : source);
    char *dot = strrchr(name, '.');
    if (dot && dot != name) {
        *dot = '\0';
    }
}

nd_status nd_run_folder_check(const nd_config *config)
{
    if (config->output.dir[0]) {
        return open_given(config->output.dir);
    }
    ND_TRY(make_path("runs"));
    return access("runs", W_OK | X_OK) == 0 ? ND_OK : fail_create("runs");
}

nd_status nd_run_folder_create(const nd_config *config, char **out)
{
    if (config->output.dir && config->output.dir[0]) {
        ND_TRY(open_given(config->output.dir));
        return nd_fs_format(out, "%s", config->output.dir);
    }
    char name[128], path[192];
    name_of(config, name);
    ND_TRY(make_path("runs"));
    /* mkdir tells who was first, so two runs that start together get two folders. */
    for (int n = 1; n < 1000000; n++) {
        snprintf(path, sizeof path, "runs/%s-%d", name, n);
        if (mkdir(path, 0777) == 0) {
            return nd_fs_format(out, "%s", path);
        }
        if (errno != EEXIST) {
            return fail_create(path);
        }
    }
    return nd_fail(ND_ERR_CANTCREATE, "runs/ holds a million runs of %s. %s", name, mend);
}

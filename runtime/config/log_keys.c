// SPDX-License-Identifier: Apache-2.0
/* Keys of the section log: trackers, the Python that some of them need, steps that are profiled. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/config/reader.h"

/* Digits up to a hyphen or the end; -1: there is no number of up to 12 digits. */
static int64_t step_number(const char *text, const char **end)
{
    size_t digits = strspn(text, "0123456789");
    *end = text + digits;
    return digits > 0 && digits <= 12 ? atoll(text) : -1;
}

bool nd_config_steps(const char *steps, int64_t *first, int64_t *last)
{
    const char *end = steps;
    *first = *last = step_number(end, &end);
    if (*first > 0 && *end == '-') {
        *last = step_number(end + 1, &end);
    }
    return *first > 0 && *last >= *first && !*end;
}

static bool is_executable(const char *path)
{
    nd_fs_kind kind;
    return nd_fs_look(path, &kind, NULL) == ND_OK && kind == ND_FS_FILE && access(path, X_OK) == 0;
}

/* A path, or a name that the folders of PATH have. */
static bool is_program(const char *name)
{
    char path[4096];
    const char *folders = getenv("PATH");
    if (strchr(name, '/')) {
        return is_executable(name);
    }
    for (const char *f = folders ? folders : "/usr/bin:/bin"; *f; f += *f == ':') {
        const size_t n = strcspn(f, ":");
        snprintf(path, sizeof path, "%.*s/%s", (int)n, f, name);
        if (n > 0 && is_executable(path)) {
            return true;
        }
        f += n;
    }
    return false;
}

bool nd_config_tracks(const nd_config *c, nd_tracker tracker)
{
    const unsigned all = tracker == ND_TRACKER_TENSORBOARD ? 1U << ND_TRACKER_ALL : 0;
    return (c->log.trackers & (1U << tracker | all)) != 0;
}

static nd_status check_steps(const nd_config *c, const char *key, const char *steps)
{
    int64_t first, last;
    if (!steps[0] || (nd_config_steps(steps, &first, &last) &&
                      (c->train.steps == 0 || last <= c->train.steps))) {
        return ND_OK;
    }
    return nd_fail(ND_ERR_CONFIG,
                   "log.%s is \"%.60s\"; it must be a step or two, such as 10 or 10-12, from 1 to "
                   "train.steps, which is %lld",
                   key, steps, nd_ll(c->train.steps));
}

/* A tracker for which rank 0, which is on node 0, starts a Python program. */
static nd_status check_follower(const nd_config *c, nd_tracker tracker, const char *library)
{
    if (!nd_config_tracks(c, tracker) || c->launch.node_rank != 0) {
        return ND_OK;
    }
    if (!c->log.python[0]) {
        return nd_fail(ND_ERR_CONFIG,
                       "log.trackers has %s, which needs a Python that has it; name one with "
                       "--tracker-python (pip install %s), or let scripts/wandb_sync.py RUN "
                       "--with %s --follow send metrics.jsonl of the run's folder",
                       library, library, library);
    }
    return is_program(c->log.python)
               ? ND_OK
               : nd_fail(ND_ERR_CONFIG,
                         "log.python is \"%.200s\", which is no program here; name a Python that "
                         "has %s with --tracker-python",
                         c->log.python, library);
}

nd_status nd_config_check_log(const nd_config *c)
{
    ND_TRY(check_follower(c, ND_TRACKER_WANDB, "wandb"));
    ND_TRY(check_follower(c, ND_TRACKER_TRACKIO, "trackio"));
    ND_TRY(check_steps(c, "profile_steps", c->log.profile_steps));
    ND_TRY(check_steps(c, "dump_steps", c->log.dump_steps));
    if (!c->log.dump_tensors[0] != !c->log.dump_steps[0]) {
        return nd_fail(ND_ERR_CONFIG,
                       "log.dump_tensors is \"%.60s\" and log.dump_steps is \"%.60s\"; give both, "
                       "such as --dump-tensors '*.grad' --dump-steps 1-3, or none",
                       c->log.dump_tensors, c->log.dump_steps);
    }
    return ND_OK;
}

// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/checkpoints.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "trainer/weights/weights.h"

/* What the ranks learn from rank 0. */
typedef struct shared_folder {
    char run[ND_RESUME_PATH_MAX];
    char run_id[64]; /* this start's name */
    char mark[ND_RUN_MARK_MAX];
} shared_folder;

nd_status nd_run_tell_all(const nd_worker *worker, const char *key, nd_status status,
                          const char *fault, void *value, size_t bytes)
{
    const nd_error error = *nd_error_last();
    const size_t size = sizeof(int64_t) + bytes;
    size_t got = size;
    int64_t told = status;
    char *message = NULL;
    ND_TRY(nd_alloc(size, 1, (void **)&message));
    value = value ? value : message; /* of no bytes */
    if (worker->identity.rank == 0) {
        memcpy(message, &told, sizeof told);
        memcpy(message + sizeof told, value, bytes);
        nd_status sent = nd_store_set(worker->store, key, message, size);
        free(message);
        if (status != ND_OK) {
            nd_error_restore(&error);
        }
        return status != ND_OK ? status : sent;
    }
    nd_status read = nd_store_get(worker->store, key, message, &got);
    if (read == ND_OK && got != size) {
        read = nd_fail(ND_ERR_INTERNAL, "the value of '%s' in the store has %zu bytes", key, got);
    }
    if (read == ND_OK) {
        memcpy(&told, message, sizeof told);
        memcpy(value, message + sizeof told, bytes);
    }
    free(message);
    ND_TRY(read);
    return told == ND_OK ? ND_OK : nd_fail_elsewhere((nd_status)told, "rank 0 %s", fault);
}

/* The look is for what the ranks write. */
static bool is_looked_at(const nd_run_checkpoints *c)
{
    const nd_rank *r = c->trainer->rank;
    const nd_config *config = r->config;
    return (config->checkpoint.interval > 0 || config->log.dump_tensors[0]) && r->world_size > 1;
}

static nd_status describe_folder(const nd_run_checkpoints *c, shared_folder *out)
{
    const nd_identity *identity = &c->context->worker->identity;
    struct timespec now;
    char *real = realpath(c->files->dir, NULL);
    if (!real) {
        return nd_fail(ND_ERR_IO, "the run folder %s is gone: %s", c->files->dir, strerror(errno));
    }
    snprintf(out->run, sizeof out->run, "%.*s", ND_RESUME_PATH_MAX - 1, real);
    free(real);
    if (identity->run_id[0]) {
        snprintf(out->run_id, sizeof out->run_id, "%s", identity->run_id);
    } else {
        snprintf(out->run_id, sizeof out->run_id, "%lld", (long long)nd_clock_ns());
    }
    if (!is_looked_at(c)) {
        return ND_OK;
    }
    clock_gettime(CLOCK_REALTIME, &now);
    snprintf(out->mark, sizeof out->mark, "%012llx.%08lx.%016llx", (unsigned long long)now.tv_sec,
             (unsigned long)now.tv_nsec, (unsigned long long)(nd_clock_ns() ^ getpid()));
    return nd_run_lock_mark(&c->files->lock, c->files->dir, out->mark);
}

/* A network file system may show an older state for a moment. The others wait in a collective
 * meanwhile, whose deadline is launch.comm_timeout_seconds. */
static bool sees_mark(const nd_run_checkpoints *c, const char *mark)
{
    const struct timespec pause = {0, 50000000};
    double most = c->trainer->rank->config->launch.comm_timeout_seconds / 8;
    double end = nd_clock_seconds() + (most < 5 ? most : 5);
    bool seen = nd_run_lock_has_mark(c->run, mark);
    while (!seen && nd_clock_seconds() < end) {
        nanosleep(&pause, NULL);
        seen = nd_run_lock_has_mark(c->run, mark);
    }
    return seen;
}

static nd_status look(const nd_run_checkpoints *c, const char *mark)
{
    const nd_identity *identity = &c->context->worker->identity;
    bool there = false;
    if (sees_mark(c, mark)) {
        return ND_OK;
    }
    ND_TRY(nd_fs_exists(c->run, &there));
    return nd_fail(
        ND_ERR_CANTCREATE,
        "rank %d on %s does not see the run folder of rank 0: %s %.300s there; all "
        "nodes write their part of a checkpoint or dump to it, so give a folder of a shared "
        "file system as --save-dir (output.dir)",
        identity->rank, identity->host, there ? "another folder is" : "nothing is", c->run);
}

/* Before all else that needs it, so that no rank waits for what comes behind a folder that is not
 * opened. */
nd_status nd_run_folder_share(nd_run_checkpoints *c, nd_status opened)
{
    const nd_worker *worker = c->context->worker;
    shared_folder shared = {0};
    if (worker->identity.rank == 0 && opened == ND_OK) {
        opened = describe_folder(c, &shared);
    }
    ND_TRY(nd_run_tell_all(worker, "run folder", opened, "could not open the run folder", &shared,
                           sizeof shared));
    snprintf(c->run, sizeof c->run, "%s", shared.run);
    snprintf(c->run_id, sizeof c->run_id, "%s", shared.run_id);
    bool elsewhere = false;
    return is_looked_at(c) ? nd_shared_agree(c->trainer->rank, look(c, shared.mark),
                                             "the run folder of rank 0", &elsewhere)
                           : ND_OK;
}

/* Rank 0: the first of the names that nothing has. */
static nd_status make_dumps(const char *run, char path[ND_RESUME_PATH_MAX])
{
    char number[24] = "";
    bool there = true;
    for (int i = 1; there; i++) {
        if (snprintf(path, ND_RESUME_PATH_MAX, "%s/dumps%s", run, number) >= ND_RESUME_PATH_MAX) {
            return nd_fail(ND_ERR_CANTCREATE, "the path of the run folder %s is too long for dumps",
                           run);
        }
        ND_TRY(nd_fs_exists(path, &there));
        snprintf(number, sizeof number, "-%d", i + 1);
    }
    ND_TRY(nd_fs_make_own_folder(path));
    return ND_OK;
}

nd_status nd_run_dumps_open(const nd_run_checkpoints *c, nd_trainer *t)
{
    const nd_worker *worker = c->context->worker;
    char path[ND_RESUME_PATH_MAX] = "";
    int64_t first, last;
    if (!t->rank->config->log.dump_tensors[0]) {
        return ND_OK;
    }
    ND_TRY(nd_dump_check(t->rank->config, &t->rank->shape));
    if (nd_config_steps(t->rank->config->log.dump_steps, &first, &last) &&
        last <= t->position.step) {
        if (t->rank->rank == 0) {
            nd_log_warning("no tensor is dumped: log.dump_steps is %s, and the run goes on after "
                           "step %lld",
                           t->rank->config->log.dump_steps, (long long)t->position.step);
        }
        return ND_OK;
    }
    const nd_status made = t->rank->rank == 0 ? make_dumps(c->run, path) : ND_OK;
    ND_TRY(nd_run_tell_all(worker, "dumps", made, "could not make the folder of dumps", path,
                           sizeof path));
    if (t->rank->rank == 0) {
        nd_log_info("tensors of step %s are dumped to %s", t->rank->config->log.dump_steps, path);
    }
    return nd_dump_create(t->rank, t->model->layout, &t->model->dims, path, &t->dump);
}

// SPDX-License-Identifier: Apache-2.0
/* The folder of a run: whether it can be used, what rank 0 makes there, and what all ranks see. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/hash.h"
#include "runtime/base/log.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/run/state.h"
#include "trainer/weights/weights.h"

static const char *const advice = "give another folder with --save-dir";

/* A folder that files can be put into. */
static nd_status check_writable(const char *dir)
{
    if (access(dir, W_OK | X_OK) != 0) {
        const int code = errno;
        return nd_fail(nd_fs_blame_write(code), "the run folder %s cannot be written to: %s; %s",
                       dir, strerror(code), advice);
    }
    return ND_OK;
}

/* A process that trains there at this moment holds the lock. */
static nd_status fail_holds_run(const char *dir, const char *mark)
{
    nd_run_lock lock = {.fd = -1};
    bool has_lock = false;
    ND_TRY(nd_fs_has(dir, ".lock", &has_lock));
    ND_TRY(has_lock ? nd_run_lock_acquire(dir, &lock) : ND_OK);
    nd_run_lock_release(&lock);
    return nd_fail(ND_ERR_CANTCREATE,
                   "the folder %s already holds a run (%s), and nothing is overwritten; go on with "
                   "that run with --resume-from-checkpoint auto, which begins it again where it "
                   "has no checkpoint, or give another folder with --save-dir, or none for a fresh "
                   "one in runs/",
                   dir, mark);
}

/* A folder that is there, and holds no run yet. A restart of a fresh run would take a checkpoint of
 * ours that is there already. */
static nd_status check_fresh(const char *dir)
{
    static const char *const marks[] = {"run.json", "metrics.jsonl", "trace.json", "model"};
    nd_folder *list = NULL;
    int count = 0;
    ND_TRY(check_writable(dir));
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) {
        bool there = false;
        ND_TRY(nd_fs_has(dir, marks[i], &there));
        if (there) {
            return fail_holds_run(dir, marks[i]);
        }
    }
    ND_TRY(nd_folder_list(dir, ND_FOLDER_WHOLE | ND_FOLDER_OURS, &list, &count));
    nd_status status = count > 0 ? fail_holds_run(dir, list[count - 1].name) : ND_OK;
    free(list);
    return status;
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

enum { SMALL_FILES_BYTES = 1 << 20 }; /* what a run writes in addition to its weights */

static uint64_t weights_bytes(const nd_config *config, const nd_inputs *inputs)
{
    const uint64_t width = config->output.dtype == ND_WEIGHTS_FP32 ? 4 : 2;
    return (uint64_t)nd_shape_parameters(&inputs->shape) * width + SMALL_FILES_BYTES;
}

uint64_t nd_run_checkpoint_bytes(const nd_config *config, const nd_inputs *inputs)
{
    const uint64_t arrays = config->optimizer.name == ND_OPTIMIZER_ADAMW ? 3 : 1;
    const uint64_t heads = (uint64_t)nd_mesh_world_size(&config->resolved_mesh) * 65536;
    return (uint64_t)nd_shape_parameters(&inputs->shape) * 4 * arrays + heads + SMALL_FILES_BYTES +
           (config->checkpoint.export_model ? weights_bytes(config, inputs) + inputs->side_bytes
                                            : 0);
}

/* A disk that is too full for the model and its side files is an error before training, not after
 * it, as is a limit of ulimit -f: the largest file of a model, which is sharded above
 * ND_HF_FILE_BYTES. */
static nd_status check_room_for_model(const nd_config *config, const nd_inputs *inputs,
                                      const char *dir)
{
    struct rlimit limit;
    const uint64_t all = weights_bytes(config, inputs);
    const uint64_t file = all < ND_HF_FILE_BYTES ? all : ND_HF_FILE_BYTES;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        file > limit.rlim_cur) {
        return nd_fail(ND_ERR_CANTCREATE,
                       "the trained model needs a file of %llu bytes, but files of at most %llu "
                       "may be written (ulimit -f); raise this limit, or set output.save_model: "
                       "false",
                       (unsigned long long)file, (unsigned long long)limit.rlim_cur);
    }
    return nd_fs_check_space(dir, all + inputs->side_bytes, "the trained model");
}

/* The model, and one checkpoint beside the `count` ones that are there, must fit. */
static nd_status check_room(const nd_config *config, const nd_inputs *inputs, const char *dir,
                            int count)
{
    ND_TRY(config->output.save_model ? check_room_for_model(config, inputs, dir) : ND_OK);
    if (config->checkpoint.interval == 0) {
        return ND_OK;
    }
    const nd_status status =
        nd_fs_check_space(dir, nd_run_checkpoint_bytes(config, inputs), "a checkpoint");
    if (status != ND_OK && count > 1) {
        const nd_error error = *nd_error_last();
        return nd_fail(status,
                       "%s; of the %d checkpoints there `ndtrain ckpt prune %s --keep-last 1` "
                       "leaves the newest good one",
                       error.message, count, dir);
    }
    return status;
}

/* When not all checkpoints that are to be kept fit, beside the one being written, a later save may
 * find a full disk. */
static void warn_of_room(const nd_run *s, int count)
{
    const nd_config *config = s->config;
    const int64_t more = config->checkpoint.keep_last + 1 - count;
    char purpose[64];
    snprintf(purpose, sizeof purpose, "keeping %lld more checkpoints", (long long)more);
    if (config->checkpoint.interval > 0 && config->checkpoint.keep_last > 0 && more > 1 &&
        nd_fs_check_space(s->dir, s->checkpoint_bytes * (uint64_t)more, purpose) != ND_OK) {
        nd_log_warning("%s (checkpoint.keep_last is %lld, and one is being written)",
                       nd_error_last()->message, (long long)config->checkpoint.keep_last);
        nd_error_clear();
    }
}

nd_status nd_run_folder_check(const nd_config *config, const nd_inputs *inputs,
                              const char *continued)
{
    const char *dir = config->output.dir[0] ? config->output.dir : "runs";
    char *existing = NULL;
    bool there = false;
    nd_status status = ND_OK;
    if (continued) {
        return check_writable(continued);
    }
    ND_TRY(nd_fs_check_folders(dir, "the run folder", advice, &existing));
    ND_TRY_OUT(nd_fs_exists(dir, &there));
    ND_TRY_OUT(!there ? ND_OK : config->output.dir[0] ? check_fresh(dir) : check_writable(dir));
    /* A disk that is too full is an error before the folder is made. */
    ND_TRY_OUT(nd_fs_check_space(existing, 1, "the run folder"));
    ND_TRY_OUT(check_room(config, inputs, existing, 0));
out:
    free(existing);
    return status;
}

nd_status nd_run_folder_create(const nd_config *config, char **out)
{
    if (config->output.dir && config->output.dir[0]) {
        ND_TRY(nd_fs_make_folders(config->output.dir, "the run folder", advice));
        ND_TRY(check_fresh(config->output.dir));
        return nd_fs_format(out, "%s", config->output.dir);
    }
    char name[128], path[192];
    name_of(config, name);
    ND_TRY(nd_fs_make_folders("runs", "the run folder", advice));
    /* mkdir fails for the later of two runs that start together, so each gets its own folder. */
    for (int n = 1; n < 1000000; n++) {
        snprintf(path, sizeof path, "runs/%s-%d", name, n);
        if (mkdir(path, 0777) == 0) {
            ND_TRY(nd_fs_sync_folder("runs"));
            return nd_fs_format(out, "%s", path);
        }
        if (errno != EEXIST) {
            return nd_fail(ND_ERR_CANTCREATE, "the run folder %s cannot be created: %s; %s", path,
                           strerror(errno), advice);
        }
    }
    return nd_fail(ND_ERR_CANTCREATE, "runs/ holds a million runs of %s; %s", name, advice);
}

/* The number of a folder "<name>-<number>"; 0: another name. */
static int64_t run_number(const char *folder, const char *name)
{
    size_t length = strlen(name);
    const char *digits = folder + length + 1;
    if (strncmp(folder, name, length) != 0 || folder[length] != '-' || !*digits ||
        digits[strspn(digits, "0123456789")] || strlen(digits) > 9) {
        return 0;
    }
    return atoll(digits);
}

nd_status nd_run_folder_newest(const nd_config *config, char **out)
{
    char name[128];
    int64_t hidden = 0; /* the newest that may not be read */
    nd_fs_names names;
    nd_status status = ND_OK;
    name_of(config, name);
    *out = NULL;
    ND_TRY(nd_fs_list("runs", &names));
    /* From the newest run down: what cannot be examined in an older one does not matter. */
    for (int64_t below = INT64_MAX, newest; status == ND_OK && !*out && below > 0; below = newest) {
        char path[300];
        nd_folder *list = NULL;
        int count = 0;
        bool folder = false;
        newest = 0;
        for (int i = 0; i < names.count; i++) {
            const int64_t number = run_number(names.list[i], name);
            if (number > newest && number < below) {
                newest = number;
                snprintf(path, sizeof path, "runs/%s", names.list[i]);
            }
        }
        status = newest > 0 ? nd_fs_is_folder(path, &folder) : ND_OK;
        if (!folder) {
            continue;
        }
        if (access(path, R_OK | X_OK) != 0 && errno == EACCES) {
            hidden = hidden > 0 ? hidden : newest;
            continue;
        }
        /* Also where all of them are damaged: the search then says so, and takes no other run. */
        status =
            nd_folder_list(path, ND_FOLDER_WHOLE | ND_FOLDER_BAD | ND_FOLDER_OURS, &list, &count);
        free(list);
        status = status == ND_OK && count > 0 ? nd_fs_format(out, "%s", path) : status;
    }
    nd_fs_names_fini(&names);
    if (status == ND_OK && hidden > 0) {
        nd_log_warning("runs/%s-%lld may not be read, and is passed over in the search for the "
                       "newest run",
                       name, (long long)hidden);
    }
    return status;
}

static nd_status open_on_rank_0(nd_run *s)
{
    const nd_config *config = s->config;
    nd_folder *list = NULL;
    int count = 0;
    s->lock.fd = -1;
    s->continues = s->resume.continues;
    s->checkpoint_bytes = nd_run_checkpoint_bytes(config, s->inputs);
    if (s->continues) {
        ND_TRY(check_writable(s->resume.run));
        ND_TRY(nd_fs_format(&s->dir, "%s", s->resume.run));
    } else {
        bool there = false;
        ND_TRY(nd_run_folder_check(config, s->inputs, NULL));
        ND_TRY(config->output.dir[0] ? nd_fs_exists(config->output.dir, &there) : ND_OK);
        ND_TRY(nd_run_folder_create(config, &s->dir));
        s->made = !there;
    }
    ND_TRY(nd_run_lock_acquire(s->dir, &s->lock));
    if (!s->lock.held) {
        nd_log_warning("the file system of \"%s\" has no locks; no second run may use this folder",
                       s->dir);
    }
    if (s->continues || config->checkpoint.interval > 0) {
        ND_TRY(nd_checkpoint_sweep(s->dir));
    }
    ND_TRY(nd_folder_list(s->dir, ND_FOLDER_WHOLE, &list, &count));
    free(list);
    ND_TRY(check_room(config, s->inputs, s->dir, count));
    warn_of_room(s, count);
    ND_TRY(nd_run_record(s));
    const nd_report_options options = {
        .config = config,
        .shape = &s->rank->shape,
        .dir = s->dir,
        .world_size = s->rank->world_size,
        .tokens_per_step = config->train.sequence_length * nd_step_blocks(config),
        .terminal = s->worker->identity.terminal,
        .continues = s->continues,
    };
    return nd_sinks_open(&s->sinks, &options);
}

/* The look is for what the ranks write. */
static bool is_looked_at(const nd_run *s)
{
    return (s->config->checkpoint.interval > 0 || s->config->log.dump_tensors[0]) &&
           s->rank->world_size > 1;
}

static nd_status describe_place(nd_run *s)
{
    const char *id = s->worker->identity.run_id;
    nd_run_place *place = &s->place;
    if (!realpath(s->dir, place->path)) {
        return nd_fail(ND_ERR_IO, "the run folder %s is gone: %s", s->dir, strerror(errno));
    }
    snprintf(place->id, sizeof place->id, "%s", id);
    if (!id[0]) {
        snprintf(place->id, sizeof place->id, "%lld", (long long)nd_clock_ns());
    }
    if (!is_looked_at(s)) {
        return ND_OK;
    }
    snprintf(place->record, sizeof place->record, "%s", strrchr(s->record, '/') + 1);
    return nd_sha256_file(s->record, place->digest);
}

/* Returns whether this rank reads what rank 0 has written. Opens the folders on the way first,
 * since an open makes a network file system ask its server. */
static bool sees_record(const nd_run_place *place)
{
    char path[ND_RUN_PATH_MAX + 64], digest[ND_HASH_HEX_MAX] = "", *parent = NULL;
    snprintf(path, sizeof path, "%s/%s", place->path, place->record);
    if (nd_fs_parent(place->path, &parent) == ND_OK) {
        const int folders[] = {nd_fs_open_folder(parent), nd_fs_open_folder(place->path)};
        (void)nd_sha256_file(path, digest);
        for (int i = 0; i < 2; i++) {
            if (folders[i] >= 0) {
                close(folders[i]);
            }
        }
    }
    nd_error_clear(); /* not seen yet */
    free(parent);
    return strcmp(digest, place->digest) == 0;
}

/* A network file system may show an older state for a moment. The others wait in a collective
 * meanwhile, whose deadline is launch.comm_timeout_seconds. */
static nd_status look_for_record(const nd_run *s)
{
    const nd_identity *identity = &s->worker->identity;
    const struct timespec pause = {0, 50000000};
    const double most = s->config->launch.comm_timeout_seconds / 8;
    const double end = nd_clock_seconds() + (most < 5 ? most : 5);
    bool there = false, seen = sees_record(&s->place);
    while (!seen && nd_clock_seconds() < end) {
        nanosleep(&pause, NULL);
        seen = sees_record(&s->place);
    }
    ND_TRY(seen ? ND_OK : nd_fs_exists(s->place.path, &there));
    return seen ? ND_OK
                : nd_fail(ND_ERR_CANTCREATE,
                          "rank %d on %s does not see the run folder of rank 0: %s %.300s there; "
                          "all nodes write their part of a checkpoint or dump to it, so give a "
                          "folder of a shared file system as --save-dir (output.dir)",
                          identity->rank, identity->host,
                          there ? "another folder is" : "nothing is", s->place.path);
}

/*
 * On rank 0 the folder with its lock, run.json and sinks, and the banner. All ranks then learn its
 * path and the name of this start, and look at it where they will write to it: a rank that does not
 * read the run.json of rank 0 has the folder of another disk under that path, or none. Comes
 * before all else that needs the folder, so that no rank waits behind one that is not opened.
 */
static nd_status open_folder(nd_run *s)
{
    nd_status opened = s->rank->rank == 0 ? open_on_rank_0(s) : ND_OK;
    opened = opened == ND_OK && s->dir ? describe_place(s) : opened;
    ND_TRY(nd_run_tell_all(s->worker, "run folder", opened, "could not open the run folder",
                           &s->place, sizeof s->place));
    return is_looked_at(s)
               ? nd_shared_agree(s->rank, look_for_record(s), "the run folder of rank 0")
               : ND_OK;
}

static void close_folder(nd_run *s)
{
    nd_sinks_close(&s->sinks);
    if (s->dir) {
        nd_run_lock_release(&s->lock);
    }
    free(s->dir);
}

nd_status nd_run_set_aside(const nd_run *s, const char *name)
{
    char path[ND_RUN_PATH_MAX + 64];
    bool there = false;
    if (!s->continues) {
        return ND_OK;
    }
    snprintf(path, sizeof path, "%s/%s", s->dir, name);
    ND_TRY(nd_fs_exists(path, &there));
    return there ? nd_fs_set_aside(path, path, "old", NULL) : ND_OK;
}

void nd_run_forget(const nd_run *s)
{
    static const char *const names[] = {"run.json", "metrics.jsonl", ".lock", "tensorboard"};
    const int count = !s->record[0] || s->continues ? 0 : s->made ? 4 : 2;
    for (int i = 0; i < count; i++) {
        char path[ND_RUN_PATH_MAX + 64];
        snprintf(path, sizeof path, "%s/%s", s->dir, names[i]);
        nd_fs_remove_tree(path);
    }
    if (s->dir && s->made) {
        (void)rmdir(s->dir); /* stays where it holds what others have put there */
    }
}

/* These functions handle what lies in the folder beside checkpoints. */

/* Anonymous and shared memory of this process now: what the plan counts, without mapped files. */
static int64_t resident_bytes(void)
{
    char line[256];
    long long kib, total = 0;
    FILE *f = nd_fs_stream_kernel("/proc/self/status");
    while (f && fgets(line, sizeof line, f)) {
        if (sscanf(line, "RssAnon: %lld kB", &kib) == 1 ||
            sscanf(line, "RssShmem: %lld kB", &kib) == 1) {
            total += kib;
        }
    }
    if (f) {
        fclose(f);
    }
    return total * 1024;
}

/* Writes the times of rank 0's steps to trace.json, or trace-2.json, ... A full disk costs this
 * file, and not the checkpoint and the model, which come after it. */
static nd_status write_trace(nd_run *s)
{
    const nd_trace *trace = &s->rank->trace;
    const int64_t steps = s->trainer->position.step - s->trace_from;
    char text[4096], path[ND_RUN_PATH_MAX];
    if (!s->dir) {
        return ND_OK;
    }
    int used = snprintf(text, sizeof text,
                        "{\"first_step\": %lld, \"steps\": %lld, \"resident_bytes\": %lld, "
                        "\"validation_ms\": %.3f",
                        (long long)s->trace_from + 1, (long long)steps, (long long)resident_bytes(),
                        s->validation_seconds * 1e3);
    for (nd_trace_kind k = 0; k < ND_TRACE_COUNT; k++) {
        used += snprintf(text + used, sizeof text - (size_t)used,
                         ", \"%s_ms\": %.3f, \"%s_calls\": %lld", nd_trace_name(k),
                         (double)trace->ns[k] * 1e-6, nd_trace_name(k), (long long)trace->calls[k]);
    }
    used += snprintf(text + used, sizeof text - (size_t)used, "}\n");
    nd_status status = nd_run_file_next(s->dir, "trace", ".json", path);
    status = status == ND_OK ? nd_fs_write_atomic(path, text, (size_t)used) : status;
    if (status == ND_ERR_CANTCREATE) {
        nd_log_warning("the run leaves no trace.json, and goes on: %s", nd_error_last()->message);
        nd_error_clear();
        return ND_OK;
    }
    return status;
}

const nd_run_stage nd_run_folder = {
    .open = open_folder, .finish = write_trace, .close = close_folder};

/* Where log.dump_tensors asks for it, this makes RUN/dumps, or RUN/dumps-2, ... if earlier starts
 * have left theirs, and gives the trainer its dump. */
static nd_status open_dumps(nd_run *s)
{
    nd_trainer *t = s->trainer;
    const char *steps = s->config->log.dump_steps;
    char path[ND_RUN_PATH_MAX] = "";
    int64_t first, last;
    if (!s->config->log.dump_tensors[0]) {
        return ND_OK;
    }
    ND_TRY(nd_dump_check(s->config, &s->rank->shape));
    if (nd_config_steps(steps, &first, &last) && last <= t->position.step) {
        if (s->dir) {
            nd_log_warning("no tensor is dumped: log.dump_steps is %s, and the run goes on after "
                           "step %lld",
                           steps, (long long)t->position.step);
        }
        return ND_OK;
    }
    nd_status made = s->dir ? nd_run_file_next(s->place.path, "dumps", "", path) : ND_OK;
    made = made == ND_OK && s->dir ? nd_fs_make_own_folder(path) : made;
    ND_TRY(nd_run_tell_all(s->worker, "dumps", made, "could not make the folder of dumps", path,
                           sizeof path));
    if (s->dir) {
        nd_log_info("tensors of step %s are dumped to %s", steps, path);
    }
    return nd_dump_create(s->rank, t->model->layout, &t->model->dims, path, &t->dump);
}

const nd_run_stage nd_run_dumps = {.open = open_dumps};

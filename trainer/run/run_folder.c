// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/run_folder.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "trainer/worker/worker.h"

static const char *const advice = "give another folder with --save-dir";

static nd_status make_path(const char *path)
{
    return nd_fs_make_folders(path, "the run folder", advice);
}

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

/* A restart of a fresh run would take a checkpoint of ours that is there already. */
static nd_status check_no_checkpoint(const char *dir)
{
    nd_folder *list = NULL;
    int count = 0;
    ND_TRY(nd_folder_list(dir, ND_FOLDER_WHOLE | ND_FOLDER_OURS, &list, &count));
    nd_status status = count > 0 ? fail_holds_run(dir, list[count - 1].name) : ND_OK;
    free(list);
    return status;
}

/* A folder that is there, and holds no run yet. */
static nd_status check_fresh(const char *dir)
{
    static const char *const marks[] = {"run.json", "metrics.jsonl", "trace.json", "model"};
    ND_TRY(check_writable(dir));
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) {
        bool there = false;
        ND_TRY(nd_fs_has(dir, marks[i], &there));
        if (there) {
            return fail_holds_run(dir, marks[i]);
        }
    }
    return check_no_checkpoint(dir);
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

/* The largest file of a model, which is sharded above ND_HF_FILE_BYTES, against ulimit -f. */
static nd_status check_file_limit(uint64_t model_bytes)
{
    struct rlimit limit;
    uint64_t bytes = model_bytes < ND_HF_FILE_BYTES ? model_bytes : ND_HF_FILE_BYTES;
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
        bytes <= limit.rlim_cur) {
        return ND_OK;
    }
    return nd_fail(ND_ERR_CANTCREATE,
                   "the trained model needs a file of %llu bytes, but files of at most %llu may be "
                   "written (ulimit -f); raise this limit, or set output.save_model: false",
                   (unsigned long long)bytes, (unsigned long long)limit.rlim_cur);
}

static uint64_t weights_bytes(const nd_config *config, const nd_inputs *inputs)
{
    const uint64_t width = config->output.dtype == ND_WEIGHTS_FP32 ? 4 : 2;
    return (uint64_t)nd_shape_parameters(&inputs->shape) * width + SMALL_FILES_BYTES;
}

/* About what the model takes that the run saves as a Hugging Face folder, side files included. */
static uint64_t model_bytes(const nd_config *config, const nd_inputs *inputs)
{
    return weights_bytes(config, inputs) + inputs->side_bytes;
}

uint64_t nd_run_checkpoint_bytes(const nd_config *config, const nd_inputs *inputs)
{
    const uint64_t arrays = config->optimizer.name == ND_OPTIMIZER_ADAMW ? 3 : 1;
    const uint64_t heads = (uint64_t)nd_mesh_world_size(&config->resolved_mesh) * 65536;
    return (uint64_t)nd_shape_parameters(&inputs->shape) * 4 * arrays + heads + SMALL_FILES_BYTES +
           (config->checkpoint.export_model ? model_bytes(config, inputs) : 0);
}

/* A disk that is too full for the model is an error before training, not after it. */
static nd_status check_room_for_model(const nd_config *config, const nd_inputs *inputs,
                                      const char *dir)
{
    if (!config->output.save_model) {
        return ND_OK;
    }
    ND_TRY(check_file_limit(weights_bytes(config, inputs)));
    return nd_fs_check_space(dir, model_bytes(config, inputs), "the trained model");
}

nd_status nd_run_folder_check(const nd_config *config, const nd_inputs *inputs,
                              const char *continued)
{
    const char *dir = config->output.dir[0] ? config->output.dir : "runs";
    char *existing = NULL;
    bool there = false;
    if (continued) {
        return check_writable(continued);
    }
    ND_TRY(nd_fs_check_folders(dir, "the run folder", advice, &existing));
    nd_status status = nd_fs_exists(dir, &there);
    if (status == ND_OK && there) {
        status = config->output.dir[0] ? check_fresh(dir) : check_writable(dir);
    }
    /* A disk that is too full is an error before the folder is made. */
    status = status == ND_OK ? nd_fs_check_space(existing, 1, "the run folder") : status;
    status = status == ND_OK ? check_room_for_model(config, inputs, existing) : status;
    if (status == ND_OK && config->checkpoint.interval > 0) {
        status =
            nd_fs_check_space(existing, nd_run_checkpoint_bytes(config, inputs), "a checkpoint");
    }
    free(existing);
    return status;
}

nd_status nd_run_folder_create(const nd_config *config, char **out)
{
    if (config->output.dir && config->output.dir[0]) {
        ND_TRY(make_path(config->output.dir));
        ND_TRY(check_fresh(config->output.dir));
        return nd_fs_format(out, "%s", config->output.dir);
    }
    char name[128], path[192];
    name_of(config, name);
    ND_TRY(make_path("runs"));
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

/* Also where all of them are damaged: the search then says so, and takes no other run. */
static nd_status has_checkpoints(const char *run, bool *out)
{
    nd_folder *list = NULL;
    int whole = 0, bad = 0;
    ND_TRY(nd_folder_list(run, ND_FOLDER_WHOLE, &list, &whole));
    free(list);
    ND_TRY(nd_folder_list(run, ND_FOLDER_BAD | ND_FOLDER_OURS, &list, &bad));
    free(list);
    *out = whole + bad > 0;
    return ND_OK;
}

nd_status nd_run_folder_newest(const nd_config *config, char **out)
{
    char name[128];
    int64_t newest = 0, hidden = 0; /* hidden: may not be read */
    nd_fs_names names;
    nd_status status = ND_OK;
    name_of(config, name);
    *out = NULL;
    ND_TRY(nd_fs_list("runs", &names));
    for (int i = 0; i < names.count && status == ND_OK; i++) {
        int64_t number = run_number(names.list[i], name);
        char path[300];
        bool has = false, folder = false;
        snprintf(path, sizeof path, "runs/%s", names.list[i]);
        status = number > newest ? nd_fs_is_folder(path, &folder) : ND_OK;
        if (!folder) {
            continue;
        }
        if (access(path, R_OK | X_OK) != 0 && errno == EACCES) {
            hidden = number > hidden ? number : hidden;
            continue;
        }
        status = has_checkpoints(path, &has);
        if (status == ND_OK && has) {
            newest = number;
            free(*out);
            status = nd_fs_format(out, "%s", path);
        }
    }
    nd_fs_names_fini(&names);
    if (status == ND_OK && hidden > newest) {
        nd_log_warning("runs/%s-%lld may not be read, and is passed over in the search for the "
                       "newest run",
                       name, (long long)hidden);
    }
    return status;
}

/* One checkpoint must fit. When not all that are to be kept fit, beside the one being written, a
 * later save may find a full disk: a warning. */
static nd_status check_room_for_checkpoints(const nd_config *config, const nd_inputs *inputs,
                                            const char *dir)
{
    nd_folder *list = NULL;
    int count = 0;
    if (config->checkpoint.interval == 0) {
        return ND_OK;
    }
    const uint64_t bytes = nd_run_checkpoint_bytes(config, inputs);
    ND_TRY(nd_folder_list(dir, ND_FOLDER_WHOLE, &list, &count));
    free(list);
    nd_status status = nd_fs_check_space(dir, bytes, "a checkpoint");
    if (status != ND_OK && count > 1) {
        const nd_error error = *nd_error_last();
        return nd_fail(status,
                       "%s; of the %d checkpoints there `ndtrain ckpt prune %s --keep-last 1` "
                       "leaves the newest good one",
                       error.message, count, dir);
    }
    ND_TRY(status);
    int64_t more = config->checkpoint.keep_last + 1 - count;
    char purpose[64];
    snprintf(purpose, sizeof purpose, "keeping %lld more checkpoints", (long long)more);
    if (config->checkpoint.keep_last > 0 && more > 1 &&
        nd_fs_check_space(dir, bytes * (uint64_t)more, purpose) != ND_OK) {
        nd_log_warning("%s (checkpoint.keep_last is %lld, and one is being written)",
                       nd_error_last()->message, (long long)config->checkpoint.keep_last);
        nd_error_clear();
    }
    return ND_OK;
}

nd_status nd_run_files_open(nd_run_files *files, const nd_run_context *run,
                            const nd_trainer *trainer, const char *continued)
{
    const nd_rank *r = trainer->rank;
    const nd_config *config = r->config;
    files->lock.fd = -1;
    files->continues = continued[0] != '\0';
    if (files->continues) {
        ND_TRY(check_writable(continued));
        ND_TRY(nd_fs_format(&files->dir, "%s", continued));
    } else {
        bool there = false;
        ND_TRY(nd_run_folder_check(config, run->inputs, NULL));
        ND_TRY(config->output.dir[0] ? nd_fs_exists(config->output.dir, &there) : ND_OK);
        ND_TRY(nd_run_folder_create(config, &files->dir));
        files->made = !there;
    }
    ND_TRY(nd_run_lock_acquire(files->dir, &files->lock));
    if (!files->lock.held) {
        nd_log_warning("the file system of \"%s\" has no locks; no second run may use this folder",
                       files->dir);
    }
    if (files->continues || config->checkpoint.interval > 0) {
        ND_TRY(nd_checkpoint_sweep(files->dir));
    }
    ND_TRY(check_room_for_model(config, run->inputs, files->dir));
    ND_TRY(check_room_for_checkpoints(config, run->inputs, files->dir));
    ND_TRY(nd_run_record_make(files, run, trainer));
    files->recorded = true;
    ND_TRY(nd_banner_print(run, trainer, files->dir));
    nd_report_options options = {
        .config = config,
        .shape = &r->shape,
        .dir = files->dir,
        .world_size = r->world_size,
        .tokens_per_step = config->train.sequence_length * nd_step_blocks(config),
        .terminal = run->worker->identity.terminal,
        .continues = files->continues,
    };
    return nd_sinks_open(&files->sinks, &options);
}

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

static char *trace_text(const nd_run_trace *trace, size_t *size)
{
    char *text = NULL;
    FILE *out = open_memstream(&text, size);
    if (!out) {
        return NULL;
    }
    fprintf(out,
            "{\"first_step\": %lld, \"steps\": %lld, \"resident_bytes\": %lld, "
            "\"validation_ms\": %.3f",
            (long long)trace->first_step, (long long)trace->steps, (long long)resident_bytes(),
            trace->validation_seconds * 1e3);
    for (nd_trace_kind k = 0; k < ND_TRACE_COUNT; k++) {
        fprintf(out, ", \"%s_ms\": %.3f, \"%s_calls\": %lld", nd_trace_name(k),
                (double)trace->trace->ns[k] * 1e-6, nd_trace_name(k),
                (long long)trace->trace->calls[k]);
    }
    fprintf(out, "}\n");
    if (fclose(out) != 0) {
        free(text);
        return NULL;
    }
    return text;
}

nd_status nd_run_files_trace(const nd_run_files *files, const nd_run_trace *trace)
{
    size_t size = 0;
    char *path = NULL, *text = trace_text(trace, &size);
    nd_status status =
        text ? nd_run_file_next(files->dir, "trace", &path) : nd_fail_memory("trace.json");
    if (status == ND_OK) {
        status = nd_fs_write_atomic(path, text, size);
    }
    free(path);
    free(text);
    return status;
}

nd_status nd_run_files_set_aside(const nd_run_files *files, const char *name)
{
    char *path = NULL;
    if (!files->continues) {
        return ND_OK;
    }
    bool there = false;
    ND_TRY(nd_fs_format(&path, "%s/%s", files->dir, name));
    nd_status status = nd_fs_exists(path, &there);
    status = status == ND_OK && there ? nd_fs_set_aside(path, "old", NULL) : status;
    free(path);
    return status;
}

void nd_run_files_forget(const nd_run_files *files)
{
    static const char *const names[] = {"run.json", "metrics.jsonl", ".lock", "tensorboard"};
    const int count = !files->recorded || files->continues ? 0 : files->made ? 4 : 2;
    for (int i = 0; i < count; i++) {
        char path[4352];
        snprintf(path, sizeof path, "%s/%s", files->dir, names[i]);
        nd_fs_remove_tree(path);
    }
    if (files->dir && files->made) {
        (void)rmdir(files->dir); /* stays where it holds what others have put there */
    }
}

void nd_run_files_close(nd_run_files *files)
{
    nd_sinks_close(&files->sinks);
    if (files->dir) {
        nd_run_lock_release(&files->lock);
    }
    free(files->dir);
    files->dir = NULL;
}

// SPDX-License-Identifier: Apache-2.0
/* Finds and loads what a run goes on from: lists the checkpoints of a folder, judges each by its
 * manifest, and picks the newest that can be used. What is damaged is passed over. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "runtime/base/suggest.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/run/state.h"

#define RESUME_IS "--resume-from-checkpoint (checkpoint.resume) is %s, but "

/* An absolute path without links, which all nodes see alike. */
static nd_status absolute(const char *path, char out[ND_RUN_PATH_MAX])
{
    return realpath(path, out)
               ? ND_OK
               : nd_fail(nd_fs_blame(errno, ND_ERR_DATA), "the folder %s cannot be opened: %s",
                         path, strerror(errno));
}

/* One checkpoint. */

typedef enum verdict {
    USABLE,
    DAMAGED,
    UNKNOWN /* a link to a disk that is not mounted, or of a newer program: it may be good */
} verdict;

/* By its manifest; the thread's error says what is wrong with it. A disk that fails is an error. */
static nd_status judge(const char *path, verdict *out)
{
    nd_manifest manifest = {0};
    nd_fs_kind kind;
    ND_TRY(nd_fs_look(path, &kind, NULL));
    const nd_status status = nd_manifest_read(path, &manifest);
    const bool damaged = kind == ND_FS_FOLDER && !manifest.is_newer;
    *out = status == ND_OK ? USABLE : damaged ? DAMAGED : UNKNOWN;
    nd_manifest_fini(&manifest);
    return status == ND_ERR_DATA ? ND_OK : status;
}

static nd_status check_link(const char *path)
{
    nd_fs_kind target;
    bool named;
    ND_TRY(nd_fs_exists(path, &named));
    ND_TRY(nd_fs_look(path, &target, NULL));
    return !named || target != ND_FS_ABSENT
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "%s is a link that leads nowhere; mount the disk that it leads to, or "
                         "name the step of another checkpoint with --resume-from-checkpoint",
                         path);
}

/* Ways to pass over a damaged checkpoint: without a word, since a later search will say so; with a
 * warning; or with a warning and a new name. */
typedef enum passing { PASS_QUIETLY, PASS_SAYING, PASS_RENAMING } passing;

static nd_status pass_over(const char *run, int64_t step, passing how)
{
    const nd_error error = *nd_error_last();
    char *aside = NULL;
    nd_error_clear();
    if (how == PASS_SAYING) {
        nd_log_warning("checkpoint %lld cannot be used, so an older one is looked for: %s",
                       (long long)step, error.message);
    } else if (how == PASS_RENAMING) {
        ND_TRY(nd_checkpoint_set_aside(run, step, "bad", &aside));
        nd_log_warning("checkpoint %lld cannot be used and is now %s: %s", (long long)step, aside,
                       error.message);
    }
    free(aside);
    return ND_OK;
}

/* The newest checkpoint of a run folder that can be used; *step is -1 without one. */
static nd_status pick_newest(const nd_resume_search *search, const char *run, passing how,
                             int64_t *step)
{
    nd_folder *list = NULL;
    int count = 0;
    nd_status status = ND_OK;
    *step = -1;
    ND_TRY(nd_folder_list(run, ND_FOLDER_WHOLE | ND_FOLDER_OURS, &list, &count));
    for (int i = count - 1; i >= 0 && *step < 0; i--) {
        char path[ND_RUN_PATH_MAX + 256];
        verdict found = UNKNOWN;
        if (search->below >= 0 && list[i].step >= search->below) {
            continue;
        }
        snprintf(path, sizeof path, "%s/%s", run, list[i].name);
        ND_TRY_OUT(check_link(path));
        ND_TRY_OUT(judge(path, &found));
        *step = found == USABLE ? list[i].step : -1;
        ND_TRY_OUT(found == UNKNOWN ? nd_error_last()->status : ND_OK);
        ND_TRY_OUT(found == DAMAGED ? pass_over(run, list[i].step, how) : ND_OK);
    }
out:
    free(list);
    return status;
}

/* "checkpoint-100, checkpoint-200", for messages: the newest folders of a kind; "" where there is
 * none. */
static nd_status list_names(const char *run, nd_folder_kind kind, char out[400])
{
    nd_folder *list = NULL;
    int count = 0;
    size_t used = 0;
    out[0] = '\0';
    ND_TRY(nd_folder_list(run, (int)kind, &list, &count));
    for (int i = count > 8 ? count - 8 : 0; i < count && used < 400; i++) {
        used += (size_t)snprintf(out + used, 400 - used, "%s%s", used ? ", " : "", list[i].name);
    }
    free(list);
    return ND_OK;
}

/* The source is the checkpoint of this step in a run folder, in which the run goes on. */
static nd_status take_checkpoint(nd_resume *out, const char *run, int64_t step)
{
    char name[ND_CHECKPOINT_NAME_MAX];
    ND_TRY(absolute(run, out->run));
    nd_checkpoint_name(step, name);
    const int length = snprintf(out->source, sizeof out->source, "%s/%s", out->run, name);
    out->found = true;
    out->continues = true;
    out->step = step;
    return length < (int)sizeof out->source
               ? ND_OK
               : nd_fail(ND_ERR_CONFIG, "the path %s is too long; use one of less than %d bytes",
                         run, ND_RUN_PATH_MAX);
}

/* The run folder that latest, auto and steps refer to; "" when there is none. */
static nd_status find_run(const nd_resume_search *search, char out[ND_RUN_PATH_MAX])
{
    const char *run = search->run_folder[0] ? search->run_folder : search->config->output.dir;
    char *newest = NULL;
    ND_TRY(run[0] ? ND_OK : nd_run_folder_newest(search->config, &newest));
    snprintf(out, ND_RUN_PATH_MAX, "%s", newest ? newest : run);
    free(newest);
    return ND_OK;
}

/* A run that must have a checkpoint has a folder. */
static nd_status check_run(const nd_config *config, const char *run)
{
    const char *resume = config->checkpoint.resume;
    bool there = false;
    ND_TRY(run[0] ? nd_fs_is_folder(run, &there) : ND_OK);
    if (there) {
        return ND_OK;
    }
    return run[0] ? nd_fail(ND_ERR_DATA,
                            RESUME_IS
                            "there is no folder %s; correct --save-dir (output.dir), or leave "
                            "--resume-from-checkpoint out for a fresh start there",
                            resume, run)
                  : nd_fail(ND_ERR_DATA,
                            RESUME_IS
                            "no run of this configuration in runs/ has a checkpoint; name its "
                            "folder with --save-dir, or the checkpoint itself with "
                            "--resume-from-checkpoint FOLDER",
                            resume);
}

static nd_status fail_damaged(const char *run, const char *names)
{
    char others[400];
    const char *comma = strrchr(names, ','), *bad = comma ? comma + 2 : names;
    ND_TRY(list_names(run, ND_FOLDER_WHOLE, others));
    return nd_fail(ND_ERR_DATA,
                   "no checkpoint of %s can be used, and %s %s damaged%s%s; `ndtrain ckpt "
                   "verify %s/%s` says how, `ndtrain export %s/%s OUT --no-verify` may "
                   "save a model, and another folder as output.dir begins afresh",
                   run, names, comma ? "are" : "is",
                   others[0] ? ", as may be what else is there: " : "", others, run, bad, run, bad);
}

/* latest and auto. */
static nd_status find_latest(const nd_resume_search *search, bool may_be_fresh, nd_resume *out)
{
    const passing how = search->sets_aside ? PASS_RENAMING : PASS_QUIETLY;
    char run[ND_RUN_PATH_MAX], names[400];
    int64_t step = -1;
    bool holds = false;
    ND_TRY(find_run(search, run));
    if (!run[0] && may_be_fresh) {
        return ND_OK;
    }
    ND_TRY(run[0] ? pick_newest(search, run, how, &step) : check_run(search->config, run));
    if (step >= 0) {
        out->searched = true;
        return take_checkpoint(out, run, step);
    }
    ND_TRY(list_names(run, ND_FOLDER_BAD, names));
    if (names[0]) {
        return fail_damaged(run, names);
    }
    /* A run that ended before its first checkpoint begins again in its folder. */
    ND_TRY(nd_fs_has(run, "metrics.jsonl", &holds));
    ND_TRY(holds ? ND_OK : nd_fs_has(run, "run.json", &holds));
    if (may_be_fresh) {
        out->continues = holds;
        return holds ? absolute(run, out->run) : ND_OK;
    }
    ND_TRY(check_run(search->config, run));
    ND_TRY(pick_newest(search, run, PASS_SAYING, &step)); /* no search follows that would say why */
    ND_TRY(list_names(run, ND_FOLDER_WHOLE, names));
    return nd_fail(ND_ERR_DATA,
                   RESUME_IS
                   "%s has no checkpoint that can be used (there: %s); name another with "
                   "--resume-from-checkpoint, or leave it out for a fresh start in another "
                   "folder%s",
                   search->config->checkpoint.resume, run, names[0] ? names : "none",
                   holds ? ", or give auto to begin this run again in its folder" : "");
}

static nd_status find_step(const nd_resume_search *search, int64_t step, nd_resume *out)
{
    const char *resume = search->config->checkpoint.resume;
    char run[ND_RUN_PATH_MAX], path[ND_RUN_PATH_MAX + 64], name[ND_CHECKPOINT_NAME_MAX], names[400];
    bool ours = false, there = false;
    ND_TRY(find_run(search, run));
    ND_TRY(check_run(search->config, run));
    snprintf(path, sizeof path, "%s/%s", run, nd_checkpoint_name(step, name));
    ND_TRY(check_link(path));
    ND_TRY(nd_fs_is_folder(path, &there));
    ND_TRY(nd_checkpoint_is_ours(path, &ours));
    if (ours) {
        return take_checkpoint(out, run, step);
    }
    if (there) {
        return nd_fail(ND_ERR_DATA,
                       RESUME_IS "%s is no checkpoint of ndtrain; to begin with its weights, give "
                                 "its path as --model-path, and another --save-dir",
                       resume, path);
    }
    ND_TRY(list_names(run, ND_FOLDER_WHOLE, names));
    return nd_fail(ND_ERR_DATA, RESUME_IS "%s has no %s; the newest there are: %s", resume, run,
                   name, names[0] ? names : "none");
}

/* Folders that the user names. */

/* Finds whether a run that takes a checkpoint from this folder (an absolute path) goes on in it. */
static nd_status is_continued(const nd_config *config, const char *run, int32_t *out)
{
    char given[ND_RUN_PATH_MAX] = "";
    bool there = false, holds = false;
    ND_TRY(nd_fs_is_folder(config->output.dir, &there));
    ND_TRY(there ? absolute(config->output.dir, given) : ND_OK);
    ND_TRY(nd_fs_has(run, "metrics.jsonl", &holds));
    *out = holds && (!config->output.dir[0] || strcmp(given, run) == 0);
    return ND_OK;
}

static nd_status fail_no_folder(const char *folder)
{
    static const char *const words[] = {"latest", "auto", "true"};
    nd_suggest search;
    nd_suggest_init(&search, folder);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        nd_suggest_offer(&search, words[i]);
    }
    return nd_fail(ND_ERR_DATA,
                   RESUME_IS "there is no such folder%s%s%s; give latest, auto, a step, or the "
                             "folder of a checkpoint",
                   folder, search.best ? " (did you mean " : "", search.best ? search.best : "",
                   search.best ? "?)" : "");
}

/* A checkpoint, or a run folder. */
static nd_status find_folder(const nd_resume_search *search, const char *folder, nd_resume *out)
{
    char place[ND_RUN_PATH_MAX], *parent = NULL;
    int32_t continues = false;
    bool there, ours;
    ND_TRY(nd_fs_is_folder(folder, &there));
    if (!there) {
        return fail_no_folder(folder);
    }
    ND_TRY(absolute(folder, place));
    ND_TRY(nd_checkpoint_is_ours(place, &ours));
    if (ours) { /* its run is the folder that holds it, unless another is given */
        nd_manifest manifest = {0};
        ND_TRY(nd_manifest_read(place, &manifest));
        out->found = true;
        out->step = manifest.position.step;
        nd_manifest_fini(&manifest);
        snprintf(out->source, sizeof out->source, "%s", place);
        ND_TRY(nd_fs_parent(place, &parent));
        nd_status status = is_continued(search->config, parent, &out->continues);
        snprintf(out->run, sizeof out->run, "%s", out->continues ? parent : "");
        free(parent);
        return status;
    }
    ND_TRY(is_continued(search->config, place, &continues));
    const passing own = search->sets_aside ? PASS_RENAMING : PASS_QUIETLY;
    ND_TRY(pick_newest(search, place, continues ? own : PASS_SAYING, &out->step));
    if (out->step >= 0) {
        out->searched = true;
        ND_TRY(take_checkpoint(out, place, out->step));
        out->continues = continues;
        return ND_OK;
    }
    return nd_fail(ND_ERR_DATA,
                   RESUME_IS "this folder holds no checkpoint: neither checkpoint-N nor "
                             "manifest.json of ndtrain; to begin with the weights of a Hugging "
                             "Face folder, give it as --model-path",
                   folder);
}

nd_status nd_resume_find(const nd_resume_search *search, nd_resume *out)
{
    const char *resume = search->config->checkpoint.resume;
    const bool restart = search->run_folder[0], is_latest = strcmp(resume, "latest") == 0,
               is_auto = strcmp(resume, "auto") == 0;
    const size_t digits = strspn(resume, "0123456789");
    nd_resume_search first = *search;
    nd_resume found = {.step = -1};
    nd_status status = ND_OK;
    *out = found;
    ND_TRY(restart ? find_latest(search, true, out) : ND_OK);
    if (out->found) {
        return ND_OK;
    }
    /* A restart before the first checkpoint begins again where the job began. It goes on in its own
     * folder, whose checkpoints are the ones that it may rename. */
    first.run_folder = "";
    first.sets_aside = search->sets_aside && !restart;
    if (!resume[0] || (restart && (is_auto || (is_latest && search->below >= 0)))) {
        status = ND_OK;
    } else if (is_latest || is_auto) {
        status = find_latest(&first, is_auto, &found);
    } else if (resume[digits] == '\0' && digits < 18) {
        status = find_step(&first, strtoll(resume, NULL, 10), &found);
    } else {
        status = find_folder(&first, resume, &found);
    }
    if (status == ND_OK && restart) {
        found.continues = true;
        snprintf(found.run, sizeof found.run, "%s", out->run[0] ? out->run : search->run_folder);
    }
    *out = found;
    return status;
}

bool nd_resume_is_own(const nd_resume *resume)
{
    size_t length = strlen(resume->run);
    return resume->found && resume->continues && length > 0 &&
           strncmp(resume->source, resume->run, length) == 0 && resume->source[length] == '/';
}

nd_status nd_resume_set_later_aside(const nd_resume *resume)
{
    char path[ND_RUN_PATH_MAX + 64], name[ND_CHECKPOINT_NAME_MAX];
    nd_folder *list = NULL;
    int count = 0;
    nd_status status = ND_OK;
    if (!nd_resume_is_own(resume)) {
        return ND_OK;
    }
    snprintf(path, sizeof path, "%s/%s", resume->run, nd_checkpoint_name(resume->step, name));
    /* From checkpoint-6.old, checkpoint-6 is one of the others. */
    const int64_t last = resume->step - (strcmp(path, resume->source) != 0);
    ND_TRY(nd_folder_list(resume->run, ND_FOLDER_WHOLE | ND_FOLDER_OURS, &list, &count));
    for (int i = count - 1; i >= 0 && list[i].step > last; i--) {
        char *aside = NULL;
        verdict found = UNKNOWN;
        snprintf(path, sizeof path, "%s/%s", resume->run, nd_checkpoint_name(list[i].step, name));
        ND_TRY_OUT(judge(path, &found));
        ND_TRY_OUT(nd_checkpoint_set_aside(resume->run, list[i].step,
                                           found == DAMAGED ? "bad" : "old", &aside));
        nd_log_warning(
            "checkpoint %lld is not before the one that the run goes on from, and is now %s",
            (long long)list[i].step, aside);
        free(aside);
    }
out:
    free(list);
    return status;
}

/* Checks that a checkpoint that was found fits the run. */
static nd_status check_fits(const nd_config *config, const nd_inputs *inputs, const char *folder,
                            bool logs)
{
    nd_manifest manifest = {0};
    nd_status status = nd_manifest_read(folder, &manifest);
    status = status == ND_OK ? nd_resume_check(config, inputs, folder, &manifest, logs) : status;
    nd_manifest_fini(&manifest);
    return status;
}

nd_status nd_resume_preflight(const nd_config *config, const nd_inputs *inputs)
{
    const nd_resume_search search = {.config = config, .run_folder = "", .below = -1};
    nd_resume resume;
    ND_TRY(nd_resume_check_allowed(config));
    /* A node that comes back to a run finds what the run has, not what it began from. */
    if (config->launch.node_rank > 0 && config->launch.max_restarts > 0) {
        return ND_OK;
    }
    ND_TRY(nd_resume_find(&search, &resume));
    if (resume.found) {
        ND_TRY(check_fits(config, inputs, resume.source, false));
    } else if (config->checkpoint.resume[0]) {
        const nd_epochs epochs = nd_inputs_epochs(config, inputs);
        ND_TRY(nd_config_check_end(config, &epochs, 0, 0));
    }
    /* Another node may come back to a run that has begun. */
    return config->launch.node_rank == 0
               ? nd_run_folder_check(config, inputs, resume.continues ? resume.run : NULL)
               : ND_OK;
}

/* The checkpoint that a run goes on from, at its start and after a rewind. */

/* Rank 0 searches, unless it has failed already, and looks whether the checkpoint fits the run. The
 * key is one for each search, alike on all ranks. `prepared`: rank 0's status so far, which its
 * thread has the error of; the search fails with it. */
static nd_status find_checkpoint(nd_run *s, const nd_resume_search *search, const char *key,
                                 nd_status prepared)
{
    nd_status status = prepared;
    if (s->rank->rank == 0 && status == ND_OK) {
        const nd_resume before = s->resume;
        status = nd_resume_find(search, &s->resume);
        if (status == ND_OK && search->below >= 0 && !s->resume.found) {
            status = nd_fail(ND_ERR_DATA,
                             "no checkpoint of %s can be used: %s is damaged, and there is none "
                             "before it",
                             before.run, before.source);
        }
        if (status == ND_OK && s->resume.found && strcmp(before.source, s->resume.source) != 0) {
            status = check_fits(s->config, s->inputs, s->resume.source, true);
        }
    }
    return nd_run_tell_all(s->worker, key, status, "found nothing to go on from", &s->resume,
                           sizeof s->resume);
}

/* Before the run folder is opened: it changes nothing. */
static nd_status find_source(nd_run *s)
{
    const nd_resume_search search = {
        .config = s->config, .run_folder = s->worker->identity.run_folder, .below = -1};
    return find_checkpoint(s, &search, "resume", ND_OK);
}

/* A checkpoint was found to be damaged while it was loaded: takes the one before it, of the same
 * run. */
static nd_status fall_back(nd_run *s)
{
    const nd_resume before = s->resume;
    const nd_resume_search search = {
        .config = s->config,
        .run_folder = before.continues ? before.run : s->worker->identity.run_folder,
        .below = before.step,
        .sets_aside = true};
    char key[64];
    const nd_status status =
        nd_run_set_damaged_aside(s, nd_resume_is_own(&before) ? before.run : NULL, before.step);
    snprintf(key, sizeof key, "resume below %lld, rewind %d", (long long)before.step, s->rewinds);
    return find_checkpoint(s, &search, key, status);
}

static void log_restored(const nd_run *s, const nd_restored *restored)
{
    const nd_config *config = s->config;
    if (s->rank->rank != 0) {
        return;
    }
    if (restored->scales_differ && restored->scales) {
        nd_log_info("the checkpoint has FP8 histories, which this run does not need");
    } else if (restored->scales_differ) {
        nd_log_warning("the checkpoint has FP8 histories of another recipe; those of this run "
                       "begin afresh");
    }
    if (restored->leaves) {
        nd_log_warning("%s has moments of AdamW, which are left out: optimizer.name is not adamw",
                       s->resume.source);
    }
    if (s->resume.found && !config->checkpoint.verify) {
        nd_log_warning("%s was loaded without comparing its checksums (checkpoint.verify is false)",
                       s->resume.source);
    }
    if (!restored->moments && config->optimizer.name == ND_OPTIMIZER_ADAMW) {
        nd_log_warning("%s has no moments of AdamW, so these begin at zero", s->resume.source);
    }
}

static nd_status load_checkpoint(nd_run *s, nd_restored *restored, nd_mesh *saved)
{
    const bool verify = s->config->checkpoint.verify;
    for (;;) {
        nd_manifest manifest = {0};
        nd_status status =
            nd_restore_checkpoint(s->trainer, s->resume.source, &manifest, verify, restored);
        if (status == ND_OK) {
            /* The data go on behind the samples that were seen, whatever number a step had; after a
             * rewind the caller knows better. */
            nd_run_position *position = &s->trainer->position;
            position->samples_ahead =
                manifest.samples_seen - position->step * nd_step_blocks(s->config);
            *saved = manifest.mesh;
        }
        nd_manifest_fini(&manifest);
        if (status != ND_ERR_DATA || !s->resume.searched) {
            return status;
        }
        ND_TRY(fall_back(s));
    }
}

/* With the run folder open and locked on rank 0. */
static nd_status load_source(nd_run *s)
{
    nd_restored restored = {.moments = true};
    nd_mesh saved = s->rank->mesh;
    double begin = nd_clock_seconds();
    /* The first search came before the lock of the run folder: what another process has saved,
     * renamed or deleted there meanwhile counts. A checkpoint that was named stays the one. */
    const nd_resume before = s->resume;
    const nd_resume_search again = {
        .config = s->config, .run_folder = before.run, .below = -1, .sets_aside = true};
    ND_TRY(before.continues && (before.searched || !before.found)
               ? find_checkpoint(s, &again, "resume under the lock", ND_OK)
               : ND_OK);
    const nd_resume *source = &s->resume;
    nd_fsdp *fsdp = &s->trainer->model->fsdp;
    ND_TRY(source->found ? load_checkpoint(s, &restored, &saved)
           : s->inputs->weights
               ? nd_weights_load(fsdp, s->inputs->weights)
               : nd_weights_init(fsdp, s->rank->shape.init_std, (uint64_t)s->config->model.seed));
    s->held_step = s->trainer->position.step;
    log_restored(s, &restored);
    if (source->found) {
        /* Rank 0 sets aside what is later than the checkpoint, and first the model, which may be
         * that of a later step: a start that is killed here leaves none without its checkpoint. */
        nd_status status = source->searched ? ND_OK : nd_run_set_aside(s, "model");
        status = status == ND_OK && s->dir ? nd_resume_set_later_aside(source) : status;
        ND_TRY(nd_run_tell_all(s->worker, "later checkpoints", status,
                               "could not set what is later aside", NULL, 0));
    }
    if (!source->found && !source->continues) {
        return ND_OK;
    }
    const nd_mesh *mesh = &s->rank->mesh;
    bool other_mesh = memcmp(saved.size, mesh->size, sizeof saved.size) != 0;
    const nd_run_event event = {
        .kind = ND_RUN_EVENT_RESUMED,
        .mesh = other_mesh ? mesh : NULL,
        .mesh_was = other_mesh ? &saved : NULL,
        .step = s->trainer->position.step,
        .path = source->found ? source->source : "the start",
        .seconds = nd_clock_seconds() - begin,
        .restart = s->worker->identity.restart_epoch,
    };
    ND_TRY(nd_sinks_event(&s->sinks, &event));
    return nd_run_best_find(s);
}

const nd_run_stage nd_run_source = {.open = find_source}, nd_run_load = {.open = load_source};

enum { REWINDS_MAX = 10 }; /* what diverges again and again needs a person */

nd_status nd_run_rewind(nd_run *s)
{
    const nd_error error = *nd_error_last();
    nd_run_position *position = &s->trainer->position;
    const int64_t samples = nd_step_blocks(s->config), failed = position->step + 1;
    const int64_t seen = failed * samples + position->samples_ahead;
    nd_restored restored;
    nd_mesh saved;
    ND_TRY(nd_run_saving_wait(s));
    s->rewinds++;
    if (!s->resume.found || s->rewinds > REWINDS_MAX) {
        return nd_fail(ND_ERR_NUMERIC, "%s; %s", error.message,
                       s->resume.found ? "the run has gone back ten times already"
                                       : "there is no checkpoint yet to go back to");
    }
    if (s->dir) {
        nd_log_warning("%s", error.message);
    }
    const double begin = nd_clock_seconds();
    ND_TRY(load_checkpoint(s, &restored, &saved));
    if (s->dir && nd_resume_is_own(&s->resume)) {
        atomic_store(&s->worker->progress.job->durable_step, s->resume.step);
    }
    position->samples_ahead = seen - position->step * samples;
    s->held_step = position->step;
    const nd_run_event event = {
        .kind = ND_RUN_EVENT_RESUMED,
        .step = position->step,
        .path = s->resume.source,
        .seconds = nd_clock_seconds() - begin,
        .restart = s->worker->identity.restart_epoch,
        .rewound_from = failed,
        .reason = error.message,
        .samples = (failed - position->step) * samples,
    };
    ND_TRY(nd_sinks_event(&s->sinks, &event));
    return nd_run_best_find(s);
}

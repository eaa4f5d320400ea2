// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "runtime/base/suggest.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/run/state.h"

static nd_status fail_long(const char *path)
{
    return nd_fail(ND_ERR_CONFIG, "the path %s is too long; use one of less than %d bytes", path,
                   ND_RUN_PATH_MAX);
}

/* An absolute path without links, which all nodes see alike. */
static nd_status absolute(const char *path, char out[ND_RUN_PATH_MAX])
{
    char *real = realpath(path, NULL);
    if (!real) {
        return nd_fail(nd_fs_blame(errno, ND_ERR_DATA), "the folder %s cannot be opened: %s", path,
                       strerror(errno));
    }
    bool fits = strlen(real) < ND_RUN_PATH_MAX;
    snprintf(out, ND_RUN_PATH_MAX, "%.*s", ND_RUN_PATH_MAX - 1, real);
    free(real);
    return fits ? ND_OK : fail_long(path);
}

/* Whether the text is a step, and which. */
static bool parse_step(const char *text, int64_t *step)
{
    size_t digits = strspn(text, "0123456789");
    *step = digits > 0 && digits < 18 ? strtoll(text, NULL, 10) : -1;
    return text[digits] == '\0' && *step >= 0;
}

/* Checkpoints of ours. */

/* What becomes of a checkpoint without a readable manifest: a later search says that it passes it
 * over; this one says so; it is renamed. */
typedef enum passing { PASS_QUIETLY, PASS_SAYING, PASS_RENAMING } passing;

/* The manifest cannot be read, which is the thread's error. A newer program's manifest and a disk
 * that fails are errors: the checkpoint may be good. */
static nd_status pass_over(const char *run, int64_t step, passing how, bool newer)
{
    const nd_error error = *nd_error_last();
    char *aside = NULL;
    if (error.status != ND_ERR_DATA || newer) {
        return error.status;
    }
    nd_error_clear();
    if (how == PASS_SAYING) {
        nd_log_warning("checkpoint %lld cannot be used, so an older one is looked for: %s",
                       (long long)step, error.message);
    }
    if (how != PASS_RENAMING) {
        return ND_OK;
    }
    ND_TRY(nd_checkpoint_set_aside(run, step, "bad", &aside));
    nd_log_warning("checkpoint %lld cannot be used and is now %s: %s", (long long)step, aside,
                   error.message);
    free(aside);
    return ND_OK;
}

static nd_status check_link(const char *path)
{
    nd_fs_kind name, target;
    ND_TRY(nd_fs_look_at_link(path, &name, NULL));
    ND_TRY(nd_fs_look(path, &target, NULL));
    return name != ND_FS_LINK || target != ND_FS_ABSENT
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "%s is a link that leads nowhere; mount the disk that it leads to, or "
                         "name the step of another checkpoint with --resume-from-checkpoint",
                         path);
}

/* *step: that of the folder, where its manifest can be read. */
static nd_status try_folder(const char *run, const nd_folder *folder, passing how, int64_t *step)
{
    char *path = NULL;
    nd_manifest manifest = {0};
    ND_TRY(nd_checkpoint_path(run, folder->step, &path));
    nd_status status = check_link(path);
    if (status == ND_OK) {
        status = nd_manifest_read(path, &manifest);
        *step = status == ND_OK ? folder->step : *step;
        status = status == ND_OK ? ND_OK : pass_over(run, folder->step, how, manifest.is_newer);
    }
    nd_manifest_fini(&manifest);
    free(path);
    return status;
}

/* The newest checkpoint of a run folder whose manifest can be read; *step is -1 without one. */
static nd_status find_newest(const nd_resume_search *search, const char *run, passing how,
                             int64_t *step)
{
    nd_folder *list = NULL;
    int count = 0;
    *step = -1;
    ND_TRY(nd_folder_list(run, ND_FOLDER_WHOLE, &list, &count));
    nd_status status = ND_OK;
    for (int i = count - 1; i >= 0 && *step < 0 && status == ND_OK; i--) {
        bool ours = false;
        if (search->below >= 0 && list[i].step >= search->below) {
            continue;
        }
        status = nd_folder_is_ours(run, &list[i], &ours);
        if (status == ND_OK && ours) {
            status = try_folder(run, &list[i], how, step);
        }
    }
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

static nd_status take(nd_resume *out, const char *run, int64_t step)
{
    char name[ND_CHECKPOINT_NAME_MAX];
    ND_TRY(absolute(run, out->run));
    nd_checkpoint_name(step, name);
    const int length = snprintf(out->source, sizeof out->source, "%s/%s", out->run, name);
    out->found = true;
    out->continues = true;
    out->step = step;
    return length < (int)sizeof out->source ? ND_OK : fail_long(run);
}

/* The run folder that latest, auto and steps refer to; "" when there is none. */
static nd_status find_run(const nd_resume_search *search, char out[ND_RUN_PATH_MAX])
{
    const nd_config *config = search->config;
    char *newest = NULL;
    out[0] = '\0';
    if (search->run_folder && search->run_folder[0]) {
        snprintf(out, ND_RUN_PATH_MAX, "%s", search->run_folder);
    } else if (config->output.dir[0]) {
        snprintf(out, ND_RUN_PATH_MAX, "%s", config->output.dir);
    } else {
        ND_TRY(nd_run_folder_newest(config, &newest));
        snprintf(out, ND_RUN_PATH_MAX, "%s", newest ? newest : "");
        free(newest);
    }
    return ND_OK;
}

static nd_status fail_without_run(const nd_config *config)
{
    return nd_fail(ND_ERR_DATA,
                   "--resume-from-checkpoint (checkpoint.resume) is %s, but no run of this "
                   "configuration in runs/ has a "
                   "checkpoint; name its folder with --save-dir, or the checkpoint itself with "
                   "--resume-from-checkpoint FOLDER",
                   config->checkpoint.resume);
}

static nd_status check_run(const nd_config *config, const char *run)
{
    bool there = false;
    ND_TRY(nd_fs_is_folder(run, &there));
    return there ? ND_OK
                 : nd_fail(ND_ERR_DATA,
                           "--resume-from-checkpoint (checkpoint.resume) is %s, but there is no "
                           "folder %s; correct --save-dir (output.dir), or leave "
                           "--resume-from-checkpoint out for a fresh start there",
                           config->checkpoint.resume, run);
}

/* latest and auto. */
static nd_status find_latest(const nd_resume_search *search, bool may_be_fresh, nd_resume *out)
{
    char run[ND_RUN_PATH_MAX], names[400], others[400];
    const passing how = search->sets_aside ? PASS_RENAMING : PASS_QUIETLY;
    int64_t step = -1;
    bool holds = false;
    ND_TRY(find_run(search, run));
    if (!run[0]) {
        return may_be_fresh ? ND_OK : fail_without_run(search->config);
    }
    ND_TRY(find_newest(search, run, how, &step));
    if (step >= 0) {
        out->searched = true;
        return take(out, run, step);
    }
    ND_TRY(list_names(run, ND_FOLDER_BAD, names));
    /* A run that ended before its first checkpoint begins again in its folder. */
    ND_TRY(nd_fs_has(run, "metrics.jsonl", &holds));
    ND_TRY(holds ? ND_OK : nd_fs_has(run, "run.json", &holds));
    if (names[0]) {
        const char *comma = strrchr(names, ','), *bad = comma ? comma + 2 : names;
        ND_TRY(list_names(run, ND_FOLDER_WHOLE, others));
        return nd_fail(ND_ERR_DATA,
                       "no checkpoint of %s can be used, and %s %s damaged%s%s; `ndtrain ckpt "
                       "verify %s/%s` says how, `ndtrain ckpt export %s/%s OUT --no-verify` may "
                       "save a model, and another folder as output.dir begins afresh",
                       run, names, comma ? "are" : "is",
                       others[0] ? ", as may be what else is there: " : "", others, run, bad, run,
                       bad);
    }
    if (may_be_fresh) {
        out->continues = holds;
        return out->continues ? absolute(run, out->run) : ND_OK;
    }
    ND_TRY(check_run(search->config, run));
    ND_TRY(find_newest(search, run, PASS_SAYING, &step)); /* no search follows that would say why */
    ND_TRY(list_names(run, ND_FOLDER_WHOLE, names));
    return nd_fail(ND_ERR_DATA,
                   "--resume-from-checkpoint (checkpoint.resume) is %s, but %s has no checkpoint "
                   "that can be used (there: "
                   "%s); name another with --resume-from-checkpoint, or leave it out for a fresh "
                   "start in another folder%s",
                   search->config->checkpoint.resume, run, names[0] ? names : "none",
                   holds ? ", or give auto to begin this run again in its folder" : "");
}

static nd_status find_step(const nd_resume_search *search, int64_t step, nd_resume *out)
{
    char run[ND_RUN_PATH_MAX], names[400];
    char *path = NULL;
    ND_TRY(find_run(search, run));
    if (!run[0]) {
        return fail_without_run(search->config);
    }
    ND_TRY(check_run(search->config, run));
    ND_TRY(nd_checkpoint_path(run, step, &path));
    bool ours = false, there = false;
    nd_status status = check_link(path);
    status = status == ND_OK ? nd_fs_is_folder(path, &there) : status;
    status = status == ND_OK ? nd_checkpoint_is_ours(path, &ours) : status;
    free(path);
    ND_TRY(status);
    if (ours) {
        return take(out, run, step);
    }
    if (there) {
        return nd_fail(ND_ERR_DATA,
                       "--resume-from-checkpoint (checkpoint.resume) is %lld, but "
                       "%s/checkpoint-%lld is no checkpoint of ndtrain; to begin with its weights, "
                       "give its path as --model-path, and another --save-dir",
                       (long long)step, run, (long long)step);
    }
    ND_TRY(list_names(run, ND_FOLDER_WHOLE, names));
    return nd_fail(ND_ERR_DATA,
                   "--resume-from-checkpoint (checkpoint.resume) is %lld, but %s has no "
                   "checkpoint-%lld; the newest there "
                   "are: %s",
                   (long long)step, run, (long long)step, names[0] ? names : "none");
}

/* Folders that the user names. */

/* Whether a run that takes a checkpoint from this folder (an absolute path) goes on in it. */
static nd_status is_continued(const nd_config *config, const char *run, bool *out)
{
    char given[ND_RUN_PATH_MAX] = "";
    bool there = false;
    ND_TRY(nd_fs_is_folder(config->output.dir, &there));
    ND_TRY(there ? absolute(config->output.dir, given) : ND_OK);
    ND_TRY(nd_fs_has(run, "metrics.jsonl", out));
    *out = *out && (!config->output.dir[0] || strcmp(given, run) == 0);
    return ND_OK;
}

/* The run of a checkpoint folder is the folder that holds it, unless another is given. */
static nd_status take_folder(const nd_config *config, const char *folder, nd_resume *out)
{
    nd_manifest manifest = {0};
    char *parent = NULL;
    bool continues = false;
    nd_status status = ND_OK;
    out->found = true;
    ND_TRY_OUT(nd_manifest_read(folder, &manifest));
    out->step = manifest.position.step;
    ND_TRY_OUT(nd_fs_parent(out->source, &parent));
    ND_TRY_OUT(is_continued(config, parent, &continues));
    out->continues = continues;
    if (out->continues) {
        snprintf(out->run, sizeof out->run, "%s", parent);
    }
out:
    nd_manifest_fini(&manifest);
    free(parent);
    return status;
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
                   "--resume-from-checkpoint (checkpoint.resume) is %s, but there is no such "
                   "folder%s%s%s; give latest, auto, a step, or the folder of a checkpoint",
                   folder, search.best ? " (did you mean " : "", search.best ? search.best : "",
                   search.best ? "?)" : "");
}

static nd_status find_folder(const nd_resume_search *search, const char *folder, nd_resume *out)
{
    bool continues, there, ours;
    int64_t step = -1;
    ND_TRY(nd_fs_is_folder(folder, &there));
    if (!there) {
        return fail_no_folder(folder);
    }
    ND_TRY(absolute(folder, out->source));
    ND_TRY(nd_checkpoint_is_ours(out->source, &ours));
    if (ours) {
        return take_folder(search->config, out->source, out);
    }
    ND_TRY(is_continued(search->config, out->source, &continues));
    const passing own = search->sets_aside ? PASS_RENAMING : PASS_QUIETLY;
    ND_TRY(find_newest(search, out->source, continues ? own : PASS_SAYING, &step));
    if (step >= 0) { /* a run folder */
        char run[ND_RUN_PATH_MAX];
        snprintf(run, sizeof run, "%s", out->source);
        out->searched = true;
        ND_TRY(take(out, run, step));
        return take_folder(search->config, out->source, out);
    }
    return nd_fail(ND_ERR_DATA,
                   "--resume-from-checkpoint (checkpoint.resume) is %s, but this folder holds no "
                   "checkpoint: neither checkpoint-N nor manifest.json of ndtrain; to begin with "
                   "the weights of a Hugging Face folder, give it as --model-path",
                   folder);
}

nd_status nd_resume_find(const nd_resume_search *search, nd_resume *out)
{
    const char *resume = search->config->checkpoint.resume;
    bool restart = search->run_folder && search->run_folder[0];
    int64_t step;
    *out = (nd_resume){.step = -1};
    if (restart) {
        ND_TRY(find_latest(search, true, out));
        if (out->found) {
            return ND_OK;
        }
    }
    /* A restart before the first checkpoint begins again where the job began. */
    nd_resume_search first = *search;
    nd_resume found = {.step = -1};
    nd_status status = ND_OK;
    first.run_folder = "";
    first.sets_aside = search->sets_aside && !restart; /* a restart goes on in its own folder */
    bool older = restart && search->below >= 0 && strcmp(resume, "latest") == 0;
    if (!resume[0] || older || (restart && strcmp(resume, "auto") == 0)) {
        status = ND_OK;
    } else if (strcmp(resume, "latest") == 0 || strcmp(resume, "auto") == 0) {
        status = find_latest(&first, resume[0] == 'a', &found);
    } else if (parse_step(resume, &step)) {
        status = find_step(&first, step, &found);
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

/* One without a readable manifest is damaged, unless it is a link to nowhere. */
static nd_status set_later_aside(const char *run, const nd_folder *folder)
{
    char *path = NULL, *aside = NULL;
    nd_manifest manifest = {0};
    nd_fs_kind kind = ND_FS_ABSENT;
    bool ours = false;
    nd_status status = ND_OK;
    ND_TRY(nd_folder_is_ours(run, folder, &ours));
    if (!ours) {
        return ND_OK;
    }
    ND_TRY_OUT(nd_checkpoint_path(run, folder->step, &path));
    ND_TRY_OUT(nd_fs_look(path, &kind, NULL));
    status = nd_manifest_read(path, &manifest);
    const bool unread = status == ND_ERR_DATA, damaged = unread && kind == ND_FS_FOLDER;
    ND_TRY_OUT(unread ? ND_OK : status);
    ND_TRY_OUT(nd_checkpoint_set_aside(run, folder->step,
                                       damaged && !manifest.is_newer ? "bad" : "old", &aside));
    nd_log_warning("checkpoint %lld is not before the one that the run goes on from, and is now %s",
                   (long long)folder->step, aside);
out:
    nd_manifest_fini(&manifest);
    free(aside);
    free(path);
    return status;
}

nd_status nd_resume_set_later_aside(const nd_resume *resume)
{
    nd_folder *list = NULL;
    char *path = NULL;
    int count = 0;
    nd_status status = ND_OK;
    if (!nd_resume_is_own(resume)) {
        return ND_OK;
    }
    ND_TRY(nd_checkpoint_path(resume->run, resume->step, &path));
    /* From checkpoint-6.old, checkpoint-6 is one of the others. */
    int64_t last = resume->step - (strcmp(path, resume->source) != 0);
    free(path);
    ND_TRY(nd_folder_list(resume->run, ND_FOLDER_WHOLE, &list, &count));
    for (int i = count - 1; i >= 0 && list[i].step > last && status == ND_OK; i--) {
        status = set_later_aside(resume->run, &list[i]);
    }
    free(list);
    return status;
}

nd_status nd_resume_set_damaged_aside(const char *run, int64_t step)
{
    char *aside = NULL;
    ND_TRY(nd_checkpoint_set_aside(run, step, "bad", &aside));
    nd_log_warning("the damaged checkpoint is now %s, and the one before it is looked for", aside);
    free(aside);
    return ND_OK;
}

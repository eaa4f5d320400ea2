// SPDX-License-Identifier: Apache-2.0
/*
 * The calls of every rank in the steps log.profile_steps, as RUN/profile.json (docs/formats.md):
 * ranks are processes, and all of them count from one moment, that behind a barrier before the
 * first of these steps. Calls between two steps, such as those of a validation, are left out.
 *
 * Each rank writes its part into RUN/profile/, and rank 0 puts the parts together, so the folder
 * must be seen by all nodes. A part that cannot be written is a warning: the run goes on. Memory
 * for ND_PROFILE_EVENTS calls is taken before step 1; further calls are counted and left out.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "trainer/run/state.h"

enum { PART_BYTES_MAX = 1 << 30, PATH = ND_RUN_PATH_MAX + 64 };

#define LETTERS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"

/* Text. */

/* "tid" of the rows of a rank. Perfetto takes 0 for the process's main thread, whose number is that
 * of the process: of rank 1 it would be the other row. */
enum { STEPS_ROW = 1, CALLS_ROW };
#define ROW_NAME                                                                                   \
    "{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}},\n"

/* A step, or a call within one. */
static void write_event(FILE *out, const nd_profile *p, const nd_profile_event *e, int rank)
{
    const bool step = e->kind < 0;
    /* "nd_comm_all_reduce(comm, ...)" becomes "comm_all_reduce"; an op's name stays. */
    const char *name = strncmp(e->name, "nd_", 3) == 0 ? e->name + 3 : e->name;
    fprintf(out, "{\"name\":\"%.*s", (int)strspn(name, LETTERS), name);
    if (step) {
        fprintf(out, " %lld", (long long)e->sequence);
    }
    fprintf(out, "\",\"cat\":\"%s\",\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f,\"pid\":%d,\"tid\":%d",
            step ? "step" : nd_trace_name((nd_trace_kind)e->kind),
            (double)(e->begin_ns - p->origin_ns) * 1e-3, (double)(e->end_ns - e->begin_ns) * 1e-3,
            rank, step ? STEPS_ROW : CALLS_ROW);
    if (e->group >= 0) {
        fprintf(out, ",\"args\":{\"group\":\"%s\",\"op\":\"%s\",\"sequence\":%lld,\"bytes\":%lld}",
                nd_group_name((nd_group_kind)e->group), nd_comm_op_name((nd_comm_op)e->op),
                (long long)e->sequence, (long long)e->bytes);
    }
    fputs("},\n", out);
}

nd_status nd_run_profile_text(const nd_profile *profile, int rank, const char *name, char **text,
                              size_t *size)
{
    char plain[64]; /* within JSON */
    snprintf(plain, sizeof plain, "%s", name);
    for (char *c = plain; *c; c++) {
        *c = strchr(LETTERS "-.: ", *c) ? *c : '?';
    }
    FILE *out = open_memstream(text, size);
    if (!out) {
        return nd_fail_memory("the profile of rank %d", rank);
    }
    /* Names of the process and its two rows. */
    fprintf(out,
            "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":\"%s\"}},\n"
            "{\"name\":\"process_sort_index\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"sort_index\":%d"
            "}},\n" ROW_NAME ROW_NAME,
            rank, plain, rank, rank, rank, STEPS_ROW, "steps", rank, CALLS_ROW, "calls");
    for (int64_t i = 0; i < profile->count; i++) {
        write_event(out, profile, &profile->events[i], rank);
    }
    if (fclose(out) != 0) {
        free(*text);
        *text = NULL;
        return nd_fail_memory("the profile of rank %d", rank);
    }
    return ND_OK;
}

/* Files. */

static void part_path(const nd_run *s, int rank, char out[PATH])
{
    snprintf(out, PATH, "%s/profile/rank-%d.part", s->place.path, rank);
}

/* Each rank makes it, so that each sees that it is no link. */
static nd_status make_parts_folder(const nd_run *s)
{
    char parts[PATH];
    snprintf(parts, sizeof parts, "%s/profile", s->place.path);
    return nd_fs_make_own_folder(parts);
}

/* Appends the part of a rank to `out`; one that is missing is left out. */
static nd_status append_part(const nd_run *s, int rank, FILE *out, int *found)
{
    char path[PATH], *text = NULL;
    size_t size = 0;
    bool there = false;
    part_path(s, rank, path);
    ND_TRY(nd_fs_exists(path, &there));
    if (!there) {
        return ND_OK;
    }
    nd_status status = nd_fs_read(path, PART_BYTES_MAX, ND_ERR_IO, &text, &size);
    *found += status == ND_OK;
    if (status == ND_OK && fwrite(text, 1, size, out) != size) {
        status = nd_fail(ND_ERR_CANTCREATE, "profile.json cannot be written: the disk is full");
    }
    unlink(path);
    free(text);
    return status;
}

/* The last element of the list ends it, so that each of the others may end with a comma. */
static nd_status write_whole(const nd_run *s, FILE *out, int *found)
{
    const int size = s->rank->world_size;
    fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", out);
    for (int rank = 0; rank < size; rank++) {
        ND_TRY(append_part(s, rank, out, found));
    }
    fprintf(out,
            "{\"name\":\"parts\",\"ph\":\"M\",\"pid\":0,\"args\":{\"ranks\":%d,\"found\":%d}}],\n"
            "\"firstStep\":%lld,\"lastStep\":%lld}\n",
            size, *found, (long long)s->profile_first, (long long)s->profile_last);
    return ND_OK;
}

/* Rank 0. */
static nd_status put_together(const nd_run *s)
{
    char parts[PATH], path[ND_RUN_PATH_MAX];
    nd_fs_draft draft = {0};
    int found = 0;
    ND_TRY(nd_run_file_next(s->place.path, "profile", ".json", path));
    nd_status status = nd_fs_draft_open(&draft, path, 0666);
    status = status == ND_OK ? write_whole(s, draft.stream, &found) : status;
    ND_TRY(nd_fs_draft_close(&draft, status));
    nd_log_info("profile of %d rank%s: %s", found, found == 1 ? "" : "s", path);
    snprintf(parts, sizeof parts, "%s/profile", s->place.path);
    rmdir(parts);
    return ND_OK;
}

/* The steps. */

static nd_status open_profile(nd_run *s)
{
    if (!nd_config_steps(s->config->log.profile_steps, &s->profile_first, &s->profile_last)) {
        return ND_OK;
    }
    /* A file or link in the folder's place ends a run before its first step, not at its end. */
    bool there = false;
    ND_TRY(s->dir ? nd_fs_has(s->dir, "profile", &there) : ND_OK);
    ND_TRY(there ? make_parts_folder(s) : ND_OK);
    ND_TRY(nd_profile_init(&s->profile, s->rank->progress, ND_PROFILE_EVENTS));
    s->profiles = true;
    return ND_OK;
}

static nd_status begin_step(nd_run *s)
{
    const int64_t step = s->trainer->position.step + 1;
    if (!s->profiles || step < s->profile_first) {
        return ND_OK;
    }
    if (!s->profile.origin_ns) { /* of a resumed run, the first step may lie behind these */
        s->profiles = step <= s->profile_last;
        if (!s->profiles) {
            return ND_OK;
        }
        ND_TRY(nd_comm_barrier(s->rank->groups.by_kind[ND_GROUP_WORLD]));
        s->profile.origin_ns = nd_clock_ns();
    }
    nd_profile_look(&s->profile); /* what was entered between the steps belongs to no call */
    s->rank->trace.profile = &s->profile;
    return ND_OK;
}

static void warn(const nd_run *s, nd_status status)
{
    if (status != ND_OK) {
        nd_log_warning("rank %d leaves no profile, and the run goes on: %s", s->rank->rank,
                       nd_error_last()->message);
        nd_error_clear();
    }
}

/* Also of a run that stopped early. */
static nd_status write_profile(nd_run *s)
{
    char path[PATH], name[64], *text = NULL;
    size_t size = 0;
    if (!s->profiles || !s->profile.origin_ns) {
        return ND_OK;
    }
    s->profiles = false;
    part_path(s, s->rank->rank, path);
    snprintf(name, sizeof name, "rank %d %.40s", s->rank->rank, s->worker->identity.host);
    const nd_status made = make_parts_folder(s);
    nd_status status =
        made == ND_OK ? nd_run_profile_text(&s->profile, s->rank->rank, name, &text, &size) : made;
    warn(s, status == ND_OK ? nd_fs_write_atomic(path, text, size) : status);
    free(text);
    if (s->profile.dropped > 0) {
        nd_log_warning("the profile of rank %d lacks its last %lld calls, since it holds %d; give "
                       "fewer steps in log.profile_steps",
                       s->rank->rank, (long long)s->profile.dropped, ND_PROFILE_EVENTS);
    }
    ND_TRY(nd_comm_barrier(s->rank->groups.by_kind[ND_GROUP_WORLD]));
    if (s->dir && made == ND_OK) {
        warn(s, put_together(s));
    }
    return ND_OK;
}

static nd_status end_step(nd_run *s, const nd_step_result *result)
{
    const int64_t step = s->trainer->position.step;
    nd_profile *p = &s->profile;
    if (s->rank->trace.profile && p->count < p->room) {
        p->events[p->count++] = (nd_profile_event){.name = "step",
                                                   .begin_ns = s->step_begin,
                                                   .end_ns = nd_clock_ns(),
                                                   .sequence = step,
                                                   .kind = -1,
                                                   .group = -1};
    }
    s->rank->trace.profile = NULL; /* validations, sample texts and checkpoints are left out */
    return step >= s->profile_last ? write_profile(s) : ND_OK;
}

static void close_profile(nd_run *s)
{
    s->rank->trace.profile = NULL;
    free(s->profile.events);
}

const nd_run_stage nd_run_profile = {.open = open_profile,
                                     .before_step = begin_step,
                                     .after_step = end_step,
                                     .finish = write_profile,
                                     .close = close_profile};

// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/profile.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "trainer/run/run_folder.h"

enum { PART_BYTES_MAX = 1 << 30, NAME = 64 };

/* Text. */

static double microseconds(int64_t ns)
{
    return (double)ns * 1e-3;
}

/* "tid" of the rows of a rank. Perfetto takes 0 for the process's main thread, whose number is that
 * of the process: of rank 1 it would be the other row. */
enum { STEPS_ROW = 1, CALLS_ROW };

static void write_step(FILE *out, const nd_profile *p, const nd_profile_event *e, int rank)
{
    fprintf(out,
            "{\"name\":\"step %lld\",\"cat\":\"step\",\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f,"
            "\"pid\":%d,\"tid\":%d},\n",
            (long long)e->sequence, microseconds(e->begin_ns - p->origin_ns),
            microseconds(e->end_ns - e->begin_ns), rank, STEPS_ROW);
}

static void write_call(FILE *out, const nd_profile *p, const nd_profile_event *e, int rank)
{
    /* "nd_comm_all_reduce(comm, ...)" becomes "comm_all_reduce"; an op's name stays. */
    const char *name = strncmp(e->name, "nd_", 3) == 0 ? e->name + 3 : e->name;
    const size_t length =
        strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_");
    fprintf(out,
            "{\"name\":\"%.*s\",\"cat\":\"%s\",\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f,\"pid\":%d,"
            "\"tid\":%d",
            (int)length, name, nd_trace_name((nd_trace_kind)e->kind),
            microseconds(e->begin_ns - p->origin_ns), microseconds(e->end_ns - e->begin_ns), rank,
            CALLS_ROW);
    if (e->group >= 0) {
        fprintf(out, ",\"args\":{\"group\":\"%s\",\"op\":\"%s\",\"sequence\":%lld,\"bytes\":%lld}",
                nd_group_name((nd_group_kind)e->group), nd_comm_op_name((nd_comm_op)e->op),
                (long long)e->sequence, (long long)e->bytes);
    }
    fputs("},\n", out);
}

/* Names of the process and its two rows. */
static void write_names(FILE *out, int rank, const char *name)
{
    static const char *const rows[] = {"steps", "calls"};
    fprintf(
        out,
        "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":\"%s\"}},\n"
        "{\"name\":\"process_sort_index\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"sort_index\":%d}},"
        "\n",
        rank, name, rank, rank);
    for (int i = 0; i < 2; i++) {
        fprintf(out,
                "{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":"
                "\"%s\"}},\n",
                rank, STEPS_ROW + i, rows[i]);
    }
}

/* A host's name within JSON: what is not a letter, digit, or one of "-._: " becomes '?'. */
static void plain_name(const char *text, char out[NAME])
{
    size_t n = 0;
    for (; text[n] && n + 1 < NAME; n++) {
        bool plain = (text[n] >= 'a' && text[n] <= 'z') || (text[n] >= 'A' && text[n] <= 'Z') ||
                     (text[n] >= '0' && text[n] <= '9') || strchr("-._: ", text[n]);
        out[n] = plain ? text[n] : '?';
    }
    out[n] = '\0';
}

nd_status nd_run_profile_text(const nd_profile *profile, int rank, const char *name, char **text,
                              size_t *size)
{
    char plain[NAME];
    FILE *out = open_memstream(text, size);
    if (!out) {
        return nd_fail_memory("the profile of rank %d", rank);
    }
    plain_name(name, plain);
    write_names(out, rank, plain);
    for (int64_t i = 0; i < profile->count; i++) {
        const nd_profile_event *e = &profile->events[i];
        if (e->kind < 0) {
            write_step(out, profile, e, rank);
        } else {
            write_call(out, profile, e, rank);
        }
    }
    if (fclose(out) != 0) {
        free(*text);
        *text = NULL;
        return nd_fail_memory("the profile of rank %d", rank);
    }
    return ND_OK;
}

/* Files. */

static nd_status part_path(const char *dir, int rank, char **out)
{
    return nd_fs_format(out, "%s/profile/rank-%d.part", dir, rank);
}

/* Each rank makes it, so that each sees that it is no link. */
static nd_status make_parts_folder(const char *dir)
{
    char *parts = NULL;
    ND_TRY(nd_fs_format(&parts, "%s/profile", dir));
    nd_status status = nd_fs_make_own_folder(parts);
    free(parts);
    return status;
}

static nd_status write_part(const nd_run_profile *p)
{
    char *path = NULL, *text = NULL, name[NAME] = "";
    size_t size = 0;
    char host[200] = "";
    nd_status status = ND_OK;
    gethostname(host, sizeof host - 1);
    snprintf(name, sizeof name, "rank %d %.40s", p->rank->rank, host);
    ND_TRY_OUT(nd_run_profile_text(&p->profile, p->rank->rank, name, &text, &size));
    ND_TRY_OUT(part_path(p->run, p->rank->rank, &path));
    ND_TRY_OUT(nd_fs_write_atomic(path, text, size));
out:
    free(text);
    free(path);
    return status;
}

/* Appends the part of a rank to `out`; one that is missing is left out. */
static nd_status append_part(const char *dir, int rank, FILE *out, int *found)
{
    char *path = NULL, *text = NULL;
    size_t size = 0;
    ND_TRY(part_path(dir, rank, &path));
    nd_status status = ND_OK;
    bool there = false;
    status = nd_fs_exists(path, &there);
    if (there) {
        status = nd_fs_read(path, PART_BYTES_MAX, ND_ERR_IO, &text, &size);
        *found += status == ND_OK;
        if (status == ND_OK && fwrite(text, 1, size, out) != size) {
            status = nd_fail(ND_ERR_CANTCREATE, "profile.json cannot be written: the disk is full");
        }
        unlink(path);
    }
    free(text);
    free(path);
    return status;
}

/* Rank 0. The last element of the list ends it, so that each of the others may end with a comma. */
static nd_status write_whole(const nd_run_profile *p, FILE *out, int *found)
{
    int size = p->rank->world_size;
    fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", out);
    for (int rank = 0; rank < size; rank++) {
        ND_TRY(append_part(p->run, rank, out, found));
    }
    fprintf(out,
            "{\"name\":\"parts\",\"ph\":\"M\",\"pid\":0,\"args\":{\"ranks\":%d,\"found\":%d}}],\n"
            "\"firstStep\":%lld,\"lastStep\":%lld}\n",
            size, *found, (long long)p->first, (long long)p->last);
    return ND_OK;
}

static nd_status put_together(const nd_run_profile *p)
{
    char *part = NULL, *path = NULL, *folder = NULL;
    int found = 0;
    FILE *out = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_run_file_next(p->run, "profile", &path));
    ND_TRY_OUT(nd_fs_format(&folder, "%s/profile", p->run));
    ND_TRY_OUT(nd_fs_format(&part, "%s/profile/whole.part", p->run));
    unlink(part); /* a process that was killed may have left it */
    out = nd_fs_stream_new(part);
    if (!out) {
        status = nd_fail(ND_ERR_CANTCREATE, "%s cannot be created: %s", part, strerror(errno));
        goto out;
    }
    status = write_whole(p, out, &found);
    bool failed = ferror(out) != 0;
    failed = fclose(out) != 0 || failed;
    if (status == ND_OK && failed) {
        status = nd_fail(ND_ERR_CANTCREATE, "%s cannot be written", part);
    }
    if (status == ND_OK && rename(part, path) != 0) {
        status = nd_fail(ND_ERR_CANTCREATE, "%s cannot be created", path);
    }
    if (status == ND_OK) {
        nd_log_info("profile of %d rank%s: %s", found, found == 1 ? "" : "s", path);
        rmdir(folder);
    }
out:
    free(part);
    free(folder);
    free(path);
    return status;
}

/* The steps. */

nd_status nd_run_profile_init(nd_run_profile *p, nd_rank *rank, const char *run)
{
    *p = (nd_run_profile){0};
    if (!nd_config_steps(rank->config->log.profile_steps, &p->first, &p->last)) {
        return ND_OK;
    }
    /* What lies in its place ends a run before its first step, and not its profile at the end. */
    bool there = false;
    ND_TRY(rank->rank == 0 ? nd_fs_has(run, "profile", &there) : ND_OK);
    ND_TRY(there ? make_parts_folder(run) : ND_OK);
    ND_TRY(nd_profile_init(&p->profile, rank->progress, ND_PROFILE_EVENTS));
    p->rank = rank;
    p->run = run;
    return ND_OK;
}

nd_status nd_run_profile_begin(nd_run_profile *p, int64_t step)
{
    if (!p->rank || step < p->first) {
        return ND_OK;
    }
    if (!p->profile.origin_ns) { /* of a resumed run, the first step may lie behind p->first */
        if (step > p->last) {
            p->rank = NULL;
            return ND_OK;
        }
        ND_TRY(nd_comm_barrier(p->rank->groups.by_kind[ND_GROUP_WORLD]));
        p->profile.origin_ns = nd_clock_ns();
    }
    nd_profile_look(&p->profile); /* what was entered between the steps belongs to no call */
    p->rank->trace.profile = &p->profile;
    p->step_begin = nd_clock_ns();
    return ND_OK;
}

static void warn(const nd_run_profile *p, nd_status status)
{
    if (status != ND_OK) {
        nd_log_warning("rank %d leaves no profile, and the run goes on: %s", p->rank->rank,
                       nd_error_last()->message);
        nd_error_clear();
    }
}

static nd_status write_profile(nd_run_profile *p)
{
    const nd_status made = make_parts_folder(p->run);
    warn(p, made == ND_OK ? write_part(p) : made);
    if (p->profile.dropped > 0) {
        nd_log_warning("the profile of rank %d lacks its last %lld calls, since it holds %d; give "
                       "fewer steps in log.profile_steps",
                       p->rank->rank, (long long)p->profile.dropped, ND_PROFILE_EVENTS);
    }
    ND_TRY(nd_comm_barrier(p->rank->groups.by_kind[ND_GROUP_WORLD]));
    if (p->rank->rank == 0 && made == ND_OK) {
        warn(p, put_together(p));
    }
    return ND_OK;
}

nd_status nd_run_profile_finish(nd_run_profile *p)
{
    if (!p->rank || !p->profile.origin_ns) {
        return ND_OK;
    }
    p->rank->trace.profile = NULL;
    nd_status status = write_profile(p);
    p->rank = NULL;
    return status;
}

nd_status nd_run_profile_end(nd_run_profile *p, int64_t step)
{
    if (!p->rank || !p->rank->trace.profile) {
        return ND_OK;
    }
    const nd_profile_event whole = {.name = "step",
                                    .begin_ns = p->step_begin,
                                    .end_ns = nd_clock_ns(),
                                    .sequence = step,
                                    .kind = -1,
                                    .group = -1};
    if (p->profile.count < p->profile.room) {
        p->profile.events[p->profile.count++] = whole;
    }
    p->rank->trace.profile = NULL; /* validations, sample texts and checkpoints are left out */
    return step >= p->last ? nd_run_profile_finish(p) : ND_OK;
}

void nd_run_profile_fini(nd_run_profile *p)
{
    if (p->rank) {
        p->rank->trace.profile = NULL;
    }
    free(p->profile.events);
    *p = (nd_run_profile){0};
}

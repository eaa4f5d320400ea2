// SPDX-License-Identifier: Apache-2.0
/* The sections on ranks that made others wait: one of whole steps, by their records, and one of
 * single collectives, by profile.json. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "trainer/view/parts.h"

/* SLOWEST_MAX: ranks in the table of the slowest; RANK_LIMIT: above it a record is damaged. */
enum { RANKS_MAX = 64, SLOWEST_MAX = 8, RANK_LIMIT = 1 << 20 };

/* The steps in which a rank was the slowest. */
typedef struct rank_steps {
    int rank;
    int64_t steps;
    double lag_ms, longest_ms; /* that it worked longer than the fastest: sum, largest */
} rank_steps;

static int by_steps(const void *a, const void *b)
{
    const rank_steps *x = a, *y = b;
    int order = (y->steps > x->steps) - (y->steps < x->steps);
    return order ? order : (x->rank > y->rank) - (x->rank < y->rank);
}

/* The columns of metrics.jsonl that say which rank worked longest in a step. */
typedef struct work {
    const double *slowest_rank, *slowest_ms, *fastest_ms;
    size_t rows;
} work;

/* The slowest rank of a step; -1: its record does not name one. */
static int slowest_of(const work *w, size_t i)
{
    return w->slowest_rank[i] >= 0 && w->slowest_rank[i] < RANK_LIMIT &&
                   isfinite(w->slowest_ms[i] - w->fastest_ms[i])
               ? (int)w->slowest_rank[i]
               : -1;
}

static size_t count_slowest(const work *w, rank_steps *ranks, double *lags)
{
    size_t known = 0;
    for (size_t i = 0; i < w->rows; i++) {
        const int rank = slowest_of(w, i);
        if (rank >= 0) {
            const double lag = w->slowest_ms[i] - w->fastest_ms[i];
            ranks[rank].rank = rank;
            ranks[rank].steps++;
            ranks[rank].lag_ms += lag;
            ranks[rank].longest_ms = fmax(ranks[rank].longest_ms, lag);
            lags[known++] = lag;
        }
    }
    return known;
}

static void write_slowest(nd_doc *doc, const nd_run_view *run, const rank_steps *ranks, int count,
                          size_t known)
{
    nd_mesh mesh;
    const bool has_mesh = nd_run_view_mesh(run, &mesh);
    nd_doc_table(doc, false,
                 "|steps in which it was the slowest|share|ms longer than the fastest, "
                 "mean|largest");
    for (int i = 0; i < count && i < SLOWEST_MAX && ranks[i].steps > 0; i++) {
        const rank_steps *r = &ranks[i];
        char place[ND_SHORT] = "";
        if (has_mesh && r->rank < nd_mesh_world_size(&mesh)) {
            nd_mesh_format_rank(&mesh, r->rank, place, sizeof place);
        }
        ND_DOC_ROW(
            doc, place[0] ? nd_cell("rank %d (%s)", r->rank, place) : nd_cell("rank %d", r->rank),
            nd_cell("%lld", (long long)r->steps), nd_cell_share((double)r->steps / (double)known),
            nd_cell("%.3f", r->lag_ms / (double)r->steps), nd_cell("%.3f", r->longest_ms));
    }
}

nd_status nd_section_slowest(nd_doc *doc, const nd_run_view *run)
{
    const nd_metrics *m = &run->metrics;
    const work w = {nd_metrics_column(m, &m->steps, "slowest_rank"),
                    nd_metrics_column(m, &m->steps, "slowest_ms"),
                    nd_metrics_column(m, &m->steps, "fastest_ms"), m->steps.rows};
    rank_steps *ranks = NULL;
    double *lags = NULL;
    nd_status status = ND_OK;
    int count = 0;
    for (size_t i = 0; i < w.rows; i++) {
        const int rank = slowest_of(&w, i);
        count = rank >= count ? rank + 1 : count;
    }
    if (count == 0) {
        return ND_OK;
    }
    ND_TRY_OUT(ND_ALLOC(count, &ranks));
    ND_TRY_OUT(ND_ALLOC(w.rows, &lags));
    const size_t known = count_slowest(&w, ranks, lags);
    const double lag = nd_median(lags, known);
    qsort(ranks, (size_t)count, sizeof *ranks, by_steps);
    nd_doc_add(doc, "heading", "Slowest rank");
    nd_doc_say(doc,
               "Rank %d worked longest in %lld of %zu steps. Work is forward, backward and waiting "
               "for data, without communication. In the median step the slowest rank worked %.3f "
               "ms longer than the fastest, %.1f %% of the time of a step.",
               ranks[0].rank, (long long)ranks[0].steps, known, lag,
               100 * lag / run->figures.step_ms);
    write_slowest(doc, run, ranks, count, known);
out:
    free(ranks);
    free(lags);
    return status;
}

/*
 * The waits of ranks for each other, from profile.json (docs/formats.md). In each collective, the
 * others wait for the rank that enters it last, from the time of their own calls on. A collective
 * that a rank only began, to wait for it later, counts with the time of the call that began it.
 */

enum { LINE_BYTES = 1024, KEY_BYTES = 128 };

typedef struct rank_waits {
    double communication_ms; /* in calls of communication */
    double waited_ms;        /* of it, until the last rank came */
    double caused_ms;        /* that others waited for this rank */
    int64_t last;            /* collectives that this rank entered last */
} rank_waits;

typedef struct waits {
    nd_mesh mesh;
    rank_waits *ranks;   /* [count] owned */
    int count;           /* of the mesh */
    int64_t collectives; /* with at least two members in the file */
    int64_t steps;       /* of rank 0 */
    json_t *events; /* owned: of each collective those of its ranks, by the names of its parts */
} waits;

static int group_named(const char *name)
{
    for (int g = 0; g < ND_GROUP_COUNT; g++) {
        if (strcmp(nd_group_name((nd_group_kind)g), name) == 0) {
            return g;
        }
    }
    return -1;
}

/* The ranks of a group are told apart by their first one. */
static nd_status add_to_collective(waits *w, json_t *event, int rank)
{
    const json_t *args = json_object_get(event, "args");
    const int group = group_named(nd_json_words(args, "group"));
    char key[KEY_BYTES];
    if (group < 0) {
        return ND_OK;
    }
    snprintf(key, sizeof key, "%d %d %.60s %lld", group,
             nd_mesh_group_member(&w->mesh, (nd_group_kind)group, rank, 0),
             nd_json_words(args, "op"), (long long)nd_json_whole(args, "sequence"));
    json_t *list = json_object_get(w->events, key);
    if (!list) {
        list = json_array();
        nd_json_set(&w->events, key, list);
    }
    return json_array_append(w->events ? list : NULL, event) == 0
               ? ND_OK
               : nd_fail_memory("the collectives of a profile");
}

static nd_status add_event(waits *w, json_t *event)
{
    const char *kind = nd_json_words(event, "cat");
    const int64_t rank = json_object_get(event, "pid") ? nd_json_whole(event, "pid") : -1;
    if (rank < 0 || rank >= w->count) {
        return ND_OK;
    }
    w->steps += rank == 0 && strcmp(kind, "step") == 0;
    if (strcmp(kind, "communication") != 0) {
        return ND_OK;
    }
    w->ranks[rank].communication_ms += nd_json_number(event, "dur") * 1e-3;
    return json_object_get(event, "args") ? add_to_collective(w, event, (int)rank) : ND_OK;
}

/* The events of one collective: its ranks waited for the one that came last. */
static void count_collective(waits *w, const json_t *events)
{
    const json_t *last = json_array_get(events, 0), *event;
    size_t i;
    if (json_array_size(events) < 2) {
        return;
    }
    json_array_foreach(events, i, event)
    {
        last = nd_json_number(event, "ts") >= nd_json_number(last, "ts") ? event : last;
    }
    rank_waits *slowest = &w->ranks[nd_json_whole(last, "pid")];
    w->collectives++;
    slowest->last++;
    json_array_foreach(events, i, event)
    {
        const double early = nd_json_number(last, "ts") - nd_json_number(event, "ts");
        const double waited = event == last ? 0 : fmin(early, nd_json_number(event, "dur")) * 1e-3;
        w->ranks[nd_json_whole(event, "pid")].waited_ms += waited;
        slowest->caused_ms += waited;
    }
}

/* trainer/run/profile.c writes each event on a line of its own, which a comma or the end of the
 * list follows. */
static nd_status read_events(waits *w, FILE *in, const char *path)
{
    char line[LINE_BYTES];
    if (!fgets(line, sizeof line, in) || !strstr(line, "\"traceEvents\"")) {
        return nd_fail(ND_ERR_DATA,
                       "%s is no profile of ndtrain; remove it, and the report leaves it out",
                       path);
    }
    while (fgets(line, sizeof line, in)) {
        json_error_t error;
        json_t *event = json_loads(line, JSON_DISABLE_EOF_CHECK, &error);
        nd_status status = event                       ? add_event(w, event)
                           : nd_json_no_memory(&error) ? nd_fail_memory("a profile")
                                                       : ND_OK;
        json_decref(event);
        ND_TRY(status);
    }
    return ferror(in) ? nd_fail(ND_ERR_IO, "%s cannot be read: %s", path, strerror(errno)) : ND_OK;
}

static void write_wait_row(nd_doc *doc, const waits *w, int rank)
{
    const rank_waits *r = &w->ranks[rank];
    const double steps = w->steps > 0 ? (double)w->steps : 1;
    ND_DOC_ROW(doc, nd_cell("rank %d", rank), nd_cell("%.3f", r->communication_ms / steps),
               nd_cell("%.3f", r->waited_ms / steps), nd_cell("%.3f", r->caused_ms / steps),
               nd_cell("%lld", (long long)r->last));
}

static void write_waits(nd_doc *doc, const waits *w)
{
    const int count = w->count < RANKS_MAX ? w->count : RANKS_MAX;
    int slowest = 0; /* the rank that others waited for longest */
    for (int i = 1; i < w->count; i++) {
        slowest = w->ranks[i].caused_ms > w->ranks[slowest].caused_ms ? i : slowest;
    }
    nd_doc_add(doc, "heading", "Who waited for whom");
    nd_doc_say(doc,
               "From profile.json: %lld steps, %lld collectives. Others waited longest for rank "
               "%d: %.3f ms of a step.",
               (long long)w->steps, (long long)w->collectives, slowest,
               w->ranks[slowest].caused_ms / (w->steps > 0 ? (double)w->steps : 1));
    nd_doc_table(doc, false,
                 "|communication, ms of a step|of it waiting for others|others waiting for "
                 "it|collectives it entered last");
    for (int i = 0; i < count; i++) {
        write_wait_row(doc, w, i);
    }
    if (slowest >= count) {
        write_wait_row(doc, w, slowest);
    }
    if (w->count > count) {
        nd_doc_say(doc, "The first %d of %d ranks, and the slowest.", count, w->count);
    }
}

nd_status nd_section_waits(nd_doc *doc, const nd_run_view *run)
{
    waits w = {0};
    FILE *in = NULL;
    const char *key;
    json_t *events;
    nd_status status = ND_OK;
    if (!run->profile || !nd_run_view_mesh(run, &w.mesh)) {
        return ND_OK;
    }
    ND_TRY(nd_fs_stream_own(run->profile, ND_ERR_DATA, &in));
    w.events = json_object();
    w.count = nd_mesh_world_size(&w.mesh);
    ND_TRY_OUT(ND_ALLOC(w.count, &w.ranks));
    ND_TRY_OUT(read_events(&w, in, run->profile));
    json_object_foreach(w.events, key, events)
    {
        count_collective(&w, events);
    }
    if (w.collectives > 0) {
        write_waits(doc, &w);
    }
out:
    json_decref(w.events);
    free(w.ranks);
    fclose(in);
    return status;
}

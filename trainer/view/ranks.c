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

/* Collectives of profile.json. */

enum { LINE_BYTES = 1024, KEY_BYTES = 128 };

typedef struct reading {
    const nd_mesh *mesh;
    nd_waits waits;
    json_t *collectives; /* owned: of each the events of its ranks, by the names of its parts */
} reading;

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
static nd_status add_to_collective(reading *r, json_t *event, int rank)
{
    const json_t *args = json_object_get(event, "args");
    const int group = group_named(nd_json_words(args, "group"));
    char key[KEY_BYTES];
    if (group < 0) {
        return ND_OK;
    }
    snprintf(key, sizeof key, "%d %d %.60s %lld", group,
             nd_mesh_group_member(r->mesh, (nd_group_kind)group, rank, 0),
             nd_json_words(args, "op"), (long long)nd_json_whole(args, "sequence"));
    json_t *list = json_object_get(r->collectives, key);
    if (!list) {
        list = json_array();
        nd_json_set(&r->collectives, key, list);
    }
    return json_array_append(r->collectives ? list : NULL, event) == 0
               ? ND_OK
               : nd_fail_memory("the collectives of a profile");
}

static nd_status add_event(reading *r, json_t *event)
{
    const char *kind = nd_json_words(event, "cat");
    const int64_t rank = json_object_get(event, "pid") ? nd_json_whole(event, "pid") : -1;
    if (rank < 0 || rank >= r->waits.count) {
        return ND_OK;
    }
    r->waits.steps += rank == 0 && strcmp(kind, "step") == 0;
    if (strcmp(kind, "communication") != 0) {
        return ND_OK;
    }
    r->waits.ranks[rank].communication_ms += nd_json_number(event, "dur") * 1e-3;
    return json_object_get(event, "args") ? add_to_collective(r, event, (int)rank) : ND_OK;
}

/* trainer/run/profile.c writes each event on a line of its own, which a comma or the end of the
 * list follows. */
static nd_status read_event(reading *r, const char *line)
{
    json_error_t error;
    json_t *event = json_loads(line, JSON_DISABLE_EOF_CHECK, &error);
    if (!event) {
        return nd_json_no_memory(&error) ? nd_fail_memory("a profile") : ND_OK;
    }
    nd_status status = add_event(r, event);
    json_decref(event);
    return status;
}

/* The events of one collective: its ranks waited for the one that came last. */
static void count_collective(nd_waits *waits, const json_t *events)
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
    nd_rank_waits *slowest = &waits->ranks[nd_json_whole(last, "pid")];
    waits->collectives++;
    slowest->last++;
    json_array_foreach(events, i, event)
    {
        const double early = nd_json_number(last, "ts") - nd_json_number(event, "ts");
        const double call = nd_json_number(event, "dur");
        const double waited = (early < call ? early : call) * 1e-3;
        waits->ranks[nd_json_whole(event, "pid")].waited_ms += event == last ? 0 : waited;
        slowest->caused_ms += event == last ? 0 : waited;
    }
}

static nd_status read_lines(reading *r, FILE *in, const char *path)
{
    char line[LINE_BYTES];
    if (!fgets(line, sizeof line, in) || !strstr(line, "\"traceEvents\"")) {
        return nd_fail(ND_ERR_DATA,
                       "%s is no profile of ndtrain; remove it, and the report leaves it out",
                       path);
    }
    while (fgets(line, sizeof line, in)) {
        ND_TRY(read_event(r, line));
    }
    return ferror(in) ? nd_fail(ND_ERR_IO, "%s cannot be read: %s", path, strerror(errno)) : ND_OK;
}

nd_status nd_waits_read(const char *path, const nd_mesh *mesh, nd_waits *out)
{
    reading r = {.mesh = mesh, .waits = {.count = nd_mesh_world_size(mesh)}};
    const char *key;
    json_t *events;
    nd_status status = ND_OK;
    FILE *in = NULL;
    ND_TRY(nd_fs_stream_own(path, ND_ERR_DATA, &in));
    r.collectives = json_object();
    ND_TRY_OUT(ND_ALLOC(r.waits.count, &r.waits.ranks));
    ND_TRY_OUT(read_lines(&r, in, path));
    json_object_foreach(r.collectives, key, events)
    {
        count_collective(&r.waits, events);
    }
    *out = r.waits;
    r.waits.ranks = NULL;
out:
    json_decref(r.collectives);
    free(r.waits.ranks);
    fclose(in);
    return status;
}

void nd_waits_fini(nd_waits *waits)
{
    free(waits->ranks);
    *waits = (nd_waits){0};
}

static void write_wait_row(nd_doc *doc, int rank, const nd_rank_waits *w, double steps)
{
    ND_DOC_ROW(doc, nd_cell("rank %d", rank), nd_cell("%.3f", w->communication_ms / steps),
               nd_cell("%.3f", w->waited_ms / steps), nd_cell("%.3f", w->caused_ms / steps),
               nd_cell("%lld", (long long)w->last));
}

/* The rank that others waited for longest. */
static int slowest_rank(const nd_waits *waits)
{
    int slowest = 0;
    for (int i = 1; i < waits->count; i++) {
        slowest = waits->ranks[i].caused_ms > waits->ranks[slowest].caused_ms ? i : slowest;
    }
    return slowest;
}

static void write_wait_table(nd_doc *doc, const nd_waits *waits)
{
    int slowest = slowest_rank(waits), count = waits->count < RANKS_MAX ? waits->count : RANKS_MAX;
    double steps = waits->steps > 0 ? (double)waits->steps : 1;
    nd_doc_add(doc, "heading", "Who waited for whom");
    nd_doc_say(doc,
               "From profile.json: %lld steps, %lld collectives. Others waited longest for rank "
               "%d: %.3f ms of a step.",
               (long long)waits->steps, (long long)waits->collectives, slowest,
               waits->ranks[slowest].caused_ms / steps);
    nd_doc_table(doc, false,
                 "|communication, ms of a step|of it waiting for others|others waiting for "
                 "it|collectives it entered last");
    for (int i = 0; i < count; i++) {
        write_wait_row(doc, i, &waits->ranks[i], steps);
    }
    if (slowest >= count) {
        write_wait_row(doc, slowest, &waits->ranks[slowest], steps);
    }
    if (waits->count > count) {
        nd_doc_say(doc, "The first %d of %d ranks, and the slowest.", count, waits->count);
    }
}

nd_status nd_section_waits(nd_doc *doc, const nd_run_view *run)
{
    nd_mesh mesh;
    nd_waits waits = {0};
    if (!run->profile || !nd_run_view_mesh(run, &mesh)) {
        return ND_OK;
    }
    ND_TRY(nd_waits_read(run->profile, &mesh, &waits));
    if (waits.collectives > 0) {
        write_wait_table(doc, &waits);
    }
    nd_waits_fini(&waits);
    return ND_OK;
}

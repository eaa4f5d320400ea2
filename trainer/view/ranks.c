// SPDX-License-Identifier: Apache-2.0
/* Ranks that made others wait: in whole steps, by their records, and in single collectives, by
 * profile.json. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "trainer/view/parts.h"

enum { RANK_LIMIT = 1 << 16 }; /* above it a record is damaged */

/* Ranks of a group that is a part of an axis; 1: run.json does not say it. */
static int part_of_axis(const nd_run_view *view, const char *key, int axis_size)
{
    const double size = nd_json_number(json_object_get(view->record, "mesh"), key);
    return size >= 1 && size <= axis_size && axis_size % (int)size == 0 ? (int)size : 1;
}

/* The mesh of run.json; false: it has none, or no possible one. */
static bool mesh_of(const nd_run_view *view, nd_mesh *out)
{
    const int64_t most = 1 << 24; /* ranks */
    int64_t ranks = 1;
    for (int axis = 0; axis < ND_AXIS_COUNT; axis++) {
        double size =
            nd_json_number(json_object_get(view->record, "mesh"), nd_axis_name((nd_axis)axis));
        if (!(size >= 1 && size <= (double)most)) {
            return false;
        }
        out->size[axis] = (int)size;
        ranks *= out->size[axis];
        if (ranks > most) {
            return false;
        }
    }
    out->ulysses = part_of_axis(view, "ulysses", out->size[ND_AXIS_CP]);
    out->kv_copies = part_of_axis(view, "kv_copies", out->size[ND_AXIS_TP]);
    return true;
}

/* The steps in which a rank was the slowest. */
typedef struct rank_steps {
    int64_t steps;
    double lag_ms, longest_ms; /* that it worked longer than the fastest: sum, largest */
} rank_steps;

/* [[rank, place in the mesh, steps in which it worked longest, ms longer than the fastest in sum,
 * largest], ...] */
static nd_status slowest_ranks(const nd_run_view *run, json_t **out)
{
    const nd_column *slowest = nd_metrics_column(&run->metrics, "slowest_ms");
    const nd_column *fastest = nd_metrics_column(&run->metrics, "fastest_ms");
    const nd_column *rank = nd_metrics_column(&run->metrics, "slowest_rank");
    rank_steps *ranks = NULL;
    nd_mesh mesh;
    const int placed = mesh_of(run, &mesh) ? nd_mesh_world_size(&mesh) : 0;
    ND_TRY(ND_ALLOC(RANK_LIMIT, &ranks));
    for (size_t i = 0; i < rank->count && i < slowest->count && i < fastest->count; i++) {
        const double number = rank->points[i].value;
        const double lag = slowest->points[i].value - fastest->points[i].value;
        if (number >= 0 && number < RANK_LIMIT && isfinite(lag)) {
            rank_steps *r = &ranks[(int)number];
            r->steps++;
            r->lag_ms += lag;
            r->longest_ms = fmax(r->longest_ms, lag);
        }
    }
    *out = json_array();
    for (int i = 0; i < RANK_LIMIT; i++) {
        const rank_steps *r = &ranks[i];
        char place[64] = "";
        if (r->steps > 0) {
            if (i < placed) {
                nd_mesh_format_rank(&mesh, i, place, sizeof place);
            }
            nd_json_append(out, json_pack("[i, s, I, o, o]", i, place, (json_int_t)r->steps,
                                          nd_number(r->lag_ms), nd_number(r->longest_ms)));
        }
    }
    free(ranks);
    return ND_OK;
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

/* The ranks of a group are told apart by their first one. */
static nd_status add_to_collective(waits *w, json_t *event, int rank)
{
    const json_t *args = json_object_get(event, "args");
    const char *name = nd_json_words(args, "group");
    int group = ND_GROUP_COUNT - 1;
    char key[KEY_BYTES];
    while (group >= 0 && strcmp(nd_group_name((nd_group_kind)group), name) != 0) {
        group--;
    }
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

/* {"steps", "collectives", "ranks": [[ms in calls of communication, of it waiting for the last
 * rank, others waiting for this one, collectives that it entered last], ...]}; null without a
 * profile. */
static nd_status waits_of_ranks(const nd_run_view *run, json_t **out)
{
    waits w = {0};
    FILE *in = NULL;
    const char *key;
    json_t *events;
    nd_status status = ND_OK;
    *out = json_null();
    if (!run->profile || !mesh_of(run, &w.mesh)) {
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
    json_t *ranks = json_array();
    for (int i = 0; i < w.count; i++) {
        const rank_waits *r = &w.ranks[i];
        nd_json_append(&ranks, json_pack("[o, o, o, I]", nd_number(r->communication_ms),
                                         nd_number(r->waited_ms), nd_number(r->caused_ms),
                                         (json_int_t)r->last));
    }
    *out = w.collectives == 0 ? json_null()
                              : json_pack("{s:I, s:I, s:O}", "steps", (json_int_t)w.steps,
                                          "collectives", (json_int_t)w.collectives, "ranks", ranks);
    json_decref(ranks);
out:
    json_decref(w.events);
    free(w.ranks);
    fclose(in);
    return status;
}

nd_status nd_ranks_add(const nd_run_view *run, json_t **out)
{
    json_t *list = NULL;
    ND_TRY(slowest_ranks(run, &list));
    nd_json_set(out, "slowest", list);
    ND_TRY(waits_of_ranks(run, &list));
    nd_json_set(out, "waits", list);
    return ND_OK;
}

// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "runtime/base/version.h"
#include "runtime/config/config.h"
#include "trainer/view/page_text.h"
#include "trainer/view/parts.h"

/* Ranks that made others wait: in whole steps, by their records, and in single collectives, by
 * profile.json. */

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

static json_t *slowest_json(const nd_run_view *run, int rank, const rank_steps *r)
{
    nd_mesh mesh;
    char place[64] = "";
    if (mesh_of(run, &mesh) && rank < nd_mesh_world_size(&mesh)) {
        nd_mesh_format_rank(&mesh, rank, place, sizeof place);
    }
    return json_pack("[i, s, I, o, o]", rank, place, (json_int_t)r->steps, nd_number(r->lag_ms),
                     nd_number(r->longest_ms));
}

/* [[rank, place in the mesh, steps in which it worked longest, ms longer than the fastest in sum,
 * largest], ...] */
static nd_status slowest_ranks(const nd_run_view *run, json_t **out)
{
    const nd_column *slowest = nd_metrics_column(&run->metrics, "slowest_ms");
    const nd_column *fastest = nd_metrics_column(&run->metrics, "fastest_ms");
    const nd_column *rank = nd_metrics_column(&run->metrics, "slowest_rank");
    rank_steps *ranks = NULL;
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
        if (ranks[i].steps > 0) {
            nd_json_append(out, slowest_json(run, i, &ranks[i]));
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

static json_t *waits_json(const waits *w)
{
    json_t *ranks = json_array();
    for (int i = 0; i < w->count; i++) {
        const rank_waits *r = &w->ranks[i];
        nd_json_append(&ranks, json_pack("[o, o, o, I]", nd_number(r->communication_ms),
                                         nd_number(r->waited_ms), nd_number(r->caused_ms),
                                         (json_int_t)r->last));
    }
    return json_pack("{s:I, s:I, s:o}", "steps", (json_int_t)w->steps, "collectives",
                     (json_int_t)w->collectives, "ranks", ranks);
}

nd_status nd_ranks_waits(const nd_run_view *run, json_t **out)
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
    *out = w.collectives > 0 ? waits_json(&w) : *out;
out:
    json_decref(w.events);
    free(w.ranks);
    fclose(in);
    return status;
}

const char nd_page_mark[] = "<!-- ndtrain report -->\n";

enum { EVENTS_MAX = 200, EVENTS_OF_ALL = 400 }; /* of a kind, in one run and in all */

/* The last events of each kind, the newest first, and under "event_counts" how many there are. */
static void add_events(const nd_run_view *run, int runs, json_t **out)
{
    const json_int_t share = EVENTS_OF_ALL / runs, most = share < EVENTS_MAX ? share : EVENTS_MAX;
    json_t *counts = json_object(), *events = json_array();
    for (size_t i = json_array_size(run->metrics.events); i > 0; i--) {
        json_t *event = json_array_get(run->metrics.events, i - 1);
        const char *kind = nd_json_words(event, "event");
        const json_int_t count = nd_json_whole(counts, kind) + 1;
        nd_json_set(&counts, kind, json_integer(count));
        if (count <= most) {
            nd_json_append(&events, json_incref(event));
        }
    }
    nd_json_set(out, "events", events);
    nd_json_set(out, "event_counts", counts);
}

/* A copy in which whole numbers that a script would round are texts. NULL: no memory. */
static json_t *exact(json_t *value)
{
    const json_int_t most = (json_int_t)1 << 53, number = json_integer_value(value);
    const char *key;
    char text[32];
    size_t i;
    if (!json_is_object(value) && !json_is_array(value)) {
        snprintf(text, sizeof text, "%lld", (long long)number);
        return number > most || number < -most ? json_string(text) : json_incref(value);
    }
    json_t *copy = json_is_array(value) ? json_array() : json_object(), *member;
    json_object_foreach(value, key, member)
    {
        nd_json_set(&copy, key, exact(member));
    }
    json_array_foreach(value, i, member)
    {
        nd_json_append(&copy, exact(member));
    }
    return copy;
}

static json_t *saved_json(const nd_run_view *run)
{
    json_t *list = json_array();
    for (int i = 0; i < run->saved_count; i++) {
        const nd_saved *s = &run->saved[i];
        char time[ND_CLOCK_UTC_MAX];
        nd_json_append(&list,
                       json_pack("{s:o, s:s, s:o, s:I, s:I, s:s}", "name", nd_json_string(s->name),
                                 "state", s->state, "why", nd_json_string(s->why), "step",
                                 (json_int_t)s->step, "bytes", (json_int_t)s->bytes, "time",
                                 nd_clock_utc(s->time, time)));
    }
    return list;
}

/* The time of the steps that the trace covers. */
static double traced_ms(const nd_run_view *run)
{
    const nd_column *ms = nd_metrics_column(&run->metrics, "step_ms");
    const double first = nd_json_number(run->trace, "first_step");
    const double behind = first + nd_json_number(run->trace, "steps");
    double sum = 0;
    for (size_t i = 0; i < ms->count; i++) {
        sum += ms->points[i].step >= first && ms->points[i].step < behind ? ms->points[i].value : 0;
    }
    return sum;
}

static const char *mood_of(nd_run_end end)
{
    return end == ND_RUN_FAILED || end == ND_RUN_ENDED_EARLY       ? "bad"
           : end == ND_RUN_FINISHED || end == ND_RUN_STOPPED_EARLY ? "good"
                                                                   : "";
}

static nd_status make_run(const nd_run_view *run, int64_t first, int64_t last, int runs,
                          json_t **out)
{
    const nd_column *ms = nd_metrics_column(&run->metrics, "step_ms");
    char verdict[ND_VERDICT_MAX];
    json_t *slowest = NULL, *waited = NULL;
    ND_TRY(slowest_ranks(run, &slowest));
    nd_status status = nd_ranks_waits(run, &waited);
    if (status != ND_OK) {
        json_decref(slowest);
        return status;
    }
    *out = json_pack(
        "{s:o, s:o, s:s, s:s, s:o, s:o, s:I, s:o, s:O?}", "name", nd_json_string(run->name),
        "folder", nd_json_string(run->folder), "verdict", nd_run_verdict(run, verdict), "mood",
        mood_of(run->end), "first", nd_number(ms->points[0].step), "last",
        nd_number(ms->points[ms->count - 1].step), "wanted", (json_int_t)run->steps_wanted,
        "traced_ms", nd_number(traced_ms(run)), "trace", run->trace);
    nd_json_set(out, "record", run->record ? exact(run->record) : json_null());
    nd_json_set(out, "slowest", slowest);
    nd_json_set(out, "waits", waited);
    nd_json_set(out, "saved", saved_json(run));
    nd_json_set(out, "columns", nd_columns_sum_up(&run->metrics));
    add_events(run, runs, out);
    nd_curves_add(&run->metrics, first, last, runs, out);
    return ND_OK;
}

static nd_status make_runs(const nd_run_view *runs, int count, json_t **out)
{
    double first = INFINITY, last = 0;
    *out = json_array();
    for (int i = 0; i < count; i++) {
        const nd_column *ms = nd_metrics_column(&runs[i].metrics, "step_ms");
        first = fmin(first, ms->points[0].step);
        last = fmax(last, ms->points[ms->count - 1].step);
    }
    for (int i = 0; i < count; i++) {
        json_t *run = NULL;
        ND_TRY(make_run(&runs[i], (int64_t)first, (int64_t)last, count, &run));
        nd_json_append(out, run);
    }
    return ND_OK;
}

static void add_default(void *context, const char *key, const char *value, bool job_scoped)
{
    json_t *typed = json_loads(value, JSON_DECODE_ANY, NULL); /* as run.json has it */
    (void)job_scoped;
    nd_json_set(context, key, typed ? typed : nd_json_string(value));
}

/* {"train.steps": value, ...} */
static nd_status make_defaults(json_t **out)
{
    nd_config defaults = {0};
    nd_status status = ND_OK;
    *out = json_object();
    ND_TRY_OUT(nd_config_init(&defaults));
    ND_TRY_OUT(nd_config_each(&defaults, add_default, out));
out:
    nd_config_fini(&defaults);
    return status;
}

/* Writes "<" as \u003c, since it could end the element script; JSON has it in texts only. */
static nd_status write_json(const json_t *data, FILE *out)
{
    char *text = nd_json_text(data, JSON_COMPACT | JSON_REAL_PRECISION(10));
    if (!text) {
        return nd_fail_memory("the report");
    }
    for (const char *c = text; *c; c++) {
        fputs(*c == '<' ? "\\u003c" : (char[]){*c, '\0'}, out);
    }
    free(text);
    return ND_OK;
}

nd_status nd_page_write(const nd_run_view *runs, int count, int64_t now, FILE *out)
{
    char time[ND_CLOCK_UTC_MAX];
    json_t *data = json_pack("{s:s, s:s}", "version", ND_VERSION, "time", nd_clock_utc(now, time));
    json_t *list = NULL, *defaults = NULL;
    nd_status status = ND_OK;
    ND_ASSERT(count >= 1 && count <= ND_PAGE_RUNS_MAX);
    ND_TRY_OUT(make_runs(runs, count, &list));
    ND_TRY_OUT(make_defaults(&defaults));
    nd_json_set(&data, "runs", json_incref(list));
    nd_json_set(&data, "defaults", json_incref(defaults));
    fputs(nd_page_mark, out);
    fputs(page_before, out);
    status = write_json(data, out);
    fputs(page_after, out);
out:
    json_decref(list);
    json_decref(defaults);
    json_decref(data);
    return status;
}

// SPDX-License-Identifier: Apache-2.0
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/version.h"
#include "runtime/config/config.h"
#include "trainer/view/page_text.h"
#include "trainer/view/parts.h"

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
    json_t *slowest = NULL, *waits = NULL;
    ND_TRY(nd_ranks_slowest(run, &slowest));
    nd_status status = nd_ranks_waits(run, &waits);
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
    nd_json_set(out, "waits", waits);
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

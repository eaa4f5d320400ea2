// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/log.h"
#include "trainer/report/report.h"

enum { ROOM_BYTES = 2 << 20, DEADLINE_SECONDS = 10 };

/* One of the records of report.h. */
typedef struct record {
    enum { STEP, VALIDATION, HEALTH, EVENT } kind;
    const void *of; /* nd_step_record, nd_validation_record, ... */
} record;

void nd_sinks_add(nd_sinks *sinks, nd_sink sink)
{
    ND_ASSERT(sinks->count < ND_SINKS_MAX);
    sinks->all[sinks->count++] = sink;
}

static nd_status deliver(const nd_sink *sink, const record *r)
{
    switch (r->kind) {
    case STEP:
        return sink->step ? sink->step(sink->self, r->of) : ND_OK;
    case VALIDATION:
        return sink->validation ? sink->validation(sink->self, r->of) : ND_OK;
    case HEALTH:
        return sink->health ? sink->health(sink->self, r->of) : ND_OK;
    case EVENT:
        return sink->event ? sink->event(sink->self, r->of) : ND_OK;
    }
    return ND_OK;
}

/* The calling thread's error is why. */
static void warn_of_dropped(const char *name)
{
    nd_log_warning("%s takes no more reports of this run, which goes on without it: %s", name,
                   nd_error_last()->message);
    nd_error_clear();
}

static void deliver_to_all(nd_sinks *sinks, const record *r)
{
    for (int i = 0; i < sinks->count; i++) {
        nd_sink *sink = &sinks->all[i];
        if (sink->self && deliver(sink, r) != ND_OK) {
            warn_of_dropped(sink->name);
            sink->close(sink->self);
            sink->self = NULL;
        }
    }
}

/* A file that takes records again, or that takes no more at the end of the run: metrics.jsonl gets
 * a line with the number of those it lacks, if it can still be written. */
static void tell_lost(nd_sinks *sinks, bool end)
{
    char why[ND_WRITER_WHY_BYTES];
    for (int i = 0; i < sinks->count; i++) {
        const nd_sink *sink = &sinks->all[i];
        const int64_t lost =
            sink->has_file ? nd_writer_take_lost(sinks->writer, sink->file, why) : 0;
        if (lost == 0) {
            continue;
        }
        if (end) {
            nd_log_warning("%lld records of this run did not go to %s", (long long)lost,
                           sink->name);
        } else {
            nd_log_warning("%s is written again, without %lld records of this run", sink->name,
                           (long long)lost);
        }
        const nd_run_event event = {.kind = ND_RUN_EVENT_RECORDS_LOST,
                                    .step = sinks->step,
                                    .reason = why,
                                    .sink = sink->name,
                                    .records = lost};
        deliver_to_all(sinks, &(record){EVENT, &event});
    }
}

static nd_status put_to_all(nd_sinks *sinks, int64_t step, record r)
{
    tell_lost(sinks, false);
    sinks->step = step;
    deliver_to_all(sinks, &r);
    return sinks->writer ? nd_writer_status(sinks->writer) : ND_OK;
}

nd_status nd_sinks_open(nd_sinks *sinks, const nd_report_options *options)
{
    const nd_config *config = options->config;
    const struct {
        const char *name;
        nd_status (*open)(const nd_report_options *, nd_sink *);
        bool wanted, tracks;
    } all[] = {
        {"metrics.jsonl", nd_jsonl_sink_open, true, false},
        {"the terminal", nd_terminal_sink_open, true, false},
        {"TensorBoard", nd_tensorboard_sink_open, nd_config_tracks(config, ND_TRACKER_TENSORBOARD),
         true},
        {"wandb", nd_wandb_sink_open, nd_config_tracks(config, ND_TRACKER_WANDB), true},
        {"trackio", nd_trackio_sink_open, nd_config_tracks(config, ND_TRACKER_TRACKIO), true},
    };
    nd_report_options given = *options;
    *sinks = (nd_sinks){0};
    ND_TRY(nd_writer_open(DEADLINE_SECONDS, ROOM_BYTES, &sinks->writer));
    given.writer = sinks->writer;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        nd_sink sink;
        const nd_status status = all[i].wanted ? all[i].open(&given, &sink) : ND_OK;
        if (status == ND_OK && all[i].wanted) {
            nd_sinks_add(sinks, sink);
        } else if (status != ND_OK && status != ND_ERR_CANTCREATE && all[i].tracks) {
            warn_of_dropped(all[i].name);
        } else if (status != ND_OK) {
            nd_sinks_close(sinks);
            return status;
        }
    }
    return ND_OK;
}

nd_status nd_sinks_step(nd_sinks *sinks, const nd_step_record *r)
{
    return put_to_all(sinks, r->step, (record){STEP, r});
}

nd_status nd_sinks_validation(nd_sinks *sinks, const nd_validation_record *r)
{
    return put_to_all(sinks, r->step, (record){VALIDATION, r});
}

nd_status nd_sinks_health(nd_sinks *sinks, const nd_health_record *r)
{
    return put_to_all(sinks, r->step, (record){HEALTH, r});
}

nd_status nd_sinks_event(nd_sinks *sinks, const nd_run_event *event)
{
    ND_TRY(put_to_all(sinks, event->step, (record){EVENT, event}));
    return nd_sinks_flush(sinks);
}

nd_status nd_sinks_flush(nd_sinks *sinks)
{
    return sinks->writer ? nd_writer_flush(sinks->writer) : ND_OK;
}

int64_t nd_sinks_metrics_bytes(const nd_sinks *sinks)
{
    return sinks->writer ? nd_writer_bytes(sinks->writer, sinks->all[0].file) : 0;
}

/* The thread's error stays: the run may end with it. */
void nd_sinks_close(nd_sinks *sinks)
{
    const nd_error error = *nd_error_last();
    if (sinks->writer) {
        nd_writer_finish(sinks->writer);
        tell_lost(sinks, true);
        (void)nd_writer_flush(sinks->writer);
        nd_writer_close(sinks->writer);
    }
    for (int i = 0; i < sinks->count; i++) {
        if (sinks->all[i].self) {
            sinks->all[i].close(sinks->all[i].self);
        }
    }
    *sinks = (nd_sinks){0};
    nd_error_restore(&error);
}

// SPDX-License-Identifier: Apache-2.0
#include "runtime/base/log.h"
#include "trainer/report/sink_thread.h"

enum { QUEUE_BYTES = 1 << 20 /* more than a thousand steps of one source */ };

nd_status nd_sinks_add(nd_sinks *sinks, nd_sink sink)
{
    ND_ASSERT(sinks->count < ND_SINKS_MAX);
    ND_TRY(nd_sink_thread_create(
        &sink, sinks->deadline_seconds > 0 ? sinks->deadline_seconds : ND_SINK_DEADLINE_SECONDS,
        sinks->queue_bytes > 0 ? sinks->queue_bytes : QUEUE_BYTES, &sinks->threads[sinks->count]));
    sinks->count++;
    return ND_OK;
}

/* All sinks get the record, also when one of them has failed. */
static nd_status put_to_all(nd_sinks *sinks, nd_record record)
{
    nd_status first = ND_OK;
    sinks->step = record.step;
    for (int i = 0; i < sinks->count; i++) {
        nd_status status = nd_sink_thread_put(sinks->threads[i], &record);
        first = first == ND_OK ? status : first;
    }
    return first;
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
    *sinks = (nd_sinks){0};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        nd_sink sink;
        if (!all[i].wanted) {
            continue;
        }
        nd_status status = all[i].open(options, &sink);
        if (status != ND_OK && status != ND_ERR_CANTCREATE && all[i].tracks) {
            sink = (nd_sink){.name = all[i].name};
            status = ND_OK;
        }
        status = status == ND_OK ? nd_sinks_add(sinks, sink) : status;
        if (status != ND_OK) {
            nd_sinks_close(sinks);
            return status;
        }
    }
    return ND_OK;
}

nd_status nd_sinks_step(nd_sinks *sinks, const nd_step_record *record)
{
    return put_to_all(sinks, (nd_record){ND_RECORD_STEP, record->step, record});
}

nd_status nd_sinks_validation(nd_sinks *sinks, const nd_validation_record *record)
{
    return put_to_all(sinks, (nd_record){ND_RECORD_VALIDATION, record->step, record});
}

nd_status nd_sinks_health(nd_sinks *sinks, const nd_health_record *record)
{
    return put_to_all(sinks, (nd_record){ND_RECORD_HEALTH, record->step, record});
}

nd_status nd_sinks_event(nd_sinks *sinks, const nd_run_event *event)
{
    ND_TRY(put_to_all(sinks, (nd_record){ND_RECORD_EVENT, event->step, event}));
    return nd_sinks_flush(sinks);
}

nd_status nd_sinks_flush(nd_sinks *sinks)
{
    nd_status status = ND_OK;
    for (int i = 0; i < sinks->count && status == ND_OK; i++) {
        status = nd_sink_thread_flush(sinks->threads[i]);
    }
    return status;
}

int64_t nd_sinks_metrics_bytes(const nd_sinks *sinks)
{
    for (int i = 0; i < sinks->count; i++) {
        const int64_t bytes = nd_sink_thread_bytes(sinks->threads[i]);
        if (bytes >= 0) {
            return bytes;
        }
    }
    return 0;
}

/* Every sink that is left learns it, if it still can. */
static void tell_lost(nd_sinks *sinks, const char *name, const nd_sink_loss *loss)
{
    const nd_run_event event = {.kind = ND_RUN_EVENT_RECORDS_LOST,
                                .step = sinks->step,
                                .reason = loss->why,
                                .sink = name,
                                .records = loss->records};
    nd_log_warning("%lld records of this run did not go to %s", (long long)loss->records, name);
    (void)put_to_all(sinks, (nd_record){ND_RECORD_EVENT, event.step, &event});
}

/* The thread's error stays: the run may end with it. */
void nd_sinks_close(nd_sinks *sinks)
{
    nd_sink_loss losses[ND_SINKS_MAX];
    const nd_error error = *nd_error_last();
    for (int i = 0; i < sinks->count; i++) {
        losses[i] = nd_sink_thread_finish(sinks->threads[i]);
    }
    for (int i = 0; i < sinks->count; i++) {
        if (losses[i].records > 0) {
            tell_lost(sinks, nd_sink_thread_name(sinks->threads[i]), &losses[i]);
        }
    }
    while (sinks->count > 0) {
        nd_sink_thread_destroy(sinks->threads[--sinks->count]);
    }
    nd_error_restore(&error);
}

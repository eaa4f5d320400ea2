// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>

#include "runtime/base/log.h"
#include "trainer/report/report.h"

void nd_sinks_add(nd_sinks *sinks, nd_sink sink)
{
    ND_ASSERT(sinks->count < ND_SINKS_MAX);
    sinks->losses[sinks->count] = (nd_sink_loss){0};
    sinks->list[sinks->count++] = sink;
}

/* One record for one sink. */
typedef struct delivery {
    const nd_step_record *step;
    const nd_validation_record *validation;
    const nd_health_record *health;
    const nd_run_event *event;
    const nd_histogram_record *histogram;
} delivery;

static nd_status deliver(const nd_sink *sink, const delivery *d)
{
    if (d->step) {
        return sink->step ? sink->step(sink->self, d->step) : ND_OK;
    }
    if (d->validation) {
        return sink->validation ? sink->validation(sink->self, d->validation) : ND_OK;
    }
    if (d->health) {
        return sink->health ? sink->health(sink->self, d->health) : ND_OK;
    }
    if (d->histogram) {
        return sink->histogram ? sink->histogram(sink->self, d->histogram) : ND_OK;
    }
    return sink->event ? sink->event(sink->self, d->event) : ND_OK;
}

static void close_sink(nd_sink *sink)
{
    if (sink->self) {
        sink->close(sink->self);
    }
    *sink = (nd_sink){.name = sink->name};
}

/* The thread's error is why. */
static void note_failure(nd_sink_loss *loss)
{
    loss->failed = true;
    snprintf(loss->why, sizeof loss->why, "%.*s", ND_SINK_WHY_BYTES - 1, nd_error_last()->message);
    nd_error_clear();
}

static void drop(nd_sink *sink, nd_sink_loss *loss)
{
    note_failure(loss);
    close_sink(sink);
    nd_log_warning("%s takes no more reports of this run, which goes on without it: %s", sink->name,
                   loss->why);
}

static nd_run_event event_of(const nd_sink *sink, const nd_sink_loss *loss, int64_t step)
{
    return (nd_run_event){.kind = ND_RUN_EVENT_RECORDS_LOST,
                          .step = step,
                          .reason = loss->why,
                          .sink = sink->name,
                          .records = loss->records};
}

/* The sink takes records again: it is the first to know how many it has not. */
static nd_status tell_recovered(const nd_sink *sink, nd_sink_loss *loss, int64_t step)
{
    const nd_run_event event = event_of(sink, loss, step);
    nd_status status = deliver(sink, &(delivery){.event = &event});
    if (status == ND_OK) {
        nd_log_warning("%s is written again, without %lld records of this run", sink->name,
                       (long long)loss->records);
        *loss = (nd_sink_loss){0};
    }
    return status;
}

/* A required sink. ND_ERR_IO means that the record is lost, and is no error of the run. */
static nd_status offer(nd_sink *sink, nd_sink_loss *loss, const delivery *d, int64_t step)
{
    nd_status status = deliver(sink, d);
    if (status == ND_OK && loss->failed) {
        status = tell_recovered(sink, loss, step);
        return status == ND_ERR_IO ? ND_OK : status;
    }
    if (status != ND_ERR_IO) {
        return status;
    }
    loss->records++;
    if (!loss->failed) {
        note_failure(loss);
        nd_log_warning("%s loses records of this run, which goes on, until the disk takes them "
                       "again: %s",
                       sink->name, loss->why);
    }
    return ND_OK;
}

static nd_status deliver_to_all(nd_sinks *sinks, delivery d, int64_t step)
{
    sinks->step = step;
    for (int i = 0; i < sinks->count; i++) {
        nd_sink *sink = &sinks->list[i];
        nd_sink_loss *loss = &sinks->losses[i];
        if (sink->required) {
            ND_TRY(offer(sink, loss, &d, step));
            continue;
        }
        if (sink->self && deliver(sink, &d) != ND_OK) {
            drop(sink, loss);
        }
        loss->records += loss->failed && (d.step || d.validation);
    }
    return ND_OK;
}

nd_status nd_sinks_open(nd_sinks *sinks, const nd_report_options *options)
{
    nd_trackers trackers = options->config->log.trackers;
    const struct {
        const char *name;
        nd_status (*open)(const nd_report_options *, nd_sink *);
        bool wanted, tracks;
    } all[] = {
        {"metrics.jsonl", nd_jsonl_sink_open, true, false},
        {"the terminal", nd_terminal_sink_open, true, false},
        {"TensorBoard", nd_tensorboard_sink_open,
         trackers == ND_TRACKERS_TENSORBOARD || trackers == ND_TRACKERS_ALL, true},
        {"wandb", nd_follower_sink_open, trackers == ND_TRACKERS_WANDB, true},
        {"trackio", nd_follower_sink_open, trackers == ND_TRACKERS_TRACKIO, true},
    };
    *sinks = (nd_sinks){0};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        nd_sink sink;
        if (!all[i].wanted) {
            continue;
        }
        nd_status status = all[i].open(options, &sink);
        if (status == ND_OK) {
            nd_sinks_add(sinks, sink);
        } else if (all[i].tracks) {
            nd_sinks_add(sinks, (nd_sink){.name = all[i].name});
            drop(&sinks->list[sinks->count - 1], &sinks->losses[sinks->count - 1]);
        } else {
            nd_sinks_close(sinks);
            return status;
        }
    }
    return ND_OK;
}

nd_status nd_sinks_step(nd_sinks *sinks, const nd_step_record *record)
{
    return deliver_to_all(sinks, (delivery){.step = record}, record->step);
}

nd_status nd_sinks_validation(nd_sinks *sinks, const nd_validation_record *record)
{
    return deliver_to_all(sinks, (delivery){.validation = record}, record->step);
}

nd_status nd_sinks_health(nd_sinks *sinks, const nd_health_record *record)
{
    return deliver_to_all(sinks, (delivery){.health = record}, record->step);
}

nd_status nd_sinks_event(nd_sinks *sinks, const nd_run_event *event)
{
    return deliver_to_all(sinks, (delivery){.event = event}, event->step);
}

nd_status nd_sinks_histogram(nd_sinks *sinks, const nd_histogram_record *record)
{
    return deliver_to_all(sinks, (delivery){.histogram = record}, record->step);
}

/* Every sink that is left learns it, if it still can. The thread's error stays: the run may end
 * with it. */
static void tell_lost(const nd_sinks *sinks, int index)
{
    const nd_sink_loss *loss = &sinks->losses[index];
    const nd_run_event event = event_of(&sinks->list[index], loss, sinks->step);
    const nd_error error = *nd_error_last();
    nd_log_warning("%lld records of this run did not go to %s", (long long)loss->records,
                   sinks->list[index].name);
    for (int i = 0; i < sinks->count; i++) {
        (void)deliver(&sinks->list[i], &(delivery){.event = &event});
    }
    nd_error_restore(&error);
}

void nd_sinks_close(nd_sinks *sinks)
{
    for (int i = 0; i < sinks->count; i++) {
        if (sinks->losses[i].records > 0) {
            tell_lost(sinks, i);
        }
    }
    while (sinks->count > 0) {
        close_sink(&sinks->list[--sinks->count]);
    }
}

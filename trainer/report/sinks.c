// SPDX-License-Identifier: Apache-2.0
#include "trainer/report/report.h"

#include "runtime/base/log.h"

void nd_sinks_add(nd_sinks *sinks, nd_sink sink)
{
    ND_ASSERT(sinks->count < ND_SINKS_MAX);
    sinks->list[sinks->count++] = sink;
}

nd_status nd_sinks_open(nd_sinks *sinks, const nd_report_options *options)
{
    nd_trackers trackers = options->config->log.trackers;
    const struct {
        nd_status (*open)(const nd_report_options *, nd_sink *);
        bool wanted;
    } all[] = {
        {nd_jsonl_sink_open, true},
        {nd_terminal_sink_open, true},
        {nd_tensorboard_sink_open,
         trackers == ND_TRACKERS_TENSORBOARD || trackers == ND_TRACKERS_ALL},
        {nd_follower_sink_open, trackers == ND_TRACKERS_WANDB || trackers == ND_TRACKERS_TRACKIO},
    };
    *sinks = (nd_sinks){0};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        nd_sink sink;
        if (!all[i].wanted) {
            continue;
        }
        nd_status status = all[i].open(options, &sink);
        if (status != ND_OK) {
            nd_sinks_close(sinks);
            return status;
        }
        nd_sinks_add(sinks, sink);
    }
    return ND_OK;
}

static void remove_sink(nd_sinks *sinks, int index)
{
    sinks->list[index].close(sinks->list[index].self);
    for (int i = index + 1; i < sinks->count; i++) {
        sinks->list[i - 1] = sinks->list[i];
    }
    sinks->count--;
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

static nd_status deliver_to_all(nd_sinks *sinks, delivery d)
{
    for (int i = 0; i < sinks->count;) {
        const nd_sink *sink = &sinks->list[i];
        nd_status status = deliver(sink, &d);
        if (status == ND_OK) {
            i++;
            continue;
        }
        if (sink->required) {
            return status;
        }
        nd_log_warning("%s takes no more reports of this run, which goes on without it: %s",
                       sink->name, nd_error_last()->message);
        sinks->dropped++;
        remove_sink(sinks, i);
    }
    return ND_OK;
}

nd_status nd_sinks_step(nd_sinks *sinks, const nd_step_record *record)
{
    return deliver_to_all(sinks, (delivery){.step = record});
}

nd_status nd_sinks_validation(nd_sinks *sinks, const nd_validation_record *record)
{
    return deliver_to_all(sinks, (delivery){.validation = record});
}

nd_status nd_sinks_health(nd_sinks *sinks, const nd_health_record *record)
{
    return deliver_to_all(sinks, (delivery){.health = record});
}

nd_status nd_sinks_event(nd_sinks *sinks, const nd_run_event *event)
{
    return deliver_to_all(sinks, (delivery){.event = event});
}

nd_status nd_sinks_histogram(nd_sinks *sinks, const nd_histogram_record *record)
{
    return deliver_to_all(sinks, (delivery){.histogram = record});
}

void nd_sinks_close(nd_sinks *sinks)
{
    while (sinks->count > 0) {
        remove_sink(sinks, sinks->count - 1);
    }
}

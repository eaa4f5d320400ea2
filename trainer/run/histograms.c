// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/histograms.h"

#include <stdio.h>

#include "runtime/device/staging.h"

enum { LANDING_ELEMENTS = 1 << 20 };

/* The histograms of one tensor. Both go through one all-reduce, which over NCCL takes at most 4096
 * bytes of host memory. */
typedef struct pair {
    nd_histogram weights, gradients;
} pair;
_Static_assert(sizeof(pair) <= 4096, "host memory of one all-reduce over NCCL");

typedef struct counting {
    nd_run_histograms *h;
    const nd_param *param; /* the one that is counted */
    pair *sum;
} counting;

nd_status nd_run_histograms_init(nd_run_histograms *h, nd_trainer *trainer)
{
    nd_rank *r = trainer->rank;
    *h = (nd_run_histograms){.interval = r->config->log.histogram_interval};
    if (h->interval == 0) {
        return ND_OK;
    }
    h->trainer = trainer;
    if (r->device->kind != ND_DEVICE_CUDA) {
        return ND_OK;
    }
    void *memory = NULL;
    ND_TRY(nd_host_alloc(r->device, LANDING_ELEMENTS * sizeof(float), &memory));
    h->landing = memory;
    return ND_OK;
}

static nd_status count_values(nd_run_histograms *h, const float *values, int64_t count,
                              nd_histogram *out)
{
    nd_stream *stream = &h->trainer->rank->stream;
    if (!h->landing) {
        nd_histogram_add(out, values, count);
        return ND_OK;
    }
    for (int64_t done = 0; done < count;) {
        int64_t n = count - done < LANDING_ELEMENTS ? count - done : LANDING_ELEMENTS;
        ND_TRY(nd_copy(stream, h->landing, values + done, (size_t)n * sizeof(float)));
        ND_TRY(nd_stream_sync(stream));
        nd_histogram_add(out, h->landing, n);
        done += n;
    }
    return ND_OK;
}

static nd_status count_span(void *context, const nd_span *span)
{
    counting *c = context;
    const nd_fsdp *fsdp = &c->h->trainer->model->fsdp;
    int64_t count = span->rows * span->cols;
    if (span->param != c->param) {
        return ND_OK;
    }
    ND_TRY(count_values(c->h, fsdp->master + span->begin, count, &c->sum->weights));
    return fsdp->released[span->param->unit->index] > 0
               ? count_values(c->h, fsdp->grad + span->begin, count, &c->sum->gradients)
               : ND_OK;
}

static nd_status deliver(nd_sinks *sinks, int64_t step, const char *kind, const char *name,
                         const nd_histogram *histogram)
{
    char tag[ND_PARAM_NAME + 16];
    snprintf(tag, sizeof tag, "%s/%s", kind, name);
    return nd_sinks_histogram(
        sinks, &(nd_histogram_record){.step = step, .tag = tag, .histogram = histogram});
}

static nd_status make_pair(nd_run_histograms *h, const nd_param *param, nd_sinks *sinks)
{
    nd_rank *r = h->trainer->rank;
    const nd_layout *layout = h->trainer->model->layout;
    int64_t step = h->trainer->position.step;
    pair sum = {0};
    counting c = {h, param, &sum};
    if (param->owned) {
        ND_TRY(nd_layout_each_span(layout, param->unit, layout->shard_index, count_span, &c));
    }
    ND_TRY(nd_all_reduce(r, ND_GROUP_MODEL, &sum, sizeof sum / sizeof(int64_t), ND_DTYPE_I64,
                         ND_REDOP_SUM));
    ND_TRY(deliver(sinks, step, "weights", param->name, &sum.weights));
    return deliver(sinks, step, "gradients", param->name, &sum.gradients);
}

nd_status nd_run_histograms_step(nd_run_histograms *h, nd_sinks *sinks)
{
    if (!h->trainer || h->trainer->position.step % h->interval != 0) {
        return ND_OK;
    }
    nd_rank *r = h->trainer->rank;
    const nd_layout *layout = h->trainer->model->layout;
    if (r->coord.at[ND_AXIS_DP_REPLICATE] != 0) { /* the first replica has the same values */
        return ND_OK;
    }
    ND_TRY(nd_stream_sync(&r->stream)); /* the update is complete */
    for (int i = 0; i < layout->param_count; i++) {
        ND_TRY(make_pair(h, &layout->params[i], sinks));
    }
    return ND_OK;
}

void nd_run_histograms_fini(nd_run_histograms *h)
{
    if (h->landing) {
        nd_host_free(h->trainer->rank->device, h->landing);
    }
    *h = (nd_run_histograms){0};
}

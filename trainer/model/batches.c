// SPDX-License-Identifier: Apache-2.0
#include "trainer/model/batches.h"

#include <string.h>

static int64_t padded(int64_t count)
{
    return (count + 63) / 64 * 64;
}

static size_t slot_bytes(const nd_batches *b)
{
    return (size_t)(ND_BATCH_ARRAYS * padded(b->dims->T)) * sizeof *b->memory;
}

void nd_batches_plan(nd_batches *b, nd_rank *rank, const nd_dims *dims, nd_memplan *plan)
{
    b->rank = rank;
    b->dims = dims;
    b->slots = nd_rank_is_gpu(rank) ? ND_BATCH_SLOTS : 1;
    int slots = nd_memplan_want(plan, ND_MEM_DATA, "micro-batches: ids, labels, positions",
                                (size_t)b->slots * slot_bytes(b), &b->memory);
    if (b->slots > 1) {
        nd_memplan_want(plan, ND_MEM_DATA, "positions in use",
                        (size_t)dims->T * sizeof *b->positions, &b->positions);
    } else {
        nd_memplan_also(plan, slots,
                        (size_t)(ND_BATCH_POSITIONS * padded(dims->T)) * sizeof *b->positions,
                        &b->positions);
    }
}

nd_status nd_batches_open(nd_batches *b)
{
    nd_device *device = b->rank->device;
    int64_t in_flight = b->rank->config->train.gradient_accumulation_steps + 1;
    ND_TRY(device->table->stream_init(device, &b->stream));
    for (int i = 0; i < b->slots; i++) {
        ND_TRY(device->table->event_init(device, &b->read[i]));
    }
    return nd_staging_init(&b->staging, device, slot_bytes(b), in_flight);
}

void nd_batches_close(nd_batches *b)
{
    if (b->stream.device) {
        const nd_device_table *table = b->stream.device->table;
        table->stream_fini(&b->stream);
        for (int i = 0; i < b->slots; i++) {
            table->event_fini(&b->read[i]);
        }
        nd_staging_fini(&b->staging);
    }
    *b = (nd_batches){0};
}

int32_t *nd_batches_at(const nd_batches *b, nd_batch_array array)
{
    return b->memory + (b->current * ND_BATCH_ARRAYS + (int)array) * padded(b->dims->T);
}

/* Labels in the order in which the head meets them: chunk by chunk, in each the rows of all tp
 * peers. */
static void order_labels(const nd_dims *d, const int32_t *labels, int32_t *out)
{
    int64_t peers = d->T / d->Tl;
    for (int64_t begin = 0; begin < d->Tl; begin += d->head_rows) {
        int64_t rows = d->Tl - begin < d->head_rows ? d->Tl - begin : d->head_rows;
        for (int64_t p = 0; p < peers; p++) {
            memcpy(out + begin * peers + p * rows, labels + p * d->Tl + begin, (size_t)rows * 4);
        }
    }
}

static nd_status copy_in(nd_batches *b, const int32_t *inputs, const int32_t *labels,
                         const int32_t *positions, nd_event **copied)
{
    void *memory = NULL;
    int64_t stride = padded(b->dims->T);
    size_t bytes = (size_t)b->dims->T * sizeof *inputs;
    ND_TRY(nd_staging_begin(&b->staging, &memory));
    int32_t *staged = memory;
    memcpy(staged + ND_BATCH_IDS * stride, inputs, bytes);
    order_labels(b->dims, labels, staged + ND_BATCH_LABELS * stride);
    memcpy(staged + ND_BATCH_POSITIONS * stride, positions, bytes);
    ND_TRY(nd_copy(&b->stream, nd_batches_at(b, ND_BATCH_IDS), staged, slot_bytes(b)));
    return nd_staging_end(&b->staging, &b->stream, copied);
}

nd_status nd_batches_load(nd_batches *b, const int32_t *inputs, const int32_t *labels,
                          const int32_t *positions)
{
    nd_stream *compute = &b->rank->stream;
    nd_event *copied = NULL;
    /* All that reads the micro-batch so far is enqueued by now. */
    ND_TRY(compute->device->table->event_record(&b->read[b->current], compute));
    b->current = (b->current + 1) % b->slots;
    ND_TRY(nd_stream_wait(&b->stream, &b->read[b->current]));
    ND_TRY(copy_in(b, inputs, labels, positions, &copied));
    ND_TRY(nd_stream_wait(compute, copied));
    int32_t *arrived = nd_batches_at(b, ND_BATCH_POSITIONS);
    return arrived == b->positions
               ? ND_OK
               : nd_copy(compute, b->positions, arrived, (size_t)b->dims->T * sizeof *arrived);
}

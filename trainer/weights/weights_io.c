// SPDX-License-Identifier: Apache-2.0
/* Initial values, and weights between this rank's shards and a model folder. */
#include "trainer/weights/weights.h"

#include <stdlib.h>

#include "runtime/base/math.h"

/* Initial values. */

enum { ONES = 1 << 14 };

typedef struct init_context {
    nd_fsdp *fsdp;
    float init_std;
    uint64_t seed;
    float *ones;
} init_context;

/* A value depends on seed, parameter and the element's place in the whole tensor, whatever the
 * mesh. */
static nd_status init_span(void *context, const nd_span *span)
{
    init_context *c = context;
    nd_rank *r = c->fsdp->rank;
    float *to = c->fsdp->master + span->begin;
    int64_t count = span->rows * span->cols, adjacent = nd_span_adjacent(span);
    for (int64_t done = 0; span->param->init == ND_INIT_ONE && done < count; done += ONES) {
        const int64_t n = nd_min(count - done, ONES);
        ND_TRY(nd_copy(&r->stream, to + done, c->ones, (size_t)n * sizeof *to));
    }
    if (span->param->init == ND_INIT_ONE) {
        return ND_OK;
    }
    if (span->param->init == ND_INIT_ZERO) {
        return nd_zero(&r->stream, to, (size_t)count * sizeof *to);
    }
    for (int64_t done = 0; done < count; done += adjacent) {
        ND_TRY(ND_CALL(r->ops, &r->stream, random_normal, .out = to + done, .count = adjacent,
                       .deviation = c->init_std, .seed = c->seed,
                       .random_stream = span->param->random_stream,
                       .first = (uint64_t)nd_span_global(span, done)));
    }
    return ND_OK;
}

nd_status nd_weights_init(nd_fsdp *fsdp, double init_std, uint64_t seed)
{
    init_context context = {.fsdp = fsdp, .init_std = (float)init_std, .seed = seed};
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(ONES, &context.ones));
    for (int i = 0; i < ONES; i++) {
        context.ones[i] = 1.0f;
    }
    for (int u = 0; u < fsdp->layout->unit_count && status == ND_OK; u++) {
        status = nd_layout_each_span(fsdp->layout, &fsdp->layout->units[u],
                                     fsdp->layout->shard_index, init_span, &context);
    }
    nd_status synced = nd_stream_sync(&fsdp->rank->stream); /* `ones` is read until then */
    free(context.ones);
    nd_fsdp_weights_changed(fsdp);
    return status == ND_OK ? synced : status;
}

/* Reading. */

/* One rank's reading. */
typedef struct filling {
    nd_fsdp *fsdp;
    const nd_values *values;
    bool shared;
    float *host; /* [capacity], for a GPU; NULL: they are read to where nd_fsdp_put wants them */
    int64_t capacity;   /* elements that are read at a time */
    int64_t begin, end; /* of the flat state arrays: these elements */
    nd_segment_kind kind;
    bool wants; /* they are asked for; then, when they are there: */
    /* what becomes of them: nd_fsdp_measure or nd_fsdp_put. */
    nd_status (*use)(nd_fsdp *, const nd_param *, int64_t begin, int64_t count, const float *);
    nd_status status; /* of this rank's reading so far */
} filling;

static nd_status visit_part(void *context, const nd_span *part)
{
    const filling *f = context;
    const nd_fsdp *fsdp = f->fsdp;
    float *const place = !f->host && !fsdp->converts
                             ? fsdp->master + part->begin
                             : (f->host ? f->host : fsdp->landing) + part->begin - f->begin;
    return f->wants ? f->values->want(f->values->context, part, place)
                    : f->use(f->fsdp, part->param, part->begin, part->rows * part->cols, place);
}

static nd_status visit_span(void *context, const nd_span *span)
{
    const filling *f = context;
    return span->param->segment == f->kind &&
                   (!f->shared || nd_shared_reads(f->fsdp->rank, span->param))
               ? nd_span_each_part(span, f->begin, f->end, visit_part, context)
               : ND_OK;
}

/* Reads a segment of a unit in pieces. */
static nd_status fill_segment(filling *f, const nd_unit *unit)
{
    const nd_layout *layout = f->fsdp->layout;
    const nd_segment *segment = &unit->segments[f->kind];
    const int64_t end = segment->shard_offset + segment->shard_count;
    for (f->begin = segment->shard_offset; f->begin < end; f->begin = f->end) {
        f->end = f->begin + nd_min(f->capacity, end - f->begin);
        f->wants = true;
        ND_TRY(nd_layout_each_span(layout, unit, layout->shard_index, visit_span, f));
        ND_TRY(f->values->run ? f->values->run(f->values->context) : ND_OK);
        f->wants = false;
        ND_TRY(nd_layout_each_span(layout, unit, layout->shard_index, visit_span, f));
    }
    return ND_OK;
}

/* measures: only the amaxes of this rank's part of a unit's FP8 weights. */
static nd_status fill_unit(filling *f, const nd_unit *unit, bool measures)
{
    f->use = measures ? nd_fsdp_measure : nd_fsdp_put;
    ND_TRY(measures ? nd_scales_begin_weights(f->fsdp->scales, unit->layer) : ND_OK);
    for (f->kind = 0; f->kind < ND_SEGMENT_COUNT; f->kind++) {
        ND_TRY(!measures || f->kind == ND_SEGMENT_FP8 ? fill_segment(f, unit) : ND_OK);
    }
    return ND_OK;
}

/* Collective. The first agreement after a failure ends all ranks: this rank reads nothing more
 * until then. */
static nd_status agree(filling *f)
{
    return nd_shared_agree(f->fsdp->rank, f->status, "the model");
}

static nd_status fill_units(filling *f)
{
    const nd_layout *layout = f->fsdp->layout;
    for (int u = 0; u < layout->unit_count; u++) {
        const nd_unit *unit = &layout->units[u];
        if (f->fsdp->converts && unit->segments[ND_SEGMENT_FP8].count > 0) {
            f->status = f->status == ND_OK ? fill_unit(f, unit, true) : f->status;
            ND_TRY(agree(f));
            ND_TRY(nd_scales_settle_weights(f->fsdp->scales, unit->layer));
        }
        f->status = f->status == ND_OK ? fill_unit(f, unit, false) : f->status;
    }
    return agree(f);
}

nd_status nd_weights_fill(nd_fsdp *fsdp, const nd_values *values, bool shared)
{
    const bool gpu = fsdp->rank->device->kind != ND_DEVICE_CPU;
    filling f = {.fsdp = fsdp, .values = values, .shared = shared, .capacity = INT64_MAX};
    if (gpu || fsdp->converts) {
        f.capacity = fsdp->converts ? fsdp->landing_count : ND_FSDP_PIECE;
    }
    f.status = gpu ? ND_ALLOC(f.capacity, &f.host) : ND_OK;
    nd_status status = fill_units(&f);
    free(f.host);
    if (status == ND_OK && shared) {
        status =
            nd_shared_pass_on(fsdp->rank, fsdp->layout, fsdp->master, fsdp->converts ? fsdp : NULL);
    }
    nd_fsdp_weights_changed(fsdp);
    return status;
}

static nd_status read_span(void *context, const nd_span *span, float *to)
{
    const nd_hf_reader *reader = context;
    const int64_t count = span->rows * span->cols, adjacent = nd_span_adjacent(span);
    int64_t n = 0;
    for (int64_t done = 0; done < count; done += n) {
        const int64_t at = nd_span_global(span, done);
        n = nd_min(adjacent - done % adjacent, nd_param_adjacent(span->param, at));
        ND_TRY(nd_hf_reader_read(reader, span->param->file_name, nd_param_in_file(span->param, at),
                                 n, to + done));
    }
    return ND_OK;
}

nd_status nd_weights_load(nd_fsdp *fsdp, const nd_hf_reader *reader)
{
    const nd_values values = {.context = (void *)reader, .want = read_span};
    return nd_weights_fill(fsdp, &values, true);
}

/* Writing. */

enum { SAVE_BYTES = 16 << 20, SAVE_PIECE_MIN = 1024, SAVE_PIECE_MAX = 1 << 18 };

typedef struct save_context {
    nd_hf_writer *writer;
    int64_t begin, end; /* elements of the segment's shard that the piece holds */
    int64_t shard_offset;
    const float *piece; /* of one member */
    nd_segment_kind segment;
} save_context;

/* The part of a span that lies in the piece. */
static nd_status save_span(void *context, const nd_span *span)
{
    save_context *c = context;
    if (span->param->segment != c->segment || !span->param->owned) {
        return ND_OK;
    }
    int64_t at = span->begin - c->shard_offset; /* in the shard */
    int64_t begin = at > c->begin ? at : c->begin, adjacent = nd_span_adjacent(span);
    int64_t end = at + span->rows * span->cols < c->end ? at + span->rows * span->cols : c->end;
    while (begin < end) {
        const int64_t from = nd_span_global(span, begin - at);
        int64_t n = nd_min(end - begin, adjacent - (begin - at) % adjacent);
        n = nd_min(n, nd_param_adjacent(span->param, from));
        ND_TRY(nd_hf_writer_write(c->writer, span->param->file_name,
                                  nd_param_in_file(span->param, from), n,
                                  c->piece + begin - c->begin));
        begin += n;
    }
    return ND_OK;
}

/* A save. Rank 0 places the pieces of the other ranks by the layout of each tp coordinate. */
typedef struct save_job {
    nd_fsdp *fsdp;
    nd_hf_writer *writer; /* rank 0 only */
    nd_layout **layouts;  /* [tp] */
    int tp, members;
    int64_t piece;   /* elements */
    float *gathered; /* (members, piece), on the host */
    float *landing;  /* where they arrive: on a GPU its gradients, free now; else the same */
} save_job;

/* Member i of the model group is (shard, tp) = (i / tp, i mod tp). */
static nd_status save_piece(save_job *job, const nd_unit *unit, nd_segment_kind kind, int64_t begin,
                            int64_t count)
{
    nd_rank *r = job->fsdp->rank;
    const nd_segment *segment = &unit->segments[kind];
    const float *own = job->fsdp->master + segment->shard_offset + begin;
    ND_TRY(nd_comm_all_gather(
        r->groups.by_kind[ND_GROUP_MODEL], &r->stream,
        &(nd_comm_args){.send = own, .recv = job->landing, .count = count, .dtype = ND_DTYPE_F32},
        NULL));
    if (job->landing != job->gathered && job->writer) {
        ND_TRY(nd_copy(&r->stream, job->gathered, job->landing,
                       (size_t)(count * job->members) * sizeof *job->landing));
        ND_TRY(nd_stream_sync(&r->stream));
    }
    for (int i = 0; job->writer && i < job->members; i++) {
        save_context context = {
            .writer = job->writer,
            .begin = begin,
            .end = begin + count,
            .shard_offset = segment->shard_offset,
            .piece = job->gathered + i * count,
            .segment = kind,
        };
        const nd_layout *layout = job->layouts[i % job->tp];
        ND_TRY(nd_layout_each_span(layout, &layout->units[unit->index], i / job->tp, save_span,
                                   &context));
    }
    return ND_OK;
}

static nd_status save_units(save_job *job)
{
    const nd_layout *layout = job->fsdp->layout;
    for (int u = 0; u < layout->unit_count; u++) {
        for (nd_segment_kind kind = 0; kind < ND_SEGMENT_COUNT; kind++) {
            int64_t count = layout->units[u].segments[kind].shard_count;
            for (int64_t begin = 0; begin < count; begin += job->piece) {
                int64_t n = count - begin < job->piece ? count - begin : job->piece;
                ND_TRY(save_piece(job, &layout->units[u], kind, begin, n));
            }
        }
    }
    return ND_OK;
}

static nd_status open_writer(save_job *job, const char *folder, nd_dtype dtype, bool byte_tokenizer,
                             const char *source, const char *tokenizer)
{
    const nd_rank *r = job->fsdp->rank;
    nd_hf_writer_options options = {.shape = r->shape,
                                    .dtype = dtype,
                                    .byte_tokenizer = byte_tokenizer,
                                    .source = source,
                                    .tokenizer = tokenizer,
                                    .chat = r->config->data.chat_format};
    ND_TRY(nd_hf_writer_open(folder, &options, &job->writer));
    ND_TRY(ND_ALLOC(job->tp, &job->layouts));
    for (int t = 0; t < job->tp; t++) {
        nd_layout_options of = {.shape = &r->shape,
                                .mesh = &r->mesh,
                                .coord = r->coord,
                                .converts = nd_scales_in_segment,
                                .context = job->fsdp->scales};
        of.coord.at[ND_AXIS_TP] = t;
        ND_TRY(nd_layout_create(&of, &job->layouts[t]));
    }
    return ND_OK;
}

nd_status nd_weights_save(nd_fsdp *fsdp, const char *folder, nd_dtype dtype, bool byte_tokenizer,
                          const char *source, const char *tokenizer)
{
    nd_rank *r = fsdp->rank;
    nd_status status = ND_OK;
    save_job job = {.fsdp = fsdp,
                    .tp = r->mesh.size[ND_AXIS_TP],
                    .members = r->groups.by_kind[ND_GROUP_MODEL]->size};
    job.piece = SAVE_BYTES / 4 / job.members;
    job.piece = job.piece < SAVE_PIECE_MIN   ? SAVE_PIECE_MIN
                : job.piece > SAVE_PIECE_MAX ? SAVE_PIECE_MAX
                                             : job.piece;
    if (r->config->limits.save_piece > 0) {
        job.piece = r->config->limits.save_piece;
    }
    if (nd_rank_is_gpu(r) && job.piece > fsdp->layout->shard_total / job.members) {
        job.piece = fsdp->layout->shard_total / job.members;
    }
    ND_TRY(ND_ALLOC(job.piece * job.members, &job.gathered));
    job.landing = nd_rank_is_gpu(r) ? fsdp->grad : job.gathered;
    if (r->rank == 0) {
        ND_TRY_OUT(open_writer(&job, folder, dtype, byte_tokenizer, source, tokenizer));
    }
    ND_TRY_OUT(save_units(&job));
    if (job.writer) {
        nd_hf_writer *writer = job.writer;
        job.writer = NULL;
        ND_TRY_OUT(nd_hf_writer_commit(writer));
    }
    status = nd_comm_barrier(r->groups.by_kind[ND_GROUP_WORLD]);
out:
    nd_hf_writer_abort(job.writer);
    for (int t = 0; job.layouts && t < job.tp; t++) {
        nd_layout_destroy(job.layouts[t]);
    }
    free(job.layouts);
    free(job.gathered);
    return status;
}

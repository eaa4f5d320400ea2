// SPDX-License-Identifier: Apache-2.0
/* Weights between this rank's shards and a model folder. */
#include "trainer/weights/weights.h"

#include <stdlib.h>

enum {
    LOAD_BLOCK = 1 << 18,
    SAVE_BYTES = 16 << 20,
    SAVE_PIECE_MIN = 1024,
    SAVE_PIECE_MAX = 1 << 18
};

typedef struct load_context {
    nd_fsdp *fsdp;
    const nd_hf_reader *reader;
    float *block;
} load_context;

static nd_status load_span(void *context, const nd_span *span)
{
    load_context *c = context;
    nd_stream *stream = &c->fsdp->rank->stream;
    if (!nd_shared_reads(c->fsdp->rank, span->param)) {
        return ND_OK;
    }
    int64_t count = span->rows * span->cols, adjacent = nd_span_adjacent(span);
    for (int64_t done = 0, n; done < count; done += n) {
        int64_t left = adjacent - done % adjacent;
        n = left < LOAD_BLOCK ? left : LOAD_BLOCK;
        ND_TRY(nd_hf_reader_read(c->reader, span->param->name, nd_span_global(span, done), n,
                                 c->block));
        ND_TRY(nd_copy(stream, c->fsdp->master + span->begin + done, c->block, (size_t)n * 4));
        ND_TRY(nd_stream_sync(stream));
    }
    return ND_OK;
}

/* The units that this rank reads, or its parts of them. */
static nd_status load_units(nd_fsdp *fsdp, const nd_hf_reader *reader)
{
    const nd_layout *layout = fsdp->layout;
    load_context context = {.fsdp = fsdp, .reader = reader};
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(LOAD_BLOCK, &context.block));
    for (int u = 0; u < layout->unit_count && status == ND_OK; u++) {
        status = nd_layout_each_span(layout, &layout->units[u], layout->shard_index, load_span,
                                     &context);
    }
    free(context.block);
    return status;
}

nd_status nd_weights_load(nd_fsdp *fsdp, const nd_hf_reader *reader)
{
    bool elsewhere = false;
    nd_status status =
        nd_shared_agree(fsdp->rank, load_units(fsdp, reader), "the model", &elsewhere);
    status = status == ND_OK ? nd_shared_pass_on(fsdp->rank, fsdp->layout, fsdp->master) : status;
    nd_fsdp_weights_changed(fsdp);
    return status;
}

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
    if (span->param->segment != c->segment) {
        return ND_OK;
    }
    int64_t at = span->begin - c->shard_offset; /* in the shard */
    int64_t begin = at > c->begin ? at : c->begin, adjacent = nd_span_adjacent(span);
    int64_t end = at + span->rows * span->cols < c->end ? at + span->rows * span->cols : c->end;
    while (begin < end) {
        int64_t left = adjacent - (begin - at) % adjacent;
        int64_t n = end - begin < left ? end - begin : left;
        ND_TRY(nd_hf_writer_write(c->writer, span->param->name, nd_span_global(span, begin - at), n,
                                  c->piece + begin - c->begin));
        begin += n;
    }
    return ND_OK;
}

/* What rank 0 needs to place the pieces of the other ranks: the layout of each tp coordinate. */
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
    const nd_layout *layout = job->fsdp->layout;
    nd_hf_writer_options options = {.shape = r->shape,
                                    .dtype = dtype,
                                    .byte_tokenizer = byte_tokenizer,
                                    .source = source,
                                    .tokenizer = tokenizer};
    nd_hf_tensor *tensors = NULL;
    ND_TRY(nd_hf_tensors_of(layout, &tensors));
    nd_status status =
        nd_hf_writer_open(folder, &options, tensors, layout->param_count, &job->writer);
    free(tensors);
    if (status != ND_OK) {
        return status;
    }
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

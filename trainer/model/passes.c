// SPDX-License-Identifier: Apache-2.0
/*
 * The passes of a stage, and what they do before and behind the blocks: the embedding, and the
 * head.
 *
 * The head is the final norm, vocabulary-parallel logits and cross entropy, chunked over tokens:
 * logits never exist for the whole sequence. The head's backward runs inside its forward, so the
 * global number of counted labels is on the device beforehand, and dlogits are divided by it where
 * they are made.
 *
 * A chunk takes the same rows of every tp peer (rows [begin, begin + rows) of each one's Tl), so
 * its gathered order is (peer, row); nd_model_load puts the labels in that order.
 *
 * On a CPU a chunk's logits are tiles of head_columns columns, which stay in the caches from one op
 * to the next: the statistics of a tile are made right after its product, and both products of its
 * gradient right after the gradient. A tile goes to memory once, between the chunk's forward and
 * its backward.
 */
#include "runtime/base/math.h"
#include "trainer/model/linear.h"

/* The vocabulary-parallel embedding: each tp rank looks up the rows that it holds, and the sum over
 * tp leaves each rank its tokens. */

static nd_tensor ids_of(const nd_activation_set *set)
{
    return nd_tensor_1d(set->batch.ids, ND_DTYPE_I32, set->T);
}

/* x (n, C) times a multiplier, in place; 1: nothing is done. */
static nd_status model_scale(nd_model *m, nd_trace_kind kind, nd_tensor x, float scale)
{
    if (scale != 1.0f) {
        ND_OP(m->rank, kind, axpy, .out = x, .x = x, .scale = scale);
    }
    return ND_OK;
}

nd_status nd_embed_forward(nd_model *m, nd_activation_set *set, nd_residual *out)
{
    nd_rank *r = m->rank;
    const int64_t first = m->stage->layers.begin;
    const nd_unit *unit = nd_layout_param(m->layout, ND_PARAM_EMBED, -1)->unit;
    nd_tensor x = nd_set_block(set, first)->x_in; /* (Tl, C) */
    nd_tensor partial = nd_tp_partial(r, x, m->work.full_b);
    ND_TRY(nd_fsdp_acquire(&m->fsdp, unit));
    ND_TRY(nd_fsdp_prefetch(&m->fsdp, nd_layout_unit(m->layout, ND_UNIT_BLOCK, first)));
    ND_OP(r, ND_TRACE_ELEMENTWISE, embedding_fwd, .out = partial, .ids = ids_of(set),
          .table = nd_fsdp_weight(&m->fsdp, ND_PARAM_EMBED, ND_PARAM_EMBED, -1),
          .first = m->dims.vocab_first);
    if (unit->kind != ND_UNIT_HEAD) { /* a tied table stays until the end of backward */
        nd_fsdp_release(&m->fsdp, unit);
    }
    ND_TRY(nd_tp_reduce(r, partial, x, NULL));
    ND_TRY(model_scale(m, ND_TRACE_ELEMENTWISE, x, m->dims.lookup_scale));
    *out = (nd_residual){.x = x};
    return ND_OK;
}

nd_status nd_embed_backward(nd_model *m, nd_activation_set *set)
{
    nd_rank *r = m->rank;
    const nd_unit *unit = nd_layout_param(m->layout, ND_PARAM_EMBED, -1)->unit;
    nd_tensor dx;
    ND_TRY(model_scale(m, ND_TRACE_ELEMENTWISE, m->work.dx, m->dims.lookup_scale));
    ND_TRY(nd_tp_gather(r, m->work.dx, m->work.full_a, NULL, &dx));
    /* A tied table's gradient was begun by the head and is released here, last. */
    if (unit->kind != ND_UNIT_HEAD) {
        ND_TRY(nd_fsdp_grad_acquire(&m->fsdp, unit));
        ND_TRY(nd_fsdp_grad_zero_if_fresh(&m->fsdp, ND_PARAM_EMBED, -1));
    }
    ND_OP(r, ND_TRACE_ELEMENTWISE, embedding_bwd,
          .dtable = nd_fsdp_grad(&m->fsdp, ND_PARAM_EMBED, ND_PARAM_EMBED, -1), .ids = ids_of(set),
          .dout = dx, .first = m->dims.vocab_first);
    return nd_fsdp_grad_release(&m->fsdp, unit);
}

static const nd_trace_kind HEAD = ND_TRACE_HEAD;

/* The gathered rows of one chunk, n in all; the statistics are those of whole rows of logits. */
typedef struct head_chunk {
    nd_tensor h;                /* (n, C) */
    nd_tensor labels;           /* I32 (n) */
    nd_tensor max, sum, target; /* F32 (n) */
    int64_t begin;              /* the first row in what each tp peer has */
} head_chunk;

/* Columns [begin, begin + columns) of this rank's slice of the vocabulary. */
typedef struct head_tile {
    int64_t begin, columns;
    int64_t first, valid; /* as the ops of cross entropy take them */
    nd_tensor logits;     /* (n, columns) */
    nd_tensor w;          /* (columns, C) */
    int packed; /* numbers of its kept forms: of the forward, then of the input gradient */
} head_tile;

/* kept: the logits of the tiles before it are still needed, so it lies behind them. */
static head_tile tile_at(const nd_model *m, int64_t n, int64_t begin, bool kept)
{
    const nd_dims *d = &m->dims;
    const int64_t columns = nd_min(d->head_columns, d->V - begin);
    const size_t before = kept ? (size_t)(n * begin) * nd_dtype_size(d->act) : 0;
    nd_tensor w = nd_fsdp_weight(&m->fsdp, ND_PARAM_HEAD, ND_PARAM_HEAD, -1); /* (V, C) */
    return (head_tile){
        .begin = begin,
        .columns = columns,
        .first = d->vocab_first + begin,
        .valid = nd_max(0, nd_min(columns, d->vocab_valid - begin)),
        .logits = nd_tensor_2d((char *)m->work.head.logits + before, d->act, n, columns),
        .w = nd_tensor_rows(w, begin, columns),
        .packed = m->packed_head + (int)(2 * (begin / d->head_columns)),
    };
}

/* 0. the norm of rows [begin, begin + rows) of this tp rank, divided as logits are: h (rows, C). */
static nd_status norm_rows(nd_model *m, nd_activation_set *set, nd_residual in, int64_t begin,
                           nd_tensor h)
{
    const int64_t rows = h.shape[0];
    m->work.head.packed_h.made = false;
    ND_OP(m->rank, ND_TRACE_ELEMENTWISE, rmsnorm_fwd, .y = h,
          .sum = nd_tensor_rows(set->head.x, begin, rows),
          .rstd = nd_tensor_rows(set->head.rstd, begin, rows),
          .x = nd_tensor_rows(in.x, begin, rows),
          .delta = in.delta.data ? nd_tensor_rows(in.delta, begin, rows) : (nd_tensor){0},
          .weight = nd_fsdp_weight(&m->fsdp, ND_PARAM_NORM_F, ND_PARAM_NORM_F, -1),
          .plus = m->dims.norm_plus, .eps = m->dims.stream_eps);
    return model_scale(m, HEAD, h, m->dims.head_scale);
}

/* Shows the dump rows of the head's, from `row` and `column` of the rank's on. */
static nd_status show_head(const nd_model *m, const nd_activation_set *set, nd_dump_place place,
                           nd_tensor x)
{
    place.points = 1;
    place.layer = -1;
    place.micro = set->micro;
    return m->dump ? nd_dump_show(m->dump, &place, x) : ND_OK;
}

/* The rows of the tile of each tp peer; `begin`: in what the peer has. */
static nd_status show_logits(const nd_model *m, const nd_activation_set *set, int64_t begin,
                             const head_tile *t)
{
    const int64_t Tl = m->dims.Tl, tp = m->dims.T / Tl, rows = t->logits.shape[0] / tp;
    for (int64_t peer = 0; m->dump && peer < tp; peer++) {
        const nd_dump_place place = {
            .point = ND_DUMP_LOGITS, .row = peer * Tl + begin, .column = t->begin};
        ND_TRY(show_head(m, set, place, nd_tensor_rows(t->logits, peer * rows, rows)));
    }
    return ND_OK;
}

/* 2. logits, and their statistics over this rank's slice of the vocabulary. */
static nd_status slice_stats(nd_model *m, const nd_activation_set *set, nd_pass pass,
                             const head_chunk *c, nd_tensor row_max)
{
    nd_rank *r = m->rank;
    for (int64_t begin = 0; begin < m->dims.V; begin += m->dims.head_columns) {
        const head_tile t = tile_at(m, c->h.shape[0], begin, pass != ND_PASS_EVAL);
        ND_OP(r, HEAD, product, .c = t.logits, .a = nd_rows(c->h),
              .b = {.stored = t.w, .kept = nd_packed_form(&m->packed, t.packed)},
              .b_transposed = true);
        ND_TRY(show_logits(m, set, c->begin, &t));
        ND_OP(r, HEAD, ce_stats, .row_max = row_max, .row_sum = c->sum, .target = c->target,
              .logits = t.logits, .labels = c->labels, .first = t.first, .valid = t.valid,
              .merge = begin > 0);
    }
    return ND_OK;
}

/* 2. and 3. loss of the chunk; row statistics become global over the vocabulary. */
static nd_status chunk_loss(nd_model *m, const nd_activation_set *set, nd_pass pass,
                            const head_chunk *c)
{
    nd_rank *r = m->rank;
    const int64_t n = c->h.shape[0];
    nd_tensor row_max = nd_tensor_1d(m->work.head.row_max, ND_DTYPE_F32, n);
    ND_TRY(slice_stats(m, set, pass, c, row_max));
    ND_TRY(nd_copy(&r->stream, m->work.head.global_max, m->work.head.row_max, (size_t)n * 4));
    ND_TRY(nd_all_reduce(m->rank, ND_GROUP_TP, m->work.head.global_max, n, ND_DTYPE_F32,
                         ND_REDOP_MAX));
    ND_OP(r, HEAD, ce_rescale, .row_sum = c->sum, .row_max = row_max, .global_max = c->max);
    ND_TRY(nd_all_reduce(m->rank, ND_GROUP_TP, m->work.head.row_sums, 2 * n, ND_DTYPE_F32,
                         ND_REDOP_SUM));
    ND_OP(r, HEAD, ce_loss, .loss_sum = &m->numbers->loss_sum, .max = c->max, .sum = c->sum,
          .target = c->target, .labels = c->labels);
    return ND_OK;
}

/* Adds the loss of the chunk, whose labels begin at row `first` of all, to the sum of each source:
 * the batch's labels without those of the other sources. */
static nd_status source_losses(nd_model *m, const nd_activation_set *set, int64_t first,
                               const head_chunk *c)
{
    const nd_micro_batch *batch = &set->batch;
    for (int i = 0; i < batch->source_count; i++) {
        nd_tensor labels = c->labels;
        labels.data = batch->source_labels + i * m->batches.stride + first;
        ND_OP(m->rank, HEAD, ce_loss, .loss_sum = m->source_sums + batch->sources[i], .max = c->max,
              .sum = c->sum, .target = c->target, .labels = labels);
    }
    return ND_OK;
}

/* 3'. dlogits in place, 2'. the weight's gradient, with beta, and `partial`: the rows' gradient
 * from this rank's slice of the vocabulary. */
static nd_status chunk_gradients(nd_model *m, const head_chunk *c, float beta, nd_tensor partial)
{
    nd_rank *r = m->rank;
    const nd_dims *d = &m->dims;
    const int64_t n = c->h.shape[0];
    nd_tensor dw = nd_fsdp_grad(&m->fsdp, ND_PARAM_HEAD, ND_PARAM_HEAD, -1); /* (V, C) */
    nd_tensor sum =
        m->work.head.dsum ? nd_tensor_2d(m->work.head.dsum, ND_DTYPE_F32, n, d->C) : partial;
    nd_kept_form *rows = m->work.head.packed_h.memory ? &m->work.head.packed_h : NULL;
    for (int64_t begin = 0; begin < d->V; begin += d->head_columns) {
        const head_tile t = tile_at(m, n, begin, true);
        ND_OP(r, HEAD, ce_bwd, .logits = t.logits, .max = c->max, .sum = c->sum,
              .labels = c->labels, .first = t.first, .valid = t.valid,
              .count = &m->numbers->tokens);
        ND_OP(r, HEAD, product, .c = nd_tensor_rows(dw, begin, t.columns), .a = nd_rows(t.logits),
              .a_transposed = true, .b = {.stored = c->h, .kept = rows}, .beta = beta);
        ND_OP(r, HEAD, product, .c = sum, .a = nd_rows(t.logits),
              .b = {.stored = t.w, .kept = nd_packed_form(&m->packed, t.packed + 1)},
              .beta = begin > 0 ? 1.0f : 0.0f);
    }
    if (m->work.head.dsum) {
        ND_OP(r, HEAD, cast, .out = partial, .x = sum);
    }
    return ND_OK;
}

/* Rows [begin, begin + rows) of every tp peer, whose normed ones are h. beta: of the
 * weight's gradient. */
static nd_status chunk(nd_model *m, nd_activation_set *set, nd_pass pass, int64_t begin,
                       nd_tensor h, float beta)
{
    nd_rank *r = m->rank;
    const int64_t rows = h.shape[0], tp = m->dims.T / m->dims.Tl, n = rows * tp;
    head_chunk c = {
        .h = h,
        .labels = nd_tensor_1d(set->batch.labels + begin * tp, ND_DTYPE_I32, n),
        .max = nd_tensor_1d(m->work.head.global_max, ND_DTYPE_F32, n),
        .sum = nd_tensor_1d(m->work.head.row_sums, ND_DTYPE_F32, n),
        .target = nd_tensor_1d(m->work.head.row_sums + n, ND_DTYPE_F32, n),
        .begin = begin,
    };
    /* 1. tp: the chunk's rows of all peers */
    ND_TRY(nd_tp_gather(r, h, m->work.head.full, NULL, &c.h));
    ND_TRY(chunk_loss(m, set, pass, &c));
    if (pass == ND_PASS_EVAL) {
        return ND_OK;
    }
    ND_TRY(source_losses(m, set, begin * tp, &c));
    nd_tensor dh = nd_tensor_rows(set->head.dh, begin, rows);
    nd_tensor partial = nd_tp_partial(r, dh, m->work.head.dfull);
    ND_TRY(chunk_gradients(m, &c, beta, partial));
    /* 1'. reduce-scatter */
    ND_TRY(nd_tp_reduce(r, partial, dh, NULL));
    return model_scale(m, HEAD, dh, m->dims.head_scale);
}

nd_status nd_head_forward(nd_model *m, nd_activation_set *set, nd_pass pass, nd_residual in)
{
    const nd_dims *d = &m->dims;
    const nd_unit *unit = nd_layout_unit(m->layout, ND_UNIT_HEAD, -1);
    float beta = 0.0f;
    ND_TRY(nd_fsdp_acquire(&m->fsdp, unit));
    if (pass == ND_PASS_TRAIN) {
        ND_TRY(nd_fsdp_grad_acquire(&m->fsdp, unit));
        ND_TRY(nd_fsdp_grad_zero_if_fresh(&m->fsdp, ND_PARAM_NORM_F, -1));
        beta = nd_fsdp_grad_beta(&m->fsdp, unit);
    }
    for (int64_t begin = 0; begin < d->Tl; begin += d->head_rows) {
        nd_tensor h = nd_tensor_rows(m->work.head.h, 0, nd_min(d->Tl - begin, d->head_rows));
        ND_TRY(norm_rows(m, set, in, begin, h));
        ND_TRY(show_head(m, set, (nd_dump_place){.point = ND_DUMP_NORM_F, .row = begin}, h));
        ND_TRY(chunk(m, set, pass, begin, h, beta));
        beta = 1.0f;
    }
    nd_fsdp_release(&m->fsdp, unit);
    return show_head(m, set, (nd_dump_place){.point = ND_DUMP_NORM_F_INPUT}, set->head.x);
}

/* Copies the first n of `computed` rows to the host, (n, vocab). all: (tp x computed, V), the
 * slices of the vocabulary one after the other. */
static nd_status read_logits(nd_model *m, nd_tensor all, int64_t computed, int64_t n, float *out)
{
    nd_stream *stream = &m->rank->stream;
    const nd_dims *d = &m->dims;
    if (d->V == d->vocab) {
        return nd_copy(stream, out, all.data, nd_tensor_bytes(nd_tensor_rows(all, 0, n)));
    }
    for (int64_t i = 0; i < n; i++) {
        for (int64_t first = 0, p = 0; first < d->vocab; first += d->V, p++) {
            const int64_t valid = nd_min(d->vocab - first, d->V);
            ND_TRY(nd_copy(stream, out + i * d->vocab + first,
                           nd_tensor_rows(all, p * computed + i, 1).data,
                           (size_t)valid * sizeof(float)));
        }
    }
    return ND_OK;
}

/* Logits of rows [begin, begin + n) of the call's list; h (T, C). */
static nd_status logits_of_rows(nd_model *m, nd_tensor h, const nd_logits_call *call, int64_t begin,
                                int64_t n)
{
    nd_rank *r = m->rank;
    const nd_dims *d = &m->dims;
    const size_t row_bytes = (size_t)d->C * nd_dtype_size(d->act);
    /* Rows behind the n hold what was there before: few forms of products (kv_cache.h). */
    const int64_t computed = nd_kv_round_rows(n, 1, m->work.logits.rows.shape[0]);
    nd_tensor rows = nd_tensor_rows(m->work.logits.rows, 0, computed);
    nd_tensor local = nd_tensor_rows(m->work.logits.logits, 0, computed),
              all; /* (computed, V), tp x */
    const int64_t *numbers = call->rows + begin;
    for (int64_t i = 0, run; i < n; i += run) {
        for (run = 1; i + run < n && numbers[i + run] == numbers[i] + run;) {
            run++;
        }
        ND_TRY(nd_copy(&r->stream, nd_tensor_rows(rows, i, run).data,
                       nd_tensor_rows(h, numbers[i], run).data, (size_t)run * row_bytes));
    }
    ND_OP(r, HEAD, product, .c = local, .a = nd_rows(rows),
          .b = nd_rows(nd_fsdp_weight(&m->fsdp, ND_PARAM_HEAD, ND_PARAM_HEAD, -1)),
          .b_transposed = true, .few_rows = true);
    ND_TRY(nd_tp_gather(r, local, m->work.logits.gathered, NULL, &all));
    return read_logits(m, all, computed, n, call->logits + begin * d->vocab);
}

static nd_status head_logits(nd_model *m, nd_activation_set *set, nd_residual in,
                             const nd_logits_call *call)
{
    nd_rank *r = m->rank;
    const nd_unit *unit = nd_layout_unit(m->layout, ND_UNIT_HEAD, -1);
    const int64_t most = m->work.logits.rows.shape[0];
    nd_tensor local = nd_tensor_rows(m->work.head.h, 0, set->Tl), h; /* (Tl, C), (T, C) */
    ND_TRY(nd_fsdp_acquire(&m->fsdp, unit));
    ND_TRY(norm_rows(m, set, in, 0, local));
    ND_TRY(nd_tp_gather(r, local, m->work.full_a, NULL, &h));
    for (int64_t begin = 0; begin < call->count; begin += most) {
        ND_TRY(logits_of_rows(m, h, call, begin, nd_min(call->count - begin, most)));
    }
    nd_fsdp_release(&m->fsdp, unit);
    return nd_stream_sync(&r->stream);
}

nd_status nd_head_sample(nd_model *m, nd_activation_set *set, nd_residual in, int64_t row,
                         float *logits)
{
    nd_rank *r = m->rank;
    const nd_dims *d = &m->dims;
    const nd_unit *unit = nd_layout_unit(m->layout, ND_UNIT_HEAD, -1);
    ND_TRY(nd_fsdp_acquire(&m->fsdp, unit));
    if (row >= 0) { /* on all tp peers alike, each of which has a part of its chunk */
        const int64_t local = row % d->Tl, begin = local - local % d->head_rows;
        const int64_t rows = nd_min(d->Tl - begin, d->head_rows);
        const int64_t place = row / d->Tl * rows + local - begin;
        nd_tensor h = nd_tensor_rows(m->work.head.h, 0, rows), all; /* (rows, C), tp x */
        ND_TRY(norm_rows(m, set, in, begin, h));
        ND_TRY(nd_tp_gather(r, h, m->work.head.full, NULL, &all));
        ND_TRY(logits_of_rows(m, all, &(nd_logits_call){.rows = &place, .logits = logits}, 0, 1));
    }
    nd_fsdp_release(&m->fsdp, unit);
    return nd_stream_sync(&r->stream);
}

nd_status nd_head_backward(nd_model *m, nd_activation_set *set)
{
    nd_rank *r = m->rank;
    const nd_unit *unit = nd_layout_unit(m->layout, ND_UNIT_HEAD, -1);
    const nd_block_call last = {m, set, m->stage->layers.end - 1, ND_PASS_BACKWARD};
    float *amax = NULL;
    ND_TRY(nd_fsdp_acquire(&m->fsdp, unit));
    if (last.layer >= m->stage->layers.begin) {
        ND_TRY(nd_gradient_prepare(last, ND_INPUT_DOWN, &amax));
    }
    ND_OP(r, ND_TRACE_ELEMENTWISE, rmsnorm_bwd, .dx = nd_stream_gradient(m, set, last.layer),
          .dweight = nd_fsdp_grad(&m->fsdp, ND_PARAM_NORM_F, ND_PARAM_NORM_F, -1),
          .dy = set->head.dh, .x = set->head.x,
          .weight = nd_fsdp_weight(&m->fsdp, ND_PARAM_NORM_F, ND_PARAM_NORM_F, -1),
          .plus = m->dims.norm_plus, .rstd = set->head.rstd, .amax = amax);
    ND_TRY(show_head(m, set, (nd_dump_place){.point = ND_DUMP_D_NORM_F, .backward = true},
                     set->head.dh));
    ND_TRY(show_head(m, set, (nd_dump_place){.point = ND_DUMP_D_NORM_F_INPUT, .backward = true},
                     nd_stream_gradient(m, set, last.layer)));
    nd_fsdp_release(&m->fsdp, unit);
    /* A tied table's gradient is completed by the embedding. */
    return m->layout->tied ? ND_OK : nd_fsdp_grad_release(&m->fsdp, unit);
}

/* Passes. */

/* Embedding and blocks; the head's weights are on their way behind them. */
static nd_status forward_to_head(nd_model *m, nd_activation_set *set, nd_pass pass,
                                 nd_residual *residual)
{
    const nd_unit *head = nd_layout_unit(m->layout, ND_UNIT_HEAD, -1);
    ND_TRY(nd_scales_refresh(&m->scales, m->fsdp.master, m->fsdp.version));
    ND_TRY(nd_embed_forward(m, set, residual));
    return nd_blocks_forward(m, set, m->stage->layers, pass, head, residual);
}

nd_status nd_model_forward(nd_model *m, nd_activation_set *set, nd_pass pass)
{
    nd_residual residual;
    ND_TRY(forward_to_head(m, set, pass, &residual));
    return nd_head_forward(m, set, pass, residual);
}

nd_status nd_model_logits(nd_model *m, nd_activation_set *set, const nd_logits_call *call)
{
    const int64_t tp = m->dims.T / m->dims.Tl, rows = nd_kv_cache_begin(&m->kv, &call->kv, tp);
    nd_residual residual;
    nd_activations_narrow(set, rows, rows / tp);
    ND_TRY(forward_to_head(m, set, ND_PASS_GENERATE, &residual));
    return head_logits(m, set, residual, call);
}

nd_status nd_model_sample(nd_model *m, nd_activation_set *set, int64_t row, float *logits)
{
    nd_residual residual;
    ND_TRY(forward_to_head(m, set, ND_PASS_EVAL, &residual));
    return nd_head_sample(m, set, residual, row, logits);
}

nd_status nd_model_input_gradient(nd_model *m, nd_activation_set *set)
{
    ND_ASSERT(!m->forward_only);
    ND_TRY(nd_head_backward(m, set));
    ND_TRY(nd_blocks_backward(m, set, m->stage->layers, NULL));
    return nd_embed_backward(m, set);
}

nd_status nd_model_weight_gradient(nd_model *m, nd_activation_set *set)
{
    ND_ASSERT(m->delays);
    ND_TRY(nd_blocks_weight_gradient(m, set, m->stage->layers));
    return nd_fsdp_grad_finish(&m->fsdp);
}

nd_status nd_model_backward(nd_model *m, nd_activation_set *set)
{
    ND_TRY(nd_model_input_gradient(m, set));
    return m->delays ? nd_model_weight_gradient(m, set) : nd_fsdp_grad_finish(&m->fsdp);
}

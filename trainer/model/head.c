// SPDX-License-Identifier: Apache-2.0
/*
 * Final norm, vocabulary-parallel head and cross entropy, chunked over tokens: logits never
 * exist for the whole sequence. The head's backward runs inside its forward, so the global number
 * of counted labels is on the device beforehand, and dlogits are divided by it where they are made.
 *
 * A chunk takes the same rows of every tp peer (rows [begin, begin + rows) of each one's Tl), so
 * its gathered order is (peer, row); nd_batches_load puts the labels in that order.
 */
#include "trainer/model/model.h"

static const nd_trace_kind HEAD = ND_TRACE_HEAD;

static nd_status tp_all_reduce(nd_model *m, float *values, int64_t count, nd_redop op)
{
    nd_rank *r = m->rank;
    ND_RUN(r, ND_TRACE_COMMUNICATION,
           nd_comm_all_reduce(r->groups.by_kind[ND_GROUP_TP], &r->stream, values, count,
                              ND_DTYPE_F32, op, NULL));
    return ND_OK;
}

/* Adds the loss of the chunk, whose labels begin at row `first` of all, to the sum of each source:
 * the batch's labels without those of the other sources. */
static nd_status source_losses(nd_model *m, const nd_activation_set *set, int64_t first,
                               const nd_ce_loss_args *all)
{
    const nd_micro_batch *batch = &set->batch;
    for (int i = 0; i < batch->source_count; i++) {
        nd_tensor labels = all->labels;
        labels.data = batch->source_labels + i * batch->source_stride + first;
        ND_OP(m->rank, HEAD, ce_loss, .loss_sum = m->source_sums + batch->sources[i],
              .max = all->max, .sum = all->sum, .target = all->target, .labels = labels);
    }
    return ND_OK;
}

/* Loss of the chunk; row statistics become global over the vocabulary. */
static nd_status chunk_loss(nd_model *m, nd_tensor logits, nd_tensor labels, nd_tensor global_max,
                            nd_tensor sum)
{
    nd_rank *r = m->rank;
    const nd_dims *d = &m->dims;
    int64_t n = labels.shape[0];
    nd_tensor row_max = nd_tensor_1d(m->head.row_max, ND_DTYPE_F32, n);
    nd_tensor target = nd_tensor_1d(m->head.row_sums + n, ND_DTYPE_F32, n);
    ND_OP(r, HEAD, ce_stats, .row_max = row_max, .row_sum = sum, .target = target, .logits = logits,
          .labels = labels, .first = d->vocab_first, .valid = d->vocab_valid);
    ND_TRY(nd_copy(&r->stream, m->head.global_max, m->head.row_max, (size_t)n * 4));
    ND_TRY(tp_all_reduce(m, m->head.global_max, n, ND_REDOP_MAX));
    ND_OP(r, HEAD, ce_rescale, .row_sum = sum, .row_max = row_max, .global_max = global_max);
    ND_TRY(tp_all_reduce(m, m->head.row_sums, 2 * n, ND_REDOP_SUM));
    ND_OP(r, HEAD, ce_loss, .loss_sum = &m->numbers->loss_sum, .max = global_max, .sum = sum,
          .target = target, .labels = labels);
    return ND_OK;
}

/* Rows [begin, begin + rows) of every tp peer. beta: of the weight's gradient. */
static nd_status chunk(nd_model *m, nd_activation_set *set, nd_pass pass, int64_t begin,
                       int64_t rows, float beta)
{
    nd_rank *r = m->rank;
    const nd_dims *d = &m->dims;
    int64_t n = rows * (d->T / d->Tl);
    nd_tensor w = nd_fsdp_weight(&m->fsdp, ND_PARAM_HEAD, ND_PARAM_HEAD, -1); /* (V, C) */
    nd_tensor logits = nd_tensor_2d(m->head.logits.data, d->act, n, d->V);
    nd_tensor labels = nd_tensor_1d(set->batch.labels + begin * (d->T / d->Tl), ND_DTYPE_I32, n);
    nd_tensor global_max = nd_tensor_1d(m->head.global_max, ND_DTYPE_F32, n);
    nd_tensor sum = nd_tensor_1d(m->head.row_sums, ND_DTYPE_F32, n);
    nd_tensor h;
    /* 1. tp: the chunk's rows of all peers */
    ND_TRY(nd_tp_gather(r, nd_tensor_rows(m->head.h, begin, rows), m->head.full,
                        ND_TRACE_COMMUNICATION, &h));
    /* 2. logits of this vocabulary slice; 3. loss */
    ND_OP(r, HEAD, matmul, .c = logits, .a = h, .b = w, .b_transposed = true);
    ND_TRY(chunk_loss(m, logits, labels, global_max, sum));
    if (pass == ND_PASS_EVAL) {
        return ND_OK;
    }
    ND_TRY(source_losses(
        m, set, begin * (d->T / d->Tl),
        &(nd_ce_loss_args){.max = global_max,
                           .sum = sum,
                           .target = nd_tensor_1d(m->head.row_sums + n, ND_DTYPE_F32, n),
                           .labels = labels}));
    /* 3'. dlogits in place */
    ND_OP(r, HEAD, ce_bwd, .logits = logits, .max = global_max, .sum = sum, .labels = labels,
          .first = d->vocab_first, .valid = d->vocab_valid, .count = &m->numbers->tokens);
    /* 2'. weight gradient, and the rows' gradient: partial over the vocabulary; 1'.
     * reduce-scatter */
    ND_OP(r, HEAD, matmul, .c = nd_fsdp_grad(&m->fsdp, ND_PARAM_HEAD, ND_PARAM_HEAD, -1),
          .a = logits, .a_transposed = true, .b = h, .beta = beta);
    nd_tensor dh = nd_tensor_rows(set->head.dh, begin, rows);
    nd_tensor partial = nd_tp_partial(r, dh, m->head.dfull);
    ND_OP(r, HEAD, matmul, .c = partial, .a = logits, .b = w);
    return nd_tp_reduce(r, partial, dh, ND_TRACE_COMMUNICATION);
}

nd_status nd_head_forward(nd_model *m, nd_activation_set *set, nd_pass pass, nd_residual in)
{
    nd_rank *r = m->rank;
    const nd_dims *d = &m->dims;
    const nd_unit *unit = nd_layout_unit(m->layout, ND_UNIT_HEAD, -1);
    float beta = 0.0f;
    ND_TRY(nd_fsdp_acquire(&m->fsdp, unit));
    ND_OP(r, ND_TRACE_ELEMENTWISE, rmsnorm_fwd, .y = m->head.h, .sum = set->head.x,
          .rstd = set->head.rstd, .x = in.x, .delta = in.delta,
          .weight = nd_fsdp_weight(&m->fsdp, ND_PARAM_NORM_F, ND_PARAM_NORM_F, -1),
          .eps = (float)r->shape.rms_eps);
    if (pass == ND_PASS_TRAIN) {
        ND_TRY(nd_fsdp_grad_acquire(&m->fsdp, unit));
        ND_TRY(nd_fsdp_grad_zero_if_fresh(&m->fsdp, ND_PARAM_NORM_F, -1));
        beta = nd_fsdp_grad_beta(&m->fsdp, unit);
    }
    for (int64_t begin = 0; begin < d->Tl; begin += d->head_rows) {
        int64_t rows = d->Tl - begin < d->head_rows ? d->Tl - begin : d->head_rows;
        ND_TRY(chunk(m, set, pass, begin, rows, beta));
        beta = 1.0f;
    }
    nd_fsdp_release(&m->fsdp, unit);
    return ND_OK;
}

/* How many of the first `count` row numbers are adjacent. */
static int64_t adjacent_rows(const int64_t *rows, int64_t count)
{
    int64_t n = 1;
    while (n < count && rows[n] == rows[0] + n) {
        n++;
    }
    return n;
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
            int64_t valid = d->vocab - first < d->V ? d->vocab - first : d->V;
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
    const int64_t computed = nd_kv_round_rows(n, 1, m->logits.rows.shape[0]);
    nd_tensor rows = nd_tensor_rows(m->logits.rows, 0, computed);
    nd_tensor local = nd_tensor_rows(m->logits.logits, 0, computed), all; /* (computed, V), tp x */
    for (int64_t i = 0, run; i < n; i += run) {
        run = adjacent_rows(call->rows + begin + i, n - i);
        ND_TRY(nd_copy(&r->stream, nd_tensor_rows(rows, i, run).data,
                       nd_tensor_rows(h, call->rows[begin + i], run).data,
                       (size_t)run * row_bytes));
    }
    ND_OP(r, HEAD, matmul, .c = local, .a = rows,
          .b = nd_fsdp_weight(&m->fsdp, ND_PARAM_HEAD, ND_PARAM_HEAD, -1), .b_transposed = true,
          .few_rows = true);
    ND_TRY(nd_tp_gather(r, local, m->logits.gathered, ND_TRACE_COMMUNICATION, &all));
    return read_logits(m, all, computed, n, call->logits + begin * d->vocab);
}

nd_status nd_head_logits(nd_model *m, nd_activation_set *set, nd_residual in,
                         const nd_logits_call *call)
{
    nd_rank *r = m->rank;
    const nd_unit *unit = nd_layout_unit(m->layout, ND_UNIT_HEAD, -1);
    const int64_t most = m->logits.rows.shape[0];
    nd_tensor local = nd_tensor_rows(m->head.h, 0, set->Tl), h; /* (Tl, C), (T, C) */
    ND_TRY(nd_fsdp_acquire(&m->fsdp, unit));
    ND_OP(r, ND_TRACE_ELEMENTWISE, rmsnorm_fwd, .y = local,
          .sum = nd_tensor_rows(set->head.x, 0, set->Tl),
          .rstd = nd_tensor_rows(set->head.rstd, 0, set->Tl), .x = in.x, .delta = in.delta,
          .weight = nd_fsdp_weight(&m->fsdp, ND_PARAM_NORM_F, ND_PARAM_NORM_F, -1),
          .eps = (float)r->shape.rms_eps);
    ND_TRY(nd_tp_gather(r, local, m->full_a, ND_TRACE_COMMUNICATION, &h));
    for (int64_t begin = 0; begin < call->count; begin += most) {
        int64_t n = call->count - begin < most ? call->count - begin : most;
        ND_TRY(logits_of_rows(m, h, call, begin, n));
    }
    nd_fsdp_release(&m->fsdp, unit);
    return nd_stream_sync(&r->stream);
}

nd_status nd_head_backward(nd_model *m, nd_activation_set *set)
{
    nd_rank *r = m->rank;
    const nd_unit *unit = nd_layout_unit(m->layout, ND_UNIT_HEAD, -1);
    ND_TRY(nd_fsdp_acquire(&m->fsdp, unit));
    ND_OP(r, ND_TRACE_ELEMENTWISE, rmsnorm_bwd, .dx = m->dx,
          .dweight = nd_fsdp_grad(&m->fsdp, ND_PARAM_NORM_F, ND_PARAM_NORM_F, -1),
          .dy = set->head.dh, .x = set->head.x,
          .weight = nd_fsdp_weight(&m->fsdp, ND_PARAM_NORM_F, ND_PARAM_NORM_F, -1),
          .rstd = set->head.rstd);
    nd_fsdp_release(&m->fsdp, unit);
    /* A tied table's gradient is completed by the embedding. */
    return m->layout->tied ? ND_OK : nd_fsdp_grad_release(&m->fsdp, unit);
}

// SPDX-License-Identifier: Apache-2.0
/*
 * The MLP in pieces of tokens (parallel.tiled_mlp). Gate, up and SwiGLU's output exist for the
 * tokens of one piece at a time. The forward keeps nothing of them, and the backward computes them
 * again.
 *
 * A piece is adjacent tokens of (T, ...), as an MLP in one piece has them on all tp ranks: the
 * input is gathered and the output reduced once, around all pieces. Rows of y and of dx do not
 * depend on other rows. Weight gradients are sums over tokens, which are added up in the order
 * of the tokens; where the backend sums in blocks of tokens they are added block by block, and
 * are the same bits.
 */
#include "runtime/base/math.h"
#include "trainer/model/linear.h"

static const nd_trace_kind ELEMENTWISE = ND_TRACE_ELEMENTWISE;

/* Tokens of a piece, where their number is left to the program, and to what they are rounded up
 * where any number gives the same sums. A CPU's take one block of its products. */
enum { PIECE_CPU = 1024, PIECE_GPU = 8192, PIECE_UNIT = 16 };

static int64_t block_of(const nd_model *m)
{
    const nd_dims *d = &m->dims;
    const nd_form_need need = {.role = ND_X_OF_DW,
                               .rows = d->T,
                               .columns = d->C,
                               .others = d->F,
                               .stored = d->act,
                               .format = d->act,
                               .uses = 1};
    return m->rank->ops->form(m->rank->device, &need).block;
}

nd_status nd_mlp_pieces_init(nd_model *m)
{
    const int64_t pieces = m->rank->config->parallel.tiled_mlp, T = m->dims.T;
    const nd_recipe *recipe = &m->scales.recipe;
    const int64_t wanted = pieces > 0                ? nd_ceil_div(T, pieces)
                           : pieces == 0             ? T
                           : nd_rank_is_gpu(m->rank) ? PIECE_GPU
                                                     : PIECE_CPU;
    m->piece_block = block_of(m);
    m->dims.piece = nd_min(T, nd_round_up(wanted, nd_max(m->piece_block, PIECE_UNIT)));
    if (!nd_mlp_has_pieces(m)) {
        return ND_OK;
    }
    if (recipe->name && recipe->rules[ND_DY_OF_DW].scaling != ND_SCALING_NONE) {
        return nd_fail(
            ND_ERR_CONFIG,
            "parallel.tiled_mlp is %lld, but fp8.recipe %s has scales or sums that follow "
            "from all tokens of a micro-batch; use fp8.recipe rowwise_with_gw_hp, "
            "train.precision bf16, or parallel.tiled_mlp 1",
            (long long)pieces, recipe->name);
    }
    return m->delays ? nd_fail(ND_ERR_INTERNAL, "weight gradients of an MLP in pieces are delayed")
                     : ND_OK;
}

/* Rows [begin, begin + rows) of an operand that is not cast, or cast row by row. */
static nd_operand rows_of(const nd_operand *x, int64_t begin, int64_t rows)
{
    nd_operand piece = *x;
    piece.stored = nd_tensor_rows(x->stored, begin, rows);
    return piece;
}

nd_status nd_block_swiglu(nd_block_call c, nd_tensor gu, int64_t row, nd_operand *act)
{
    const int64_t F = c.model->dims.F;
    nd_fuse fuse;
    ND_TRY(nd_operand_prepare(c, ND_INPUT_DOWN, act, &fuse));
    act->stored = nd_tensor_rows(act->stored, 0, gu.shape[0]);
    ND_OP(c.model->rank, ELEMENTWISE, swiglu_fwd, .out = act->stored,
          .gate = nd_tensor_columns(gu, 0, F), .up = nd_tensor_columns(gu, F, F),
          .gelu = c.model->dims.gelu, .fuse = fuse);
    ND_TRY(nd_block_show(c, ND_DUMP_GATE, 2, row, gu));
    return nd_block_show(c, ND_DUMP_ACT, 1, row, act->stored);
}

/* Steps 9 and 10 of a piece whose input is h, rows from `begin` on: gu (rows, 2 F), and act
 * (rows, F). */
static nd_status gate_up_swiglu(nd_block_call c, nd_operand *h, int64_t begin, nd_tensor *gu,
                                nd_operand *act)
{
    *gu = nd_tensor_rows(nd_set_block(c.set, c.layer)->gu, 0, h->stored.shape[0]);
    ND_TRY(nd_linear_products(c, nd_linear_group_of(c, ND_INPUT_GATE_UP), h, *gu));
    return nd_block_swiglu(c, *gu, begin, act);
}

nd_status nd_mlp_pieces_forward(nd_block_call c, const nd_operand *h, nd_tensor y)
{
    nd_model *m = c.model;
    const int64_t T = m->dims.T;
    const nd_tensor sums = nd_tp_partial(m->rank, y, m->work.full_b);
    nd_operand full = *h;
    ND_TRY(nd_tp_gather(m->rank, h->stored, m->work.full_a, NULL, &full.stored));
    for (int64_t begin = 0; begin < T; begin += m->dims.piece) {
        const int64_t rows = nd_min(m->dims.piece, T - begin);
        nd_operand x = rows_of(&full, begin, rows), act;
        nd_tensor gu;
        ND_TRY(gate_up_swiglu(c, &x, begin, &gu, &act));
        ND_TRY(nd_linear_products(c, nd_linear_group_of(c, ND_INPUT_DOWN), &act,
                                  nd_tensor_rows(sums, begin, rows)));
    }
    return nd_tp_reduce(m->rank, sums, y, NULL);
}

/* dw += dy^T x of a piece, block by block. `first`: of the micro-batch. */
static nd_status weight_gradient(const nd_linear_rest *piece, bool first)
{
    const int64_t rows = piece->dy.stored.shape[0], block = piece->call.model->piece_block;
    for (int64_t begin = 0, count; begin < rows; begin += count) {
        nd_linear_rest rest = *piece;
        count = block > 0 ? nd_min(block, rows - begin) : rows;
        rest.x = rows_of(&piece->x, begin, count);
        rest.dy = rows_of(&piece->dy, begin, count);
        rest.adds = !first || begin > 0;
        for (int i = 0; i < ND_FP8_PARTS; i++) {
            rest.forms[i] = (nd_made_form){0}; /* those of all rows, which dw does not read */
        }
        ND_TRY(nd_linear_weight_gradient(&rest));
    }
    return ND_OK;
}

/* Steps 11 to 8 of a piece, rows from `begin` on. h, dy: the inputs of both groups, and the
 * gradient of their output; dh: this rank's part of the sum. */
static nd_status piece_backward(nd_block_call c, nd_operand *h, const nd_operand *dy, nd_tensor dh,
                                int64_t begin)
{
    nd_model *m = c.model;
    const bool first = begin == 0;
    const int64_t F = m->dims.F, rows = h->stored.shape[0];
    const nd_tensor dact = nd_tensor_rows(m->work.dact, 0, rows);
    nd_tensor gu;
    nd_linear_rest down = {.call = c, .group = nd_linear_group_of(c, ND_INPUT_DOWN), .dy = *dy};
    ND_TRY(gate_up_swiglu(c, h, begin, &gu, &down.x));
    const nd_tensor gate = nd_tensor_columns(gu, 0, F), up = nd_tensor_columns(gu, F, F);
    nd_linear_rest gate_up = {
        .call = c, .group = nd_linear_group_of(c, ND_INPUT_GATE_UP), .x = *h, .dy = {.stored = gu}};
    ND_TRY(nd_linear_gradient_products(&down, dact));
    ND_TRY(nd_block_show(c, ND_DUMP_D_ACT, 1, begin, dact));
    ND_TRY(weight_gradient(&down, first));
    ND_OP(m->rank, ELEMENTWISE, swiglu_bwd, .dgate = gate, .dup = up, .dout = dact, .gate = gate,
          .up = up, .gelu = m->dims.gelu);
    ND_TRY(nd_block_show(c, ND_DUMP_D_GATE, 2, begin, gu));
    ND_TRY(nd_linear_begin_gradient(&gate_up));
    ND_TRY(nd_linear_gradient_products(&gate_up, dh));
    return weight_gradient(&gate_up, first);
}

nd_status nd_mlp_pieces_backward(nd_block_call c, const nd_operand *dy, nd_tensor dh)
{
    nd_model *m = c.model;
    const int64_t T = m->dims.T;
    const nd_tensor sums = nd_tp_partial(m->rank, dh, m->work.full_b);
    nd_linear_rest down = {.call = c, .group = nd_linear_group_of(c, ND_INPUT_DOWN), .dy = *dy};
    nd_operand h = nd_operand_kept(c, ND_INPUT_GATE_UP);
    ND_TRY(nd_linear_begin_gradient(&down));
    ND_TRY(nd_tp_gather(m->rank, dy->stored, m->work.full_a, NULL, &down.dy.stored));
    ND_TRY(nd_tp_gather(m->rank, h.stored, m->work.full_h, NULL, &h.stored));
    for (int64_t begin = 0; begin < T; begin += m->dims.piece) {
        const int64_t rows = nd_min(m->dims.piece, T - begin);
        nd_operand x = rows_of(&h, begin, rows), dout = rows_of(&down.dy, begin, rows);
        ND_TRY(piece_backward(c, &x, &dout, nd_tensor_rows(sums, begin, rows), begin));
    }
    return nd_tp_reduce(m->rank, sums, dh, NULL);
}

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_MODEL_MODEL_H
#define ND_MODEL_MODEL_H
/*
 * The model of one rank, as the functions of a stage: embedding, a range of blocks, head; forward
 * and, in mirror order, backward. Each is a numbered list of ops. The model holds the weights and
 * its stage's workspace; what a micro-batch keeps is in its set (activations.h), and which pass it
 * is, training, evaluation or backward, is an argument.
 *
 * Today a rank has one stage, the whole model. Its sets are as many as the schedule has
 * micro-batches in flight.
 */
#include "runtime/device/graphs.h"
#include "trainer/dump/dump.h"
#include "trainer/model/activations.h"
#include "trainer/model/kv_cache.h"
#include "trainer/context/cp.h"
#include "trainer/parallel/fsdp.h"
#include "trainer/parallel/tp.h"

/* The numbers of a step, on the device, adjacent so that one copy reads them all. */
typedef struct nd_step_numbers {
    double loss_sum; /* NLL over counted labels since it was zeroed: this rank's, then of all */
    double squares;  /* of all elements of the gradient */
    int64_t tokens;  /* counted labels of the step, of all ranks */
    int64_t stop;    /* not 0: a signal asked to stop; the largest of all ranks */
    int64_t save; /* state of the save in flight (checkpoint/saver.h); the largest of all ranks */
    int64_t most, least; /* work of the slowest and of the fastest rank (nd_work_most, _least) */
} nd_step_numbers;

/* A call computes one of these: a forward to train, a forward to measure, a backward, which
 * computes again with the ops of the forward, or a forward that reads keys from the cache. */
typedef enum nd_pass {
    ND_PASS_TRAIN = 0,
    ND_PASS_EVAL,
    ND_PASS_BACKWARD,
    ND_PASS_GENERATE
} nd_pass;

/* Buffers of FP8 products, shared by all blocks; NULL where nothing needs them. */
typedef enum nd_fp8_buffer {
    ND_FP8_X = 0, /* an input: (T, columns); its transposed codes */
    ND_FP8_X_TRANSPOSED,
    ND_FP8_DY, /* gradients of the outputs of linears with one input; their transposed codes */
    ND_FP8_DY_TRANSPOSED,
    ND_FP8_DY_LOCAL, /* (Tl, C), before it is gathered over tp; NULL when tp is 1 */
    ND_FP8_W,        /* a weight; its transposed codes */
    ND_FP8_W_TRANSPOSED,
    ND_FP8_GEMM, /* nd_ops.product_scratch */
    ND_FP8_BUFFERS
} nd_fp8_buffer;

/* Buffers of the head. n = tp x head_rows rows of one chunk. */
typedef struct nd_head_scratch {
    nd_tensor h;  /* (head_rows, C) normed rows of the residual stream; with a cache (Tl, C) */
    void *logits; /* act (n, V): the tiles (n, head_columns), one after the other; only one
                           tile where nothing is trained */
    void *full, *dfull; /* (n, C) gathered rows and their gradient; NULL when tp is 1 */
    float *dsum; /* (n, C) sum of the rows' gradient over tiles; NULL where act is F32, with one
                    tile, and where nothing is trained */
    nd_kept_form packed_h; /* (n, C) rows, which all tiles' weight gradients read; without memory
                                where each packs them */
    float *row_max, *row_sums, *global_max; /* (n), (2 n): sum | target, (n) */
} nd_head_scratch;

/* Buffers of the logits that are read by the host; n = nd_kv_options.logits, or 1 where a model in
 * training continues sample texts. */
typedef struct nd_logits_scratch {
    nd_tensor rows;   /* (n, C) normed rows of the call whose logits are wanted */
    nd_tensor logits; /* F32 (n, V) */
    void *gathered;   /* F32 (tp, n, V); NULL when tp is 1 */
} nd_logits_scratch;

/* Buffers of a stage, shared by all its blocks and sets. */
typedef struct nd_workspace {
    nd_tensor branch;  /* (Tl, C) output of attention or MLP before it joins the residual stream */
    nd_tensor dx, dh;  /* (Tl, C) gradient of the residual stream, of a norm output */
    nd_tensor dact;    /* (piece, F) */
    nd_tensor qk;      /* (T normed, D) queries and keys around their norms */
    nd_tensor qk_sums; /* (2 T) of whole rows of q and of k that are normed as one */
    nd_tensor dout;    /* (T, H D) */
    void *full_a, *full_b; /* (T, C): gathered activations, partial sums; NULL when tp is 1 */
    void *full_h; /* (T, C): the gathered input of an MLP in pieces, in its backward; else NULL */
    void *fp8[ND_FP8_BUFFERS];
    nd_head_scratch head;
    nd_logits_scratch logits; /* with a cache, or with train.sample_prompt */
} nd_workspace;

/*
 * Weights in the form in which products read them, where the backend has one (nd_kept_form in
 * kernels/ops.h). The first product that reads a form makes it. All later products read it until
 * the weights change: those of other micro-batches of the step, of a recompute, and of other chunks
 * of the head.
 *
 * A weight has up to two forms, for the forward (b = w^T) and for the input gradient (b = w). The
 * head's weight has two for each tile of the vocabulary, since each tile has products of its own. A
 * form is kept where a step reads it more than once and its unit has a buffer of its own. A block
 * that shares its buffer is gathered again before each pass, and a pass reads a form once.
 */
typedef struct nd_packed_weight {
    bool head;
    size_t bytes;    /* 0: it is not kept */
    int64_t version; /* of the weights from which the form was made */
    nd_kept_form form;
} nd_packed_weight;

typedef struct nd_packed_weights {
    const nd_fsdp *fsdp;
    nd_packed_weight *weights; /* owned */
    int count, most;
} nd_packed_weights;

typedef struct nd_model {
    nd_rank *rank;
    nd_dims dims;
    nd_layout *layout;
    const nd_stage *stage;
    nd_fsdp fsdp;
    nd_scales scales;
    struct nd_linear_group *linears; /* linear_groups.c; owned */
    nd_packed_weights packed;
    int packed_head; /* the number of the head's first form: two for each of its tiles */
    nd_cp cp;        /* without a cache */
    nd_kv_cache kv;  /* of no slots: none */
    nd_recompute recompute;
    bool forward_only;
    int64_t piece_block;           /* of dw of the MLP in pieces (nd_form_rule.block); 0: none */
    nd_rope_view rope, query_rope; /* of keys, of queries; one where they are the same */
    nd_rope_view window_rope;      /* of layers with windows, where it differs */
    nd_batches batches;
    nd_activation_set *sets; /* [set_count] of the micro-batches in flight; owned */
    int set_count;
    bool delays;       /* weight gradients are a pass of their own, from what the set keeps */
    nd_workspace work; /* of the stage */

    int sources; /* of the data, whose losses are told apart in training; 0: they are not */
    /* (2 sources), right before the numbers, so that one reduction takes them and the loss: sums of
     * the losses of each source, then how many of its labels count. */
    double *source_sums;
    nd_step_numbers *numbers;
    nd_graphs *graphs; /* borrowed: of the blocks of a training step; NULL: none in this step */
    nd_dump *dump;     /* borrowed: what this training step is shown to; NULL: it is not dumped */
} nd_model;

typedef struct nd_model_options {
    const nd_linear_choice *linears; /* autotune's; NULL: as the filter says */
    int sets;                        /* micro-batches in flight; 0: one */
    bool delays;                     /* weight gradients are a pass of their own */
    int sources;                     /* of the data, to tell their losses apart; below 2: none */
    bool separate;                   /* micro-batches may have first keys */
    bool forward_only;               /* passes are ND_PASS_EVAL or, with a cache, GENERATE */
    const nd_kv_options *cache;      /* NULL: none; else forward_only, and cp is 1 */
} nd_model_options;

/* Lays out everything this rank needs into `plan`, but for weights; no memory yet. The options are
 * not kept. */
nd_status nd_model_create(nd_rank *rank, const nd_model_options *options, nd_memplan *plan,
                          nd_model **out);
/* Wants the activations of all sets, whose blocks are allocated here, and the buffers that they
 * share. */
nd_status nd_activations_plan(nd_model *model, const nd_kv_options *cache, nd_memplan *plan);
/* Then lays out the gathered weights (nd_fsdp_plan_weights), and finds those that a step reads more
 * than once, for whose packed form nd_packed_plan adds memory where there is some. */
nd_status nd_model_plan_weights(nd_model *model, bool shares, nd_memplan *plan);
/* Wants the memory of the packed forms of the blocks, or of those of the head, and returns its
 * bytes; plan NULL: it is not wanted. Without it each product packs its weight itself, with the
 * same bits. */
size_t nd_packed_plan(nd_packed_weights *packed, bool head, nd_memplan *plan);
/* A form by its number, for nd_matrix.kept; NULL where none is kept, and where none was wanted
 * (0). It is marked as not made when the weights have changed. */
nd_kept_form *nd_packed_form(nd_packed_weights *packed, int number);
/* Makes what memory must hold before the first step, after the plan was committed. */
nd_status nd_model_start(nd_model *model);
void nd_model_destroy(nd_model *model);

/* The weights of the next pass begin to be gathered. */
nd_status nd_model_unshard(nd_model *model);
/* A free set for one micro-batch; a set must be free. */
nd_activation_set *nd_model_take_set(nd_model *model);
/* Copies micro-batch `micro` of a step, whose sources are below nd_model_options.sources, and
 * begins to move it to the device. The set must be taken and not loaded; `from` is not read after
 * the return. */
nd_status nd_model_load(nd_model *model, nd_activation_set *set, const nd_step_batch *from,
                        int micro);
/* Loads a micro-batch whose sources are not told apart. */
nd_status nd_model_load_batch(nd_model *model, nd_activation_set *set, const int32_t *inputs,
                              const int32_t *labels, const int32_t *positions);
/* The set is free again. All that reads it is enqueued. */
nd_status nd_model_give_back(nd_model *model, nd_activation_set *set);

/*
 * Forward of the loaded micro-batch with its loss, which is added to numbers->loss_sum, and in
 * training by source to source_sums. In training the backward of the head's products runs inside
 * (dlogits are divided by numbers->tokens).
 */
nd_status nd_model_forward(nd_model *model, nd_activation_set *set, nd_pass pass);
/* Backward of the rest; gradients are accumulated into the shards. */
nd_status nd_model_backward(nd_model *model, nd_activation_set *set);
/* Like nd_model_backward, in two parts, with nd_model_options.delays: first without the weight
 * gradients of linears, then those, from what the set keeps. The second reads no weights. */
nd_status nd_model_input_gradient(nd_model *model, nd_activation_set *set);
nd_status nd_model_weight_gradient(nd_model *model, nd_activation_set *set);

/*
 * Computes the rows of a call through the cache, whose ids and positions were loaded as the first
 * of a micro-batch (labels are not read), and gives the logits that follow on some of them. *logits
 * is F32 (count, vocab) on the host, equal on all tp ranks, in F32 whatever the precision; complete
 * at the return.
 */
typedef struct nd_logits_call {
    nd_kv_call kv;
    const int64_t *rows; /* numbers of rows of the call */
    int64_t count;       /* 0: none are wanted */
    float *logits;
} nd_logits_call;
nd_status nd_model_logits(nd_model *model, nd_activation_set *set, const nd_logits_call *call);
/* Like nd_model_logits, without a cache, by the weights in training: an evaluation of the loaded
 * micro-batch gives the logits of one of its T rows, not a loss; row -1: it is another cp rank's.
 * Needs train.sample_prompt, with which the buffers are planned. Collective, as a forward is. */
nd_status nd_model_sample(nd_model *model, nd_activation_set *set, int64_t row, float *logits);

/* True if the MLP is computed in several pieces of tokens. */
static inline bool nd_mlp_has_pieces(const nd_model *model)
{
    return model->dims.piece < model->dims.T;
}

/* The functions of a stage. */

/* The residual stream (Tl, C) is x + delta; delta may be absent. */
typedef struct nd_residual {
    nd_tensor x, delta;
} nd_residual;

/* This says which block is computed, with which activations and in which pass. It is passed by
 * value. */
typedef struct nd_block_call {
    nd_model *model;
    nd_activation_set *set;
    int64_t layer;
    nd_pass pass;
} nd_block_call;

/* A block has this of an input of linears: its rows, the place for their FP8 codes (data NULL: they
 * are not kept), and the scale that goes with these. */
typedef struct nd_input_acts {
    nd_tensor rows, codes;
    nd_scale_ref scale;
} nd_input_acts;
nd_input_acts nd_set_input(nd_block_call call, nd_input input);

/* The rows of the table that the micro-batch's ids name, as the residual stream (Tl, C); backward
 * adds the stream's gradient behind them to the table's. */
nd_status nd_embed_forward(nd_model *model, nd_activation_set *set, nd_residual *out);
nd_status nd_embed_backward(nd_model *model, nd_activation_set *set);

/*
 * Blocks of a range in order. `after` is the unit that is prefetched behind the range, or NULL.
 * residual: what goes into the first block, which without delta is its x_in, and what comes out of
 * the last one. Backward goes from nd_stream_gradient behind the range's last block, whose writer
 * has followed nd_gradient_prepare for down of that block, to that before the first one.
 */
nd_status nd_blocks_forward(nd_model *model, nd_activation_set *set, nd_layer_range range,
                            nd_pass pass, const nd_unit *after, nd_residual *residual);
nd_status nd_blocks_backward(nd_model *model, nd_activation_set *set, nd_layer_range range,
                             const nd_unit *after);
/* The weight gradients that nd_blocks_backward leaves out where they are delayed. */
nd_status nd_blocks_weight_gradient(nd_model *model, nd_activation_set *set, nd_layer_range range);
/* Returns where the gradient of the residual stream behind a layer lies: it is in the workspace
 * before the first one, and wherever weight gradients are not delayed. */
static inline nd_tensor nd_stream_gradient(const nd_model *model, const nd_activation_set *set,
                                           int64_t layer)
{
    return layer < model->stage->layers.begin ? model->work.dx : nd_set_block(set, layer)->dout;
}

/* Loss; to train also the gradients of the head's weight and of its normed input. */
nd_status nd_head_forward(nd_model *model, nd_activation_set *set, nd_pass pass, nd_residual in);
/* The logits of a row, as nd_model_sample gives them. */
nd_status nd_head_sample(nd_model *model, nd_activation_set *set, nd_residual in, int64_t row,
                         float *logits);
/* The gradient of the residual stream behind the last block. */
nd_status nd_head_backward(nd_model *model, nd_activation_set *set);

/* Parts of a block, for the backward of blocks. */

/* Shows the dump a tensor of the block with rows from `row` of the rank's on. The points are
 * adjacent groups of its columns, of which `point` is the first. */
static inline nd_status nd_block_show(nd_block_call call, nd_dump_point point, int points,
                                      int64_t row, nd_tensor x)
{
    const nd_dump_place place = {
        point, points, call.layer, call.set->micro, call.pass == ND_PASS_BACKWARD, row, 0};
    return call.model->dump ? nd_dump_show(call.model->dump, &place, x) : ND_OK;
}

/* Between the products of q, k and v and attention, in place in the columns of qkv: norms of the
 * heads, RoPE, and the KV heads in the places whose query heads see them. Backward: the same for
 * their gradients, in reverse order. */
nd_status nd_block_heads(nd_block_call call, nd_tensor qkv, bool backward);

/* Returns where the gradients of adjacent norms or biases are summed up: in the unit's buffer or,
 * where weight gradients are delayed, in the set until the unit has a buffer. */
nd_tensor nd_block_vector_gradient(nd_block_call call, nd_param_id first, nd_param_id last);
/* Everything that the block did not keep, by the same ops on the same operands. */
nd_status nd_block_recompute(nd_block_call call);
/* The codes of a normed input (second: norm 2) that the block did not keep, just before the
 * products that need them. */
nd_status nd_block_recompute_codes(nd_block_call call, bool second);

#endif

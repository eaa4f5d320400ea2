// SPDX-License-Identifier: Apache-2.0
#ifndef ND_PRECISION_PRECISION_H
#define ND_PRECISION_PRECISION_H
/*
 * FP8 of one rank.
 *
 *   recipe   how the operands of a linear's products are cast, as data
 *   filter   which linears run in FP8, and why
 *   scales   scales and amaxes on the device
 *   health   what casts lose, for metrics.jsonl and the debug log
 *
 * All of it is a no-op unless train.precision is fp8.
 */
#include "kernels/ops.h"
#include "runtime/config/config.h"
#include "runtime/device/memplan.h"
#include "runtime/tensor/fp8.h"
#include "trainer/layout/layout.h"
#include "trainer/rank.h"

/*
 * recipe
 *
 * For each role of an operand it says how this is cast. A granularity is that of
 * the operand as it is stored: x (tokens, in), w (out, in), dy (tokens, out). The recipes are the
 * rows of runtime/config/fp8_recipes.def, which names their sources.
 */
typedef enum nd_scaling {
    ND_SCALING_NONE = 0, /* not cast: the product runs in BF16 */
    ND_SCALING_CURRENT,  /* from the amax of the tensor itself */
    ND_SCALING_DELAYED   /* from the amaxes of past steps */
} nd_scaling;

typedef struct nd_cast_rule {
    nd_scaling scaling;
    nd_dtype format;
    nd_granularity granularity;
} nd_cast_rule;

typedef struct nd_recipe {
    const char *name; /* NULL: no FP8 */
    nd_cast_rule rules[ND_ROLE_COUNT];
    bool power_of_two; /* current scales are powers of two (ops.h) */
    /* delayed */
    int64_t history_length;
    nd_amax_algorithm algorithm;
    int64_t margin;
} nd_recipe;

/* The recipe of a configuration; name NULL unless train.precision is fp8. */
nd_recipe nd_recipe_of(const nd_config *config);

/*
 * Every operand has one scale: inputs are kept for backward as codes, weights may be gathered as
 * codes. Otherwise scales lie along rows or columns, inputs are kept in BF16 and cast again.
 */
static inline bool nd_recipe_is_per_tensor(const nd_recipe *recipe)
{
    return recipe->name && recipe->rules[ND_X_OF_Y].granularity == ND_PER_TENSOR;
}
static inline bool nd_recipe_is_delayed(const nd_recipe *recipe)
{
    return recipe->rules[ND_X_OF_Y].scaling == ND_SCALING_DELAYED;
}

/* The casts of a product, named by the role of its first operand: "e4m3 per tensor x e4m3 per
 * tensor, fast accumulation", or "bf16"; returns buffer. */
const char *nd_recipe_format(const nd_recipe *recipe, nd_role first, bool fast, char *buffer,
                             size_t size);

/*
 * filter
 *
 * It is decided once, before step 0, from the shape alone, so alike on every rank. The head is
 * fused with the loss and always stays in BF16.
 *
 *   accelerate    all but the first and the last linear by module order (layer 0's q_proj and
 *                 lm_head), and those whose sizes 16 does not divide (accelerate's default filter)
 *   auto          torchao's thresholds below which FP8 is slower (float8_linear_utils.py), by
 *                 recipe
 *   a,b,...       linears whose module name matches a pattern: a part of the name, or with * ? [ a
 *                 shell pattern of the whole; "*" is all
 */
typedef enum nd_filter_reason {
    ND_FILTER_CONVERTED = 0,
    ND_FILTER_FIRST,     /* the model's first linear */
    ND_FILTER_LAST,      /* its last */
    ND_FILTER_SIZE,      /* 16 does not divide its sizes */
    ND_FILTER_SMALL,     /* below torchao's threshold */
    ND_FILTER_UNMATCHED, /* no pattern matches */
    ND_FILTER_SLOWER,    /* autotune: FP8 takes longer here */
} nd_filter_reason;

typedef struct nd_filter {
    int64_t layers;
    nd_filter_reason *reasons; /* [layers][ND_LINEAR_COUNT], owned; NULL: no FP8 */
    int64_t converted;         /* linears in FP8 */
} nd_filter;

/* Sets of linears with one input, which are at most the parts of one product. */
enum { ND_LINEAR_SETS = 1 << ND_FP8_PARTS };

/*
 * This says what autotune makes of the filter's linears. Masks have bit i for linear i of those
 * that read an input.
 *   fp8[input][asked]   of those that the filter asks for, the ones that run in FP8; -1: not known
 * forced: fp8[input][0] whatever is asked, to find out what it takes.
 */
typedef struct nd_linear_choice {
    bool forced;
    int8_t fp8[ND_INPUT_COUNT][ND_LINEAR_SETS];
} nd_linear_choice;

/*
 * Nothing is converted unless train.precision is fp8. ND_ERR_CONFIG: a pattern that matches
 * nothing, a linear named whose sizes 16 does not divide, nothing left to convert.
 */
nd_status nd_filter_init(nd_filter *filter, const nd_config *config, const nd_shape *shape);
void nd_filter_fini(nd_filter *filter);

bool nd_filter_converts(const nd_filter *filter, int64_t layer, int linear);
/* The linears of a layer with an input that are converted. */
int nd_filter_mask(const nd_filter *filter, int64_t layer, nd_input input);
/* ND_ERR_DATA when there is no choice for what the filter asks. */
nd_status nd_filter_choose(nd_filter *filter, const nd_linear_choice *choice);

/*
 * Conditions of the products on this mesh, with numbers: local weight sizes and a rank's tokens in
 * multiples of 16. ND_ERR_CONFIG.
 */
nd_status nd_filter_check(const nd_filter *filter, const nd_config *config, const nd_shape *shape,
                          const nd_mesh *mesh);

/*
 * scales
 *
 * Every linear of a block has a site for its weight and one for the gradient of its output; every
 * input of linears has one too. A site has a scale, its inverse and an amax, on the device; with
 * `delayed` also a history of amaxes. Nothing is read back to the host inside a step.
 *
 * Sites are those of all layers of the model, also where a rank holds some of the layers only: a
 * site then has one number on every rank, one all-reduce over all ranks gives every amax, and saved
 * scales fit every mesh. That costs a few floats for each linear.
 *
 * Weight scales are computed once after every change of the weights, from the F32 shards: amax of
 * this rank's part of each weight, one all-reduce MAX over dp_shard x cp x tp, scales. When weights
 * are gathered in BF16 the amax is rounded to BF16 first: rounding is monotone, so that is the amax
 * of the gathered weight.
 *
 * Scales along rows or columns (rowwise) are not kept: they live in vectors for each kind of
 * operand while a product needs them. Where a recipe has no others for weights, their amaxes are
 * found and reduced only in steps that the health log counts.
 *
 * Amaxes that are known before any of them is needed lie next to each other, and one all-reduce MAX
 * serves them all:
 *
 *   over model       all weights with one scale, after every change
 *   over tp          tensorwise: the gradients of the outputs of the column-parallel linears with
 *                    one input
 *                    rowwise: rows of the input and of the weight of a row-parallel linear, before
 *                    its product; rows of the gradients of the outputs and columns of the weights
 *                    of the column-parallel linears with one input, before that input's gradient
 *   over each group  all weights of a layer, in a model without a backward, before they are cast
 *   over world       all amaxes of a step (delayed)
 *
 * No product waits for an amax that it does not read. So inputs, and gradients of the outputs of
 * row-parallel linears, are reduced alone when they have one scale: the next product reads them.
 * Rows and columns that tp does not split need no reduction; they are measured just before they are
 * cast.
 *
 * A model without a backward holds converted weights as codes alone, whatever fp8.all_gather says,
 * with the scales, of rows too, that a training step's forward would have found. They are found
 * while the weights are loaded (fsdp.h).
 */
/* A scale, its inverse and its amax lie here on the device: one of each, or one for each row or
 * column of an operand. */
typedef struct nd_scale_ref {
    int64_t site; /* whose health is counted */
    float *amax, *scale, *inverse;
} nd_scale_ref;

/* The health log knows this of a site, on the host. */
typedef struct nd_site_report {
    int64_t elements;  /* cast here since the counts were zeroed */
    int64_t counts[3]; /* of all ranks: underflow, saturation, elements */
    float amax, scale; /* of all ranks: the largest amax, and the scale that goes with it */
} nd_site_report;

/* Operands cast since the start, by ops or by products: a weight, an input, or the gradient of a
 * linear's output counts once each time it is given to products. */
typedef struct nd_cast_counts {
    int64_t weights, inputs, gradients;
} nd_cast_counts;

/* Rows of a layer's kept weights, in nd_scales.rows: from `begin` those of which tp ranks have
 * different ones, from `split` to `end` those of which each tp rank has a part. */
typedef struct nd_kept_rows {
    int64_t begin, split, end;
} nd_kept_rows;

typedef struct nd_scales {
    nd_rank *rank;
    const nd_layout *layout;
    nd_recipe recipe;
    nd_filter filter;
    bool codes_gathered; /* weights travel as codes: segment FP8 */
    bool weights_kept;   /* as codes, for a forward alone */
    bool from_bf16;      /* codes of weights are made from their BF16 values */
    int64_t layers, sites;
    int64_t version;         /* of the weights that the weight scales belong to; 0: none */
    float *updated;          /* (layers x linears): this rank's amaxes of updated_version, which the
                                optimizer left; NULL: it measures none */
    int64_t updated_version; /* 0: none */
    float *scale, *inverse;  /* (sites) */
    float *amax;             /* (sites): of this step; row 0 of the history */
    float *limit;            /* (sites), delayed */
    nd_bf16 *rounded;        /* (layers x linears) */
    nd_scale_ref rows;       /* of the rows of all kept weights, one after the other */
    int64_t *first_row;      /* [layers x linears] of each weight, in `rows` */
    nd_kept_rows *kept_rows; /* [layers] */
    nd_scale_ref vectors[3]; /* of rows or columns of an input, a weight, a gradient */
    nd_scale_ref joint;      /* of rows or columns of several operands, one after the other */
    int64_t joint_count;     /* entries that `joint` has room for */
    /* The health log's, on the device; NULLs without it. */
    int64_t (*counts)[3];   /* (sites): nd_ops.fp8_count, and room for the elements */
    nd_scale_ref worst;     /* (sites): the amax of all that was cast in the step, and its scale */
    nd_site_report *report; /* host, [sites] */
    bool counting;          /* the health log counts this step */
    int64_t counted;        /* the last step that was counted; 0: none */
    nd_cast_counts casts;
} nd_scales;

/* Decides which linears are converted; no memory yet. linears: what autotune chose, or NULL; not
 * kept. forward_only: weights are kept as codes, but not those of `delayed`, whose scales follow
 * from steps. Without FP8 everything below is a no-op. */
nd_status nd_scales_init(nd_scales *scales, nd_rank *rank, const nd_linear_choice *linears,
                         bool forward_only);
/* Plans; the layout is borrowed. Rooms for scales of rows or columns: `each` for those of one
 * operand, `joint` for those of all operands whose amaxes are reduced together. */
nd_status nd_scales_plan(nd_scales *scales, const nd_layout *layout, int64_t each, int64_t joint,
                         nd_memplan *plan);
/* Writes the start values of delayed scaling after the plan was committed. They are scales of 1 and
 * the largest value of each site's format. */
nd_status nd_scales_start(nd_scales *scales);
void nd_scales_fini(nd_scales *scales);

/* True if a parameter lies in the FP8 segment. For nd_layout_create; context is the nd_scales. */
bool nd_scales_in_segment(void *context, const nd_param *param);

/* True if the backward keeps an input of linears as codes: all its linears read codes with one
 * scale. The attention output is kept in BF16, which the attention's backward reads. */
bool nd_scales_keep_codes(const nd_scales *scales, nd_input input, int64_t layer);

/* The sites of a linear's weight, of an input, and of the gradient of a linear's output. */
int64_t nd_site_weight(const nd_scales *scales, int64_t layer, int linear);
int64_t nd_site_input(const nd_scales *scales, int64_t layer, nd_input input);
int64_t nd_site_gradient(const nd_scales *scales, int64_t layer, int linear);

nd_scale_ref nd_scales_at(const nd_scales *scales, int64_t site);
/* This rank's part of the weight of a site in the flat state; empty: none, or the linear stays in
 * BF16. */
nd_flat_range nd_scales_part(const nd_scales *scales, int64_t site);
/* The scales of a weight whose codes are gathered or kept: one, or one for each of its local
 * rows. */
nd_scale_ref nd_scales_of_weight(const nd_scales *scales, int64_t layer, int linear);
/* `count` entries of nd_scales.joint, from `at` on. */
nd_scale_ref nd_scales_joint(const nd_scales *scales, int64_t at, int64_t count);
/* A matrix that is cast by a rule with these scales, or codes that were. */
nd_matrix nd_matrix_with(nd_scale_ref scale, const nd_cast_rule *rule, nd_tensor stored);

/*
 * The optimizer measures the weights that it updates, where it can and an amax is read: after
 * begin, with the version that the weights will have, it merges the amax of the range that begins
 * at `begin` into nd_scales_updated_amax; NULL: nobody asks for that. nd_scales_refresh then reads
 * no weights.
 */
nd_status nd_scales_begin_update(nd_scales *scales, int64_t version);
float *nd_scales_updated_amax(const nd_scales *scales, int64_t begin);

/* The weights changed to `version`: new weight scales (delayed: amaxes of this step). No-op when
 * they are known or kept, and where only the health log would read them (rowwise) and the step is
 * not counted. */
nd_status nd_scales_refresh(nd_scales *scales, const float *master, int64_t version);

/*
 * The scales of kept weights of a layer. First their amaxes are zeroed. Then those of elements are
 * merged into them (nd_fsdp_measure). Then the amaxes of all ranks give the scales, with one
 * reduction in each group for all weights of the layer, which is collective, over ranks that read
 * the same weight too.
 */
nd_status nd_scales_begin_weights(nd_scales *scales, int64_t layer);
nd_status nd_scales_settle_weights(nd_scales *scales, int64_t layer);
/* Returns where those of elements lie, from `element` of the weight's local block on: whole rows or
 * a part of one. x, flat, takes the form in which they are measured and cast. */
nd_scale_ref nd_scales_of_elements(const nd_scales *scales, const nd_param *param, int64_t element,
                                   nd_tensor *x);

/*
 * Current scaling of `count` adjacent scales from `first` on, whose amaxes were measured; `split`
 * when each tp rank measured a part of the tensors. One all-reduce MAX over tp, then scales.
 */
nd_status nd_scales_settle(nd_scales *scales, nd_scale_ref first, int64_t count, nd_dtype format,
                           bool split);

/* The health counts of a site when they are on: x was cast, or products cast it, to this form. */
nd_status nd_scales_count(nd_scales *scales, int64_t site, const nd_matrix *as, nd_tensor x);

/*
 * End of a step, delayed only: this step's amaxes, reduced over all ranks by one all-reduce, enter
 * the history and give the scales of the next step.
 */
nd_status nd_scales_advance(nd_scales *scales);
/* The step is skipped: its amaxes of inputs and gradients are forgotten. */
nd_status nd_scales_forget(nd_scales *scales);

/* Entries of the state that a run must carry to go on with the same bits (delayed): empty for the
 * other recipes. */
typedef struct nd_scale_state {
    const char *name;
    float *data; /* on the device */
    int64_t count;
} nd_scale_state;
int nd_scales_state(const nd_scales *scales, nd_scale_state out[3]);

/*
 * health
 *
 * Every fp8.health_interval steps the casts of each converted linear are counted, for each of its
 * operands, over all ranks and micro-batches: the largest |x|, its scale (the smallest of several
 * scales; rounded where scales are powers of two), the share of elements that became 0 without
 * being 0 (underflow) and the share beyond the format (saturation). metrics.jsonl gets the worst
 * layer of each linear; the debug log of rank 0 has a line for every layer. A counted step casts
 * apart from other ops and without CUDA graphs, and reads more; its results are the same bits.
 */

/* Says before the gradients of a step whether this one is counted. */
nd_status nd_health_begin(nd_scales *scales, int64_t step);
/* This comes after them; it is collective when the step was counted. The lines go to nd_log_debug
 * on rank 0. */
nd_status nd_health_end(nd_scales *scales, int64_t step);

/* One operand of the last report; shares in 0 .. 1. */
typedef struct nd_health_entry {
    float amax, scale;
    double underflow, saturation;
} nd_health_entry;
nd_health_entry nd_health_of(const nd_scales *scales, int64_t site);

typedef enum nd_operand_kind {
    ND_OPERAND_INPUT = 0,
    ND_OPERAND_WEIGHT,
    ND_OPERAND_GRADIENT, /* of the linear's output */
    ND_OPERAND_KINDS
} nd_operand_kind;
const char *nd_operand_name(nd_operand_kind kind); /* "input" */

/* The largest value of all layers in which a linear is converted, and the first layer that has
 * it. */
typedef struct nd_health_worst {
    double underflow, saturation, amax;
    int underflow_layer, saturation_layer, amax_layer; /* -1: the linear stays in BF16 */
} nd_health_worst;

/* Returns what the last step that was counted has found, alike on all ranks. */
typedef struct nd_health_summary {
    nd_health_worst worst[ND_OPERAND_KINDS][ND_LINEAR_COUNT];
} nd_health_summary;
void nd_health_summarise(const nd_scales *scales, nd_health_summary *out);

/* The lines that `ndtrain plan` and the start of a run print: the recipe, its three products, and
 * every linear with its precision and the reason. */
void nd_precision_each_line(const nd_scales *scales, const nd_shape *shape,
                            void (*line)(void *context, const char *text), void *context);

#endif

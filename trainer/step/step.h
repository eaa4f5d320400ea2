// SPDX-License-Identifier: Apache-2.0
#ifndef ND_STEP_STEP_H
#define ND_STEP_STEP_H
/*
 * The training step of one rank, without files: memory, model, gradient synchronisation, optimizer.
 * The run loop (run/run.c) drives it in a process of its own, and tests drive N ranks as threads.
 */
#include "runtime/device/memplan.h"
#include "trainer/data/data.h"
#include "trainer/model/model.h"
#include "trainer/schedule/schedule.h"
#include "trainer/tune/tune.h"

/* The update of this rank's shards: clip factor, AdamW or SGD, weight decay on matrices only. */
typedef struct nd_optimizer {
    nd_fsdp *fsdp;
    nd_flat_range *ranges; /* in the order of the units */
    int range_count;
} nd_optimizer;

/*
 * Holds the update back unit by unit, while the state of a unit is still being copied for a save.
 * wait(context, unit) returns when work that is then enqueued on the rank's stream may change the
 * unit's arrays.
 */
typedef struct nd_update_gate {
    nd_status (*wait)(void *context, int unit); /* NULL: nothing is copied; one update of all */
    void *context;
} nd_update_gate;

/* The last losses, by which train.spike_factor judges the next one; all zero: none. */
enum { ND_RECENT_LOSSES = 64 };
typedef struct nd_recent_losses {
    double value[ND_RECENT_LOSSES]; /* loss number i is value[i % ND_RECENT_LOSSES] */
    int64_t count;                  /* of losses so far, in this start of the run */
} nd_recent_losses;

/* This says where a run is. A resumed run restores it together with the arrays of
 * nd_trainer_state_of; the position of the training data follows from it
 * (nd_loader_options.first_step). */
typedef struct nd_run_position {
    int64_t step;          /* steps done, also those that were skipped */
    int64_t skipped;       /* steps without an update: no label counted, or not finite or a spike,
                            and train.nonfinite is skip */
    int64_t tokens_seen;   /* labels that counted in all of them, global */
    int64_t samples_ahead; /* of the data: the step after n steps begins with sample
                              n x samples of a step + samples_ahead. Counts samples that were passed
                              over, and what steps of another size had more (or less: below 0) */
    nd_recent_losses recent;
} nd_run_position;

typedef struct nd_trainer {
    nd_rank *rank;           /* borrowed */
    const nd_tuning *tuning; /* autotune's choices, borrowed; NULL: none */
    nd_memplan plan;
    size_t unkept_blocks, unkept_head; /* bytes of packed weights that memory is too short for */
    nd_model *model;
    nd_schedule schedule; /* of a step; owned */
    nd_optimizer optimizer;
    nd_graphs *graphs;                /* kernels.cuda_graphs; else NULL */
    nd_graph_counts planned_graphs;   /* what they will hold */
    nd_step_numbers *sent, *received; /* host memory: what goes to the device, what comes back */
    double *sent_sources,
        *received_sources; /* (sources), (2 sources): the same of nd_model.source_sums */
    nd_run_position position;
    nd_update_gate gate;
    /* Steps since the start of the process without a health report or a dump: after the first, CUDA
     * graphs may record. */
    int64_t steps_recordable;
    nd_dump *dump;            /* log.dump_tensors, set by the caller; owned; NULL: none */
    bool told_without_labels; /* that a step without a counted label is skipped */
} nd_trainer;

/*
 * This says how long ranks worked in a step: forward, backward and norms, and the wait for data,
 * until the loss and the norm are read; without the time in calls of communication, where a rank
 * also waits for slower ones, and without the update.
 */
typedef struct nd_work {
    double slowest_seconds, fastest_seconds; /* the largest and the smallest of all ranks */
    int slowest_rank;                        /* the lowest of equals; -1: not known, or one rank */
} nd_work;

typedef struct nd_step_result {
    double loss;      /* mean NLL over the counted labels of the step, global */
    double grad_norm; /* before clipping */
    double lr;
    int64_t tokens; /* counted labels of the step, global */
    int64_t stop;   /* not 0: some rank was asked to stop; alike on all ranks */
    int64_t save;   /* largest state that any rank reported (nd_trainer_report_save) */
    bool skipped;
    nd_work work; /* not known on a GPU, where the host only enqueues it */
    /* The sums of the losses of each source of a blend, then its counted labels, global, (2
     * sources); lent until the next step. NULL: the data has one source. */
    const double *source_sums;
} nd_step_result;

/* Checks before any worker starts that model and mesh allow the FP8 that is asked for:
 * ND_ERR_CONFIG with the numbers. */
nd_status nd_trainer_check_precision(const nd_config *config, const nd_shape *shape);

/* A size above it is beyond the addresses of any host, and far from where an int64_t overflows. */
#define ND_PLAN_BYTES_MAX 0x1p56

/* The limits of the ops (nd_op_limits) that the model alone decides about. ND_ERR_DATA. */
nd_status nd_trainer_check_shape(const nd_ops *ops, const nd_shape *shape);
/*
 * Checks before any worker starts that the ops of a backend can compute the model: nd_op_limits,
 * and sizes of which no plan can be made. Names key, value and limit. ND_ERR_DATA where a number of
 * the model is too large, ND_ERR_CONFIG where one of the configuration is, ND_ERR_RESOURCE where
 * their product is. nd_trainer_create checks it too.
 */
nd_status nd_trainer_check_limits(const nd_ops *ops, const nd_config *config, const nd_mesh *mesh,
                                  const nd_shape *shape);

/*
 * This comes before autotune times anything, on a GPU: ND_ERR_RESOURCE when the plan does not fit
 * in what is free, neither with the linears in FP8 that are asked for nor with none. Allocates
 * nothing on the device. On a CPU it does nothing.
 */
nd_status nd_trainer_check_memory(nd_rank *rank);
/* Plans memory; nothing is allocated on the device yet (enough for `ndtrain plan`). `tuning` is
 * NULL without autotune. */
nd_status nd_trainer_create(nd_rank *rank, const nd_tuning *tuning, nd_trainer **out);
/* Like nd_trainer_create, with this schedule, not the sequential one; owned, also on an error. */
nd_status nd_trainer_create_scheduled(nd_rank *rank, const nd_tuning *tuning, nd_schedule schedule,
                                      nd_trainer **out);
/* Says whether packed weights were left out of the plan because memory is short, and gives the line
 * that says so. */
bool nd_trainer_describe_unkept(const nd_trainer *trainer, char *out, size_t capacity);
/* Like nd_trainer_create, for validations alone (nd_trainer_evaluate): the weights, without
 * gradients, moments and what is kept for a backward. No step may be done. */
nd_status nd_trainer_create_evaluator(nd_rank *rank, nd_trainer **out);
/*
 * Adds to the plan, as external bytes, which are not allocated, what is on the device beside it
 * (so on a GPU not the loader's memory). graphs: what CUDA graphs will hold; NULL: a model without
 * a trainer, which has neither graphs nor a loader, and whose staging of reductions over tp is not
 * counted. nd_budget_commit is nd_memplan_commit, with a warning where the plan leaves too little
 * for what comes later; ND_ERR_RESOURCE also says what comes later.
 */
void nd_budget_plan(const nd_rank *rank, const nd_graph_counts *graphs, nd_memplan *plan);
nd_status nd_budget_commit(const nd_rank *rank, const nd_graph_counts *graphs, nd_memplan *plan);
/* Allocates the plan and writes its start values. Collective: the rank's groups must exist from
 * here on. */
nd_status nd_trainer_commit(nd_trainer *trainer);
void nd_trainer_destroy(nd_trainer *trainer);

/*
 * All that a resumed run must restore to go on with the same bits, after commit; F32 on the device.
 * Everything else that a step reads follows from it, from nd_run_position and from the
 * configuration.
 */
typedef struct nd_trainer_state {
    float *shards[3]; /* (shard_total): the master weights, then AdamW's moments, if it has them */
    int shard_count;
    nd_scale_state scales[3]; /* with delayed scaling: whole layers, alike on all ranks */
    int scale_count;
} nd_trainer_state;
nd_trainer_state nd_trainer_state_of(const nd_trainer *trainer);
/* The arrays were restored: copies of the weights are stale, and the next step is the one after
 * this position. */
void nd_trainer_resume_at(nd_trainer *trainer, nd_run_position position);

/*
 * Gradients of one step (all micro-batches), reduced over the mesh; fills loss, grad_norm, tokens,
 * stop. On a GPU this enqueues the whole step and then waits, once, to read these numbers; what
 * nd_trainer_step enqueues afterwards, the update, runs while the host prepares the next step.
 */
nd_status nd_trainer_gradients(nd_trainer *trainer, const nd_step_batch *batch,
                               nd_step_result *out);
/*
 * Gradients, then the update. A loss or norm that is not finite (alike on all ranks) gives
 * ND_ERR_NUMERIC naming the step and the first such tensor or, with train.nonfinite skip, a warning
 * and no update. So does a loss that is a spike (train.spike_factor). With rewind the error is
 * for the caller, who restores an older state.
 */
nd_status nd_trainer_step(nd_trainer *trainer, const nd_step_batch *batch, nd_step_result *out);

double nd_positive_nan(double value); /* NaN without the sign that printf would show */

/* Sets `stop` in the results of every rank's next step, or of the one after it when that step's
 * numbers are already on their way. Async-signal-safe. */
void nd_trainer_request_stop(nd_trainer *trainer, int reason);

/* Sets what the next step tells all ranks about this rank's part in a save (nd_step_result.save).
 * Any thread may call it. */
void nd_trainer_report_save(nd_trainer *trainer, int64_t state);
int64_t nd_trainer_reported_save(const nd_trainer *trainer); /* that of this rank alone */

/* Asked before each batch of a long loop, on all ranks; *stop is alike on all of them. */
typedef struct nd_stop_check {
    nd_status (*ask)(void *context, bool *stop);
    void *context;
} nd_stop_check;

/*
 * Mean NLL over `batches` calls of the (rewound) validation loader; all ranks take part. When
 * `check` stops it, *tokens is 0 and *loss stays. Where no label counts, *tokens is 0 and *loss is
 * NaN.
 */
nd_status nd_trainer_evaluate(nd_trainer *trainer, nd_loader *loader, int64_t batches,
                              const nd_stop_check *check, double *loss, int64_t *tokens);

#endif

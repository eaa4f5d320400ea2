// SPDX-License-Identifier: Apache-2.0
/* One step and one validation. */
#include "trainer/step/parts.h"

#include <math.h>
#include <stdio.h>

#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "trainer/precision/precision.h"

/* The list of actions (trainer/schedule). */

static void begin_phase(const nd_trainer *t, nd_phase phase, const char *name)
{
    nd_rank *r = t->rank;
    nd_progress_set_phase(r->progress, phase, t->position.step + 1);
    nd_range_push(r->device, name);
}

static nd_status forward(const nd_trainer *t, const nd_step_batch *batch, int micro)
{
    nd_model *m = t->model;
    nd_activation_set *set = nd_model_take_set(m);
    ND_TRY(nd_model_load(m, set, batch, micro));
    begin_phase(t, ND_PHASE_FORWARD, "forward");
    ND_TRY(nd_model_forward(m, set, ND_PASS_TRAIN));
    nd_range_pop(m->rank->device);
    return ND_OK;
}

typedef nd_status part_of_backward(nd_model *m, nd_activation_set *set);

/* `last`: nothing reads the set afterwards. */
static nd_status backward(const nd_trainer *t, int micro, part_of_backward *part, bool last)
{
    nd_model *m = t->model;
    nd_activation_set *set = m->sets;
    while (!set->taken || set->micro != micro) { /* the one that its forward took */
        set++;
        ND_ASSERT(set < m->sets + m->set_count);
    }
    begin_phase(t, ND_PHASE_BACKWARD, "backward");
    ND_TRY(part(m, set));
    nd_range_pop(m->rank->device);
    return last ? nd_model_give_back(m, set) : ND_OK;
}

static nd_status run_action(nd_trainer *t, const nd_step_batch *batch, const nd_action *action)
{
    nd_model *m = t->model;
    switch (action->kind) {
    case ND_UNSHARD:
        return nd_model_unshard(m);
    case ND_FORWARD:
        return forward(t, batch, action->micro);
    case ND_BACKWARD:
        return backward(t, action->micro, nd_model_backward, true);
    case ND_INPUT_GRADIENT:
        return backward(t, action->micro, nd_model_input_gradient, false);
    case ND_WEIGHT_GRADIENT:
        return backward(t, action->micro, nd_model_weight_gradient, true);
    case ND_RESHARD:
        return nd_fsdp_reshard(&m->fsdp);
    case ND_REDUCE:
        return nd_fsdp_grad_reduce(&m->fsdp, &m->numbers->squares);
    default:
        break;
    }
    return nd_fail(ND_ERR_INTERNAL, "action %d is of a model of several stages", (int)action->kind);
}

/* Sums, on the device, the labels that count over all ranks that hold different tokens. */
static nd_status send_tokens(nd_trainer *t, int64_t count)
{
    nd_rank *r = t->rank;
    int64_t *tokens = &t->model->numbers->tokens;
    t->sent->tokens = count;
    ND_TRY(nd_copy(&r->stream, tokens, &t->sent->tokens, sizeof *tokens));
    return nd_all_reduce(r, ND_GROUP_DP_CP, tokens, 1, ND_DTYPE_I64, ND_REDOP_SUM);
}

/* No loss yet; the labels of each source that count on this rank. */
static nd_status begin_losses(nd_trainer *t, const nd_step_batch *batch)
{
    nd_model *m = t->model;
    nd_stream *stream = &t->rank->stream;
    const size_t bytes = (size_t)m->sources * sizeof *m->source_sums;
    ND_TRY(nd_zero(stream, &m->numbers->loss_sum, sizeof m->numbers->loss_sum));
    if (m->sources == 0) {
        return ND_OK;
    }
    for (int i = 0; i < m->sources; i++) {
        t->sent_sources[i] = batch->source_valid ? (double)batch->source_valid[i] : 0.0;
    }
    ND_TRY(nd_zero(stream, m->source_sums, bytes));
    return nd_copy(stream, m->source_sums + m->sources, t->sent_sources, bytes);
}

/* Adds up the loss sums of all ranks that hold different tokens; the first of `count` adjacent
 * numbers is `sums`, the last the loss. */
static nd_status sum_losses(nd_trainer *t, double *sums, int64_t count)
{
    return nd_all_reduce(t->rank, ND_GROUP_DP_CP, sums, count, ND_DTYPE_F64, ND_REDOP_SUM);
}

/* Finds the rank that made the others wait, through one reduction of two numbers. */
enum { RANK_BITS = 24, TIME_BITS = 38 };
static const int64_t last_rank = ((int64_t)1 << RANK_BITS) - 1;
static const int64_t longest = (int64_t)1 << TIME_BITS; /* microseconds */

static int64_t microseconds(double seconds)
{
    double value = seconds * 1e6 + 0.5;
    return value >= (double)longest ? longest : value >= 1 ? (int64_t)value : 0;
}

/* Among ranks with equal times the lowest rank gets the largest number, so it wins the maximum. */
int64_t nd_work_most(double seconds, int rank)
{
    ND_ASSERT(rank >= 0 && rank < last_rank);
    return (microseconds(seconds) << RANK_BITS) + last_rank - rank;
}

/* The number is below 0, since 0 stands for a time that is not known. */
int64_t nd_work_least(double seconds)
{
    return -microseconds(seconds) - 1;
}

nd_work nd_work_of(int64_t most, int64_t least)
{
    if (most <= 0 || least >= 0) {
        return (nd_work){.slowest_rank = -1};
    }
    return (nd_work){.slowest_seconds = (double)(most >> RANK_BITS) * 1e-6,
                     .fastest_seconds = (double)(-least - 1) * 1e-6,
                     .slowest_rank = (int)(last_rank - (most & last_rank))};
}

/* The time of this rank so far without that of communication. */
static int64_t busy_ns(const nd_rank *r)
{
    return nd_clock_ns() - r->trace.ns[ND_TRACE_COMMUNICATION];
}

/* The only place where a step waits for the device. */
static nd_status read_numbers(nd_trainer *t)
{
    nd_stream *stream = &t->rank->stream;
    ND_TRY(nd_copy(stream, t->received_sources, t->model->source_sums,
                   (size_t)(2 * t->model->sources) * sizeof *t->received_sources +
                       sizeof *t->received)); /* the numbers lie behind the sums */
    return nd_stream_sync(stream);
}

void nd_trainer_request_stop(nd_trainer *t, int reason)
{
    *(volatile int64_t *)&t->sent->stop = reason;
}

void nd_trainer_report_save(nd_trainer *t, int64_t state)
{
    __atomic_store_n(&t->sent->save, state, __ATOMIC_RELAXED);
}

int64_t nd_trainer_reported_save(const nd_trainer *t)
{
    return __atomic_load_n(&t->sent->save, __ATOMIC_RELAXED);
}

/* The step is shown to the dump, if it is one of those to dump. */
static nd_status begin_dump(nd_trainer *t, const nd_step_batch *batch)
{
    const int64_t number = t->position.step + 1;
    t->model->dump = nd_dump_wants(t->dump, number) ? t->dump : NULL;
    if (!t->model->dump) {
        return ND_OK;
    }
    ND_TRY(nd_dump_begin(t->dump, number, batch->places));
    return nd_dump_show_state(t->dump, false, t->model->fsdp.master);
}

nd_status nd_trainer_gradients(nd_trainer *t, const nd_step_batch *batch, nd_step_result *out)
{
    nd_rank *r = t->rank;
    nd_step_numbers *numbers = t->model->numbers;
    ND_TRY(begin_dump(t, batch));
    /* Ops leave plain rows in such a step: graphs have recorded others. */
    const bool plain = t->model->scales.counting || t->model->dump;
    const int64_t begin = busy_ns(r);
    /* The first step loads kernels, which a capture does not allow. */
    t->model->graphs = t->steps_recordable > 0 && !plain ? t->graphs : NULL;
    nd_graphs_set_step(t->graphs, t->position.step + 1);
    ND_TRY(send_tokens(t, batch->valid));
    ND_TRY(begin_losses(t, batch));
    nd_fsdp_begin_step(&t->model->fsdp, t->schedule.micros);
    /* Gradients of this rank's shards, summed over the mesh, and loss sums of this rank. */
    for (int i = 0; i < t->schedule.count; i++) {
        ND_TRY(run_action(t, batch, &t->schedule.actions[i]));
    }
    ND_TRY(sum_losses(t, t->model->source_sums, 2 * t->model->sources + 1));
    if (t->model->dump) {
        t->model->dump = NULL;
        ND_TRY(nd_dump_show_state(t->dump, true, t->model->fsdp.grad));
        ND_TRY(nd_dump_end(t->dump));
    }
    const double seconds = (double)(busy_ns(r) - begin) * 1e-9 + batch->wait_seconds;
    const bool known = r->device->kind == ND_DEVICE_CPU && r->world_size > 1;
    t->sent->most = known ? nd_work_most(seconds, r->rank) : 0;
    t->sent->least = known ? nd_work_least(seconds) : 0;
    /* A signal that reached one rank stops all of them at the same boundary, and all learn at the
     * same one how far a save is, and who worked longest. The device reads the numbers when it gets
     * here, which is later than the host does. */
    int64_t *flags = &numbers->stop; /* and save, most, least */
    ND_TRY(nd_copy(&r->stream, flags, &t->sent->stop, 4 * sizeof *flags));
    ND_TRY(nd_all_reduce(r, ND_GROUP_WORLD, flags, 4, ND_DTYPE_I64, ND_REDOP_MAX));
    ND_TRY(read_numbers(t));
    t->steps_recordable += !plain;
    out->tokens = t->received->tokens;
    out->loss = out->tokens > 0 ? t->received->loss_sum / (double)out->tokens : (double)NAN;
    out->grad_norm = out->tokens > 0 ? sqrt(t->received->squares) : 0.0;
    out->stop = t->received->stop;
    out->save = t->received->save;
    out->work = nd_work_of(t->received->most, t->received->least);
    out->source_sums = t->model->sources > 0 ? t->received_sources : NULL;
    return ND_OK;
}

double nd_schedule_lr(const nd_config *config, int64_t step)
{
    double lr = config->optimizer.lr, min_lr = config->optimizer.min_lr;
    int64_t warmup = config->optimizer.warmup_steps, left = config->train.steps - warmup;
    if (step <= warmup) {
        return lr * (double)step / (double)warmup;
    }
    double p = (double)(step - 1 - warmup) / (double)left;
    switch (config->optimizer.schedule) {
    case ND_SCHEDULE_CONSTANT:
        return lr;
    case ND_SCHEDULE_LINEAR:
        return lr + (min_lr - lr) * p;
    case ND_SCHEDULE_COSINE:
        return min_lr + (lr - min_lr) * 0.5 * (1.0 + cos(M_PI * p));
    case ND_SCHEDULE_WSD:
        break;
    }
    const int64_t steps = config->train.steps, given = config->optimizer.decay_steps;
    const int64_t decay = given ? given : (steps + 9) / 10;
    const double decayed = (double)nd_max(0, step - 1 - (steps - decay));
    return lr + (min_lr - lr) * decayed / (double)decay;
}

double nd_positive_nan(double value)
{
    return isnan(value) ? (double)NAN : value;
}

/* The update is left out; the step counts. */
static nd_status skip(nd_trainer *t, nd_step_result *out)
{
    ND_TRY(nd_scales_forget(&t->model->scales));
    out->lr = nd_schedule_lr(t->rank->config, t->position.step + 1);
    out->skipped = true;
    t->position.skipped++;
    return ND_OK;
}

/* A batch of prompts alone, say: there is nothing to learn, which is no fault of the run. */
static nd_status without_labels(nd_trainer *t, nd_step_result *out)
{
    if (t->rank->rank == 0 && !t->told_without_labels) {
        t->told_without_labels = true;
        nd_log_warning("step %lld is skipped: none of its labels counts on any rank; metrics.jsonl "
                       "marks each such step",
                       (long long)t->position.step + 1);
    }
    return skip(t, out);
}

/* Loss and norm are equal on every rank, so all of them stop or skip alike. */
static nd_status refuse(nd_trainer *t, const char *what, const char *advice, nd_step_result *out)
{
    long long step = (long long)t->position.step + 1;
    if (t->rank->config->train.nonfinite != ND_NONFINITE_SKIP) {
        ND_TRY(nd_scales_forget(&t->model->scales));
        return nd_fail(ND_ERR_NUMERIC, "step %lld: %s; the weights are those of step %lld%s", step,
                       what, step - 1, advice);
    }
    if (t->rank->rank == 0) {
        nd_log_warning("step %lld is skipped: %s", step, what);
    }
    return skip(t, out);
}

/* The first tensor that is not finite. */

enum { NONFINITE_NAME = 160 };

/* True if x holds NaN or infinity. Waits for the device, which a normal step does not. */
static nd_status is_bad(nd_model *m, nd_tensor x, bool *bad)
{
    nd_rank *r = m->rank;
    float amax = 0.0f;
    if (nd_tensor_count(x) > 0) {
        ND_OP(r, ND_TRACE_OPTIMIZER, amax, .amax = m->work.head.row_max, .x = x,
              .granularity = ND_PER_TENSOR);
        ND_TRY(nd_copy(&r->stream, &amax, m->work.head.row_max, sizeof amax));
        ND_TRY(nd_stream_sync(&r->stream));
    }
    *bad = !isfinite(amax);
    return ND_OK;
}

/*
 * Numbers of tensors in the order of the computation, the same on every rank, since each has a part
 * of the whole model: the weights, as they lie in the layout; the inputs of the L blocks and of the
 * head; the gradients, from the last weight's to the first's.
 */
typedef struct numbering {
    int64_t inputs, gradients, count;
} numbering;

/* The parameter whose gradient has this number; and the other way round. */
static int64_t mirrored(const numbering *n, int64_t number)
{
    return n->count - 1 - number;
}

/* Looks at the weights, or at their gradients, with numbers below *first. */
static nd_status find_param(nd_model *m, const numbering *n, bool gradients, int64_t *first)
{
    const nd_layout *layout = m->layout;
    float *state = gradients ? m->fsdp.grad : m->fsdp.master;
    for (int i = 0; i < layout->param_count; i++) {
        const nd_flat_range range = nd_layout_shard_range(layout, &layout->params[i]);
        const int64_t number = gradients ? mirrored(n, i) : i,
                      count = number < *first ? range.end - range.begin : 0;
        bool bad = false;
        ND_TRY(is_bad(m, nd_tensor_1d(state + range.begin, ND_DTYPE_F32, count), &bad));
        *first = bad ? number : *first;
    }
    return ND_OK;
}

static nd_status find_input(nd_model *m, const numbering *n, int64_t *first)
{
    const nd_layer_range layers = m->stage->layers;
    bool bad = false;
    for (int64_t l = layers.begin; l < layers.end + m->stage->has_head && !bad; l++) {
        for (int s = 0; s < m->set_count && !bad; s++) {
            const nd_activation_set *set = &m->sets[s];
            ND_TRY(is_bad(m, l < layers.end ? nd_set_block(set, l)->x_in : set->head.x, &bad));
        }
        *first = bad ? n->inputs + l : *first;
    }
    return ND_OK;
}

static void describe(const nd_layout *layout, const numbering *n, int64_t number,
                     char name[NONFINITE_NAME])
{
    name[0] = '\0';
    if (number < n->inputs) {
        snprintf(name, NONFINITE_NAME, "the weight %s", layout->params[number].name);
    } else if (number < n->inputs + layout->layers) {
        snprintf(name, NONFINITE_NAME, "the input of layer %lld", (long long)(number - n->inputs));
    } else if (number < n->gradients) {
        snprintf(name, NONFINITE_NAME, "the input of the final norm");
    } else if (number < n->count) {
        snprintf(name, NONFINITE_NAME, "the gradient of %s",
                 layout->params[mirrored(n, number)].name);
    }
}

/*
 * Names the tensor of a step that first held NaN or infinity, for the sentence that stops or skips
 * the step. It searches in the order of the computation: weights, the input of each block (of the
 * last micro-batch), gradients from the last parameter to the first. Collective over all ranks;
 * each gets the same text: "the input of layer 3", "the gradient of <name>", or "" when every
 * tensor that it searches is finite on every rank.
 */
static nd_status find_nonfinite(nd_model *m, char name[NONFINITE_NAME])
{
    nd_rank *r = m->rank;
    const int64_t weights = m->layout->param_count, inputs = m->layout->layers + 1;
    const numbering n = {weights, weights + inputs, 2 * weights + inputs};
    int64_t first = n.count, *shared = &m->numbers->tokens;
    ND_TRY(find_param(m, &n, false, &first));
    ND_TRY(first == n.count ? find_input(m, &n, &first) : ND_OK);
    ND_TRY(first == n.count ? find_param(m, &n, true, &first) : ND_OK);
    first = -first; /* the smallest number of all ranks is the maximum of the negatives */
    ND_TRY(nd_copy(&r->stream, shared, &first, sizeof first));
    ND_TRY(nd_all_reduce(r, ND_GROUP_WORLD, shared, 1, ND_DTYPE_I64, ND_REDOP_MAX));
    ND_TRY(nd_copy(&r->stream, &first, shared, sizeof first));
    ND_TRY(nd_stream_sync(&r->stream));
    describe(m->layout, &n, -first, name);
    return ND_OK;
}

static nd_status not_finite(nd_trainer *t, nd_step_result *out)
{
    char where[NONFINITE_NAME], what[NONFINITE_NAME + 120];
    ND_TRY(find_nonfinite(t->model, where));
    snprintf(what, sizeof what,
             "the loss is %g and the gradient norm %g; the first tensor that is not finite is %s",
             nd_positive_nan(out->loss), nd_positive_nan(out->grad_norm),
             where[0] ? where : "none of weights, block inputs and gradients");
    return refuse(t, what,
                  t->rank->config->train.nonfinite == ND_NONFINITE_REWIND
                      ? "; try a lower optimizer.lr, more warmup_steps, optimizer.max_grad_norm, "
                        "or train.nonfinite: skip"
                      : "; try a lower optimizer.lr, more warmup_steps, optimizer.max_grad_norm, "
                        "or train.nonfinite: skip or rewind",
                  out);
}

enum { LEAST = 16 }; /* losses without which nothing is a spike: a run begins with large ones */

bool nd_spike_is(const nd_recent_losses *recent, double factor, double loss, double *median)
{
    double sorted[ND_RECENT_LOSSES];
    int count = recent->count < ND_RECENT_LOSSES ? (int)recent->count : ND_RECENT_LOSSES;
    if (factor <= 0 || count < LEAST) {
        return false;
    }
    for (int i = 0; i < count; i++) {
        int at = i;
        for (; at > 0 && sorted[at - 1] > recent->value[i]; at--) {
            sorted[at] = sorted[at - 1];
        }
        sorted[at] = recent->value[i];
    }
    *median = (sorted[(count - 1) / 2] + sorted[count / 2]) / 2;
    return loss > factor * *median;
}

void nd_spike_note(nd_recent_losses *recent, double factor, double loss)
{
    if (factor > 0) {
        recent->value[recent->count++ % ND_RECENT_LOSSES] = loss;
    }
}

/* A finite loss that is much larger than those before it. */
static nd_status spike(nd_trainer *t, double median, nd_step_result *out)
{
    const nd_config *config = t->rank->config;
    char what[160];
    snprintf(what, sizeof what,
             "the loss is %g, more than train.spike_factor %g times %g, the "
             "median before it",
             out->loss, config->train.spike_factor, median);
    return refuse(t, what,
                  config->train.nonfinite == ND_NONFINITE_STOP
                      ? "; try a lower optimizer.lr, more warmup_steps, or train.nonfinite: skip "
                        "or rewind"
                      : "",
                  out);
}

static nd_status step(nd_trainer *t, const nd_step_batch *batch, nd_step_result *out)
{
    nd_scales *scales = &t->model->scales;
    int64_t number = t->position.step + 1;
    double factor = t->rank->config->train.spike_factor, median = 0;
    *out = (nd_step_result){0};
    ND_TRY(nd_health_begin(scales, number));
    ND_TRY(nd_trainer_gradients(t, batch, out));
    ND_TRY(nd_health_end(scales, number));
    if (out->tokens == 0) {
        ND_TRY(without_labels(t, out));
    } else if (!isfinite(out->loss) || !isfinite(out->grad_norm)) {
        ND_TRY(not_finite(t, out));
    } else if (nd_spike_is(&t->position.recent, factor, out->loss, &median)) {
        ND_TRY(spike(t, median, out));
        nd_spike_note(&t->position.recent, factor, out->loss); /* it may be the new level */
    } else {
        nd_progress_set_phase(t->rank->progress, ND_PHASE_OPTIMIZER, number);
        ND_TRY(nd_scales_advance(scales));
        out->lr = nd_schedule_lr(t->rank->config, number);
        nd_range_push(t->rank->device, "optimizer");
        ND_TRY(nd_optimizer_step(&t->optimizer, &t->gate, number - t->position.skipped, out->lr,
                                 out->grad_norm));
        nd_range_pop(t->rank->device);
        nd_spike_note(&t->position.recent, factor, out->loss);
    }
    t->position.step = number;
    t->position.tokens_seen += out->tokens;
    return ND_OK;
}

nd_status nd_trainer_step(nd_trainer *t, const nd_step_batch *batch, nd_step_result *out)
{
    return nd_budget_explain(t, step(t, batch, out));
}

nd_status nd_trainer_evaluate(nd_trainer *t, nd_loader *loader, int64_t batches,
                              const nd_stop_check *check, double *loss, int64_t *tokens)
{
    nd_rank *r = t->rank;
    nd_model *m = t->model;
    int64_t counted = 0;
    nd_progress_set_phase(r->progress, ND_PHASE_EVAL, t->position.step);
    ND_TRY(nd_zero(&r->stream, &m->numbers->loss_sum, sizeof m->numbers->loss_sum));
    nd_loader_rewind(loader, NULL);
    *tokens = 0;
    for (int64_t i = 0; i < batches; i++) {
        nd_step_batch batch;
        bool stop = false;
        ND_TRY(check->ask(check->context, &stop));
        if (stop) {
            return ND_OK;
        }
        ND_TRY(nd_loader_next(loader, &batch));
        counted += batch.valid;
        nd_activation_set *set = nd_model_take_set(m);
        batch.sources = NULL; /* those of a validation may be more than the training's */
        ND_TRY(nd_model_load(m, set, &batch, 0));
        ND_TRY(nd_model_forward(m, set, ND_PASS_EVAL));
        ND_TRY(nd_model_give_back(m, set));
    }
    ND_TRY(send_tokens(t, counted));
    ND_TRY(sum_losses(t, &m->numbers->loss_sum, 1));
    ND_TRY(read_numbers(t));
    *tokens = t->received->tokens;
    *loss = *tokens > 0 ? t->received->loss_sum / (double)*tokens : (double)NAN;
    return ND_OK;
}

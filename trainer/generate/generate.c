// SPDX-License-Identifier: Apache-2.0
#include "trainer/generate/generate.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/base/math.h"

/* F64, since the question is whether integers would overflow. */
static double planned_bytes(const nd_rank *rank, const nd_generate_options *o)
{
    const nd_shape *s = &rank->shape;
    const double tp = rank->mesh.size[ND_AXIS_TP];
    const double kv_heads = tp * (double)nd_shape_local_kv_heads(s, (int64_t)tp);
    const double D = (double)s->head_dim, C = (double)s->hidden, F = (double)s->ffn;
    const double heads = (double)s->heads + kv_heads;
    const double cache = (double)s->layers * (double)o->capacity * 2.0 * kv_heads * D / tp;
    const double row = 6.0 * C + (2.0 * heads * D + 4.0 * F) / tp;
    return 4.0 * ((double)o->batch * (cache + (double)s->vocab) + (double)o->rows * row);
}

static nd_status check_sizes(const nd_rank *rank, const nd_generate_options *o)
{
    const int64_t most = rank->ops->limits.tokens;
    const double bytes = planned_bytes(rank, o);
    ND_TRY(nd_trainer_check_shape(rank->ops, &rank->shape));
    if (most > 0 && o->rows > most) {
        return nd_fail(ND_ERR_CONFIG,
                       "a call of the model has up to %lld tokens (--prefill-chunk, --max-batch), "
                       "but the backend \"%s\" supports at most %lld; use smaller ones",
                       (long long)o->rows, rank->ops->name, (long long)most);
    }
    if (bytes > ND_PLAN_BYTES_MAX) {
        return nd_fail(ND_ERR_RESOURCE,
                       "%lld texts at once of up to %lld tokens need %.3g GiB for keys, values and "
                       "logits, but no host can address more than %.3g; use a smaller --max-batch, "
                       "or shorter texts",
                       (long long)o->batch, (long long)o->capacity, bytes * 0x1p-30,
                       ND_PLAN_BYTES_MAX * 0x1p-30);
    }
    return ND_OK;
}

nd_status nd_generate_check_job(const nd_config *config, const nd_shape *shape, const nd_mesh *mesh)
{
    if (config->train.precision == ND_PRECISION_FP8 && config->fp8.recipe == ND_FP8_DELAYED) {
        return nd_fail(ND_ERR_CONFIG, "fp8.recipe is delayed, whose scales follow from training "
                                      "steps; use --fp8-recipe rowwise, or another precision");
    }
    if (mesh->size[ND_AXIS_CP] > 1 || mesh->size[ND_AXIS_DP_SHARD] > 1) {
        return nd_fail(ND_ERR_CONFIG,
                       "mesh.cp is %d and mesh.dp_shard is %d, but a model that generates is split "
                       "by tp only, and copied by dp_replicate; use --tp-size and "
                       "--dp-replicate-size",
                       mesh->size[ND_AXIS_CP], mesh->size[ND_AXIS_DP_SHARD]);
    }
    /* Any number of rows, which are rounded up, is a multiple of tp. */
    return nd_shape_check_mesh(shape, mesh, 1, mesh->size[ND_AXIS_TP]);
}

nd_status nd_generate_check(const nd_rank *rank, const nd_generate_options *o)
{
    const nd_shape *shape = &rank->shape;
    ND_TRY(nd_generate_check_job(rank->config, shape, &rank->mesh));
    if (o->capacity < 2) {
        return nd_fail(ND_ERR_DATA,
                       "a sequence has room for %lld tokens, but a prompt and a new token need 2; "
                       "use a larger --context, or a model whose max_position_embeddings is more "
                       "than %lld",
                       (long long)o->capacity, (long long)shape->max_positions);
    }
    if (o->capacity > shape->max_positions) {
        return nd_fail(ND_ERR_DATA,
                       "a prompt with its new tokens has up to %lld tokens, but the model's "
                       "max_position_embeddings is %lld; shorten the prompt or "
                       "--max-new-tokens",
                       (long long)o->capacity, (long long)shape->max_positions);
    }
    return check_sizes(rank, o);
}

static nd_status allocate(nd_generator *g)
{
    const int64_t batch = g->options.batch;
    void *logits = NULL;
    ND_TRY(ND_ALLOC(batch, &g->slots));
    ND_TRY(ND_ALLOC(batch, &g->segments));
    ND_TRY(ND_ALLOC(batch, &g->rows));
    ND_TRY(ND_ALLOC(g->cache.tokens, &g->ids));
    ND_TRY(ND_ALLOC(g->cache.tokens, &g->positions));
    ND_TRY(ND_ALLOC(g->options.capacity, &g->scored));
    ND_TRY(nd_host_alloc(g->rank->device,
                         (size_t)(batch * g->rank->shape.vocab) * sizeof *g->logits, &logits));
    g->logits = logits;
    return ND_ALLOC(g->rank->shape.vocab, &g->candidates);
}

/*
 * Rows of a call at most: all tp ranks have as many. In FP8 also as many as the products of any
 * backend take (nd_ops.fp8_rows), on every backend: what is computed for some rows follows from
 * this number (nd_kv_round_rows), and tensorwise scales follow from all rows of a call.
 */
static int64_t most_rows(const nd_rank *rank, int64_t rows)
{
    enum { FP8_ROWS = 16 };
    const int64_t tp = rank->mesh.size[ND_AXIS_TP];
    int64_t unit = tp;
    while (rank->config->train.precision == ND_PRECISION_FP8 && unit % FP8_ROWS != 0) {
        unit += tp;
    }
    return nd_round_up(rows, unit);
}

nd_status nd_generator_create(nd_rank *rank, const nd_generate_options *o, nd_generator **out)
{
    nd_generator *g = NULL;
    nd_status status = ND_OK;
    ND_ASSERT(o->batch >= 1 && o->rows >= o->batch);
    ND_TRY(nd_generate_check(rank, o));
    ND_TRY(ND_ALLOC(1, &g));
    g->rank = rank;
    g->options = *o;
    g->cache = (nd_kv_options){.tokens = most_rows(rank, o->rows),
                               .slots = o->batch,
                               .capacity = o->capacity,
                               .logits = o->batch};
    nd_memplan_init(&g->plan);
    const nd_model_options options = {.forward_only = true, .cache = &g->cache};
    ND_TRY_OUT(nd_model_create(rank, &options, &g->plan, &g->model));
    ND_TRY_OUT(nd_model_plan_weights(g->model, false, &g->plan));
    nd_budget_plan(rank, NULL, &g->plan);
    *out = g;
out:
    if (status != ND_OK) {
        nd_generator_destroy(g);
    }
    return status;
}

nd_status nd_generator_commit(nd_generator *g)
{
    ND_TRY(allocate(g)); /* not before: the plan may be more than the caller has */
    ND_TRY(nd_budget_commit(g->rank, NULL, &g->plan));
    return nd_model_start(g->model);
}

void nd_generator_destroy(nd_generator *g)
{
    if (g) {
        nd_model_destroy(g->model);
        nd_memplan_fini(&g->plan);
        free(g->candidates);
        free(g->slots);
        free(g->segments);
        free(g->rows);
        free(g->ids);
        free(g->positions);
        nd_host_free(g->rank->device, g->logits);
        free(g->scored);
        free(g);
    }
}

/* Calls of the model. */

/* A call that is being put together. */
typedef struct call {
    int64_t segments, rows, wanted;
    bool prefill; /* some segment has several rows */
} call;

static void begin_call(nd_generator *g, call *c)
{
    const size_t bytes = (size_t)g->cache.tokens * sizeof *g->ids;
    *c = (call){0};
    memset(g->ids, 0, bytes); /* rows of no sequence are of token 0 at position 0 */
    memset(g->positions, 0, bytes);
}

/* The next tokens of a slot. */
static void add_segment(nd_generator *g, call *c, nd_kv_segment segment, const int32_t *tokens)
{
    for (int64_t i = 0; i < segment.rows; i++) {
        g->ids[c->rows + i] = tokens[i];
        g->positions[c->rows + i] = (int32_t)(segment.length + i);
    }
    g->segments[c->segments++] = segment;
    c->rows += segment.rows;
    c->prefill |= segment.rows > 1;
}

static nd_status compute(nd_generator *g, const call *c)
{
    nd_model *m = g->model;
    const double begin = nd_clock_seconds();
    const nd_logits_call logits = {
        .kv = {g->segments, c->segments}, .rows = g->rows, .count = c->wanted, .logits = g->logits};
    nd_activation_set *set = nd_model_take_set(m);
    ND_TRY(nd_model_load_batch(m, set, g->ids, g->ids, g->positions));
    ND_TRY(nd_model_logits(m, set, &logits));
    ND_TRY(nd_model_give_back(m, set));
    double seconds = nd_clock_seconds() - begin;
    g->counts.calls++;
    *(c->prefill ? &g->counts.prompt_seconds : &g->counts.decode_seconds) += seconds;
    return ND_OK;
}

/* Sequences. */

typedef struct run {
    nd_generator *g;
    nd_sequence *sequences;
    int64_t count, begun, ended;
    const nd_generate_rules *rules;
} run;

static void fill_slots(run *r)
{
    for (int64_t i = 0; i < r->g->options.batch && r->begun < r->count; i++) {
        nd_generator_slot *s = &r->g->slots[i];
        if (s->sequence < 0) {
            nd_sequence *q = &r->sequences[r->begun];
            ND_ASSERT(q->prompt_count >= 1 && q->max_new >= 1 &&
                      q->prompt_count + q->max_new <= r->g->options.capacity);
            q->count = 0;
            q->finish = ND_FINISH_NONE;
            *s = (nd_generator_slot){.sequence = r->begun++};
        }
    }
}

/* Adds the segments of slots whose pending tokens are one (or, with `several`, more) while there is
 * room. Single ones come first: each call continues every sequence that is past its prompt. */
static void add_slots(run *r, call *c, bool several)
{
    nd_generator *g = r->g;
    for (int64_t i = 0; i < g->options.batch && c->rows < g->options.rows; i++) {
        const nd_generator_slot *s = &g->slots[i];
        if (s->sequence < 0) {
            continue;
        }
        /* To be computed: the rest of its prompt, or its last new token. */
        const nd_sequence *q = &r->sequences[s->sequence];
        const bool prompt = s->length < q->prompt_count;
        const int64_t all = prompt ? q->prompt_count - s->length : 1;
        if ((all > 1) != several) {
            continue;
        }
        const int32_t *tokens = prompt ? q->prompt + s->length : &s->next;
        const int64_t rows = nd_min(all, g->options.rows - c->rows);
        add_segment(g, c, (nd_kv_segment){.slot = i, .length = s->length, .rows = rows}, tokens);
        if (rows == all) {
            g->rows[c->wanted++] = c->rows - 1;
        }
    }
}

/* A new token of the sequence in a slot, which it may end. */
static nd_status take_token(run *r, nd_generator_slot *s, int32_t id)
{
    const nd_generate_rules *rules = r->rules;
    nd_sequence *q = &r->sequences[s->sequence];
    bool stop = false;
    q->ids[q->count++] = id;
    s->next = id;
    r->g->counts.new_tokens++;
    if (rules->token) {
        ND_TRY(rules->token(rules->context, s->sequence, id, &stop));
    }
    q->finish = rules->ends && nd_ids_hold(rules->ends, id) ? ND_FINISH_EOS
                : stop                                      ? ND_FINISH_STOP
                : q->count == q->max_new                    ? ND_FINISH_LENGTH
                                                            : ND_FINISH_NONE;
    if (q->finish == ND_FINISH_NONE) {
        return ND_OK;
    }
    int64_t sequence = s->sequence;
    s->sequence = -1;
    r->ended++;
    return rules->end ? rules->end(rules->context, sequence) : ND_OK;
}

/* Draws the tokens that a call gave, in the order of its segments. */
static nd_status take_tokens(run *r, const call *c)
{
    nd_generator *g = r->g;
    const int64_t vocab = g->rank->shape.vocab;
    int64_t wanted = 0, row = 0;
    for (int64_t i = 0; i < c->segments; i++) {
        const nd_kv_segment *segment = &g->segments[i];
        nd_generator_slot *s = &g->slots[segment->slot];
        const nd_sequence *q = &r->sequences[s->sequence];
        int32_t id = 0;
        g->counts.prompt_tokens += s->length < q->prompt_count ? segment->rows : 0;
        s->length += segment->rows;
        row += segment->rows;
        if (wanted == c->wanted || g->rows[wanted] != row - 1) {
            continue;
        }
        const float *logits = g->logits + wanted++ * vocab;
        g->counts.decode_tokens += !c->prefill;
        ND_TRY(nd_sample(&r->rules->sampling, logits, vocab,
                         (nd_draw){q->request, (uint64_t)q->count}, g->candidates, &id));
        ND_TRY(take_token(r, s, id));
    }
    return ND_OK;
}

static nd_status ask(const run *r)
{
    const nd_stop_check *check = r->rules->check;
    bool stop = false;
    ND_TRY(check ? check->ask(check->context, &stop) : ND_OK);
    return stop ? nd_fail(ND_ERR_PREEMPTED, "stopped by a signal; %lld of %lld texts are complete",
                          (long long)r->ended, (long long)r->count)
                : ND_OK;
}

nd_status nd_generator_run(nd_generator *g, nd_sequence *sequences, int64_t count,
                           const nd_generate_rules *rules)
{
    run r = {.g = g, .sequences = sequences, .count = count, .rules = rules};
    g->scored_count = 0; /* slot 0 is used */
    for (int64_t i = 0; i < g->options.batch; i++) {
        g->slots[i] = (nd_generator_slot){.sequence = -1};
    }
    while (r.ended < count) {
        call c;
        ND_TRY(ask(&r));
        fill_slots(&r);
        begin_call(g, &c);
        add_slots(&r, &c, false);
        add_slots(&r, &c, true);
        ND_TRY(compute(g, &c));
        ND_TRY(take_tokens(&r, &c));
    }
    return ND_OK;
}

/* Scores. */

/* Computes ids [begin, begin + rows) in slot 0. */
static nd_status score_piece(nd_generator *g, const int32_t *ids, int64_t begin, int64_t rows,
                             bool wanted)
{
    call c;
    begin_call(g, &c);
    add_segment(g, &c, (nd_kv_segment){.slot = 0, .length = begin, .rows = rows}, ids + begin);
    for (int64_t i = 0; wanted && i < rows; i++) {
        g->rows[c.wanted++] = i;
    }
    g->counts.prompt_tokens += rows;
    return compute(g, &c);
}

nd_status nd_generator_score(nd_generator *g, const int32_t *ids, int64_t count, int64_t from,
                             nd_token_score *scores)
{
    const int64_t vocab = g->rank->shape.vocab, batch = g->options.batch;
    int64_t at = 0, rows;
    ND_ASSERT(from >= 1 && from <= count && count <= g->options.capacity + 1);
    while (at < from - 1 && at < g->scored_count && g->scored[at] == ids[at]) {
        at++;
    }
    g->scored_count = 0; /* until the pieces are computed */
    for (; at < from - 1; at += rows) {
        rows = nd_min(from - 1 - at, g->options.rows);
        ND_TRY(score_piece(g, ids, at, rows, false));
    }
    for (; at < count - 1; at += rows) { /* the row of a token has the logits of the next one */
        rows = nd_min(nd_min(count - 1 - at, g->options.rows), batch);
        ND_TRY(score_piece(g, ids, at, rows, true));
        for (int64_t i = 0; i < rows; i++) {
            ND_TRY(nd_score_token(g->logits + i * vocab, vocab, ids[at + i + 1],
                                  &scores[at + i + 1 - from]));
        }
    }
    memcpy(g->scored, ids, (size_t)at * sizeof *ids);
    g->scored_count = at;
    return ND_OK;
}

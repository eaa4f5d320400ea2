// SPDX-License-Identifier: Apache-2.0
/*
 * Texts do not depend on how they are computed: batch, rows of a call and tp give the tokens of the
 * plain loop, which computes the whole sequence again for each token.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "runtime/base/math.h"
#include "tests/unit/trainer/mesh_ranks.h"
#include "trainer/generate/generate.h"

enum { V = 97, CAPACITY = 40, SEQUENCES = 7, NEW = 12, PROMPT_MAX = 19, RANKS_MAX = 4 };

static int64_t prompt_size(int sequence)
{
    return 1 + (sequence * 5) % PROMPT_MAX;
}

static int32_t prompt_id(int sequence, int64_t i)
{
    return (int32_t)((sequence * 29 + i * 11 + 3) % V);
}

typedef struct texts {
    int32_t ids[SEQUENCES][NEW];
    int64_t count[SEQUENCES];
    int64_t finish[SEQUENCES]; /* nd_finish; no padding, so that texts can be compared by memcmp */
} texts;

/* A test's request to the generator, and the texts of each rank. */
typedef struct task {
    nd_generate_options options;
    nd_generate_rules rules;
    bool plain; /* the plain loop instead */
    texts out[RANKS_MAX];
    nd_generate_counts counts;
} task;

/* One sequence without using what the cache holds: scores of all ids are computed anew. */
static nd_status plain_loop(nd_rank *rank, const nd_generate_rules *rules, texts *out)
{
    static const nd_kv_options kv = {
        .tokens = CAPACITY, .slots = 1, .capacity = CAPACITY, .logits = 1};
    const nd_model_options options = {.forward_only = true, .cache = &kv};
    nd_model *m = NULL;
    nd_candidate candidates[V];
    ND_TRY(mesh_model_open(rank, &options, 5, &m));
    for (int q = 0; q < SEQUENCES; q++) {
        int32_t ids[CAPACITY] = {0}, positions[CAPACITY] = {0};
        int64_t count = prompt_size(q);
        float logits[V];
        for (int64_t i = 0; i < CAPACITY; i++) {
            ids[i] = i < count ? prompt_id(q, i) : 0;
            positions[i] = (int32_t)i;
        }
        for (int64_t n = 0; n < NEW; n++, count++) {
            const nd_kv_segment all = {.slot = 0, .length = 0, .rows = count};
            const int64_t last = count - 1;
            nd_activation_set *set = nd_model_take_set(m);
            ND_TRY(nd_model_load_batch(m, set, ids, ids, positions));
            ND_TRY(nd_model_logits(
                m, set,
                &(nd_logits_call){.kv = {&all, 1}, .rows = &last, .count = 1, .logits = logits}));
            ND_TRY(nd_model_give_back(m, set));
            ND_TRY(nd_sample(&rules->sampling, logits, V, (nd_draw){(uint64_t)q, (uint64_t)n},
                             candidates, &ids[count]));
            out->ids[q][n] = ids[count];
            out->count[q] = n + 1;
        }
        out->finish[q] = ND_FINISH_LENGTH;
    }
    return ND_OK;
}

static nd_status run_generator(nd_rank *rank, task *t, texts *out)
{
    int32_t prompts[SEQUENCES][PROMPT_MAX];
    nd_sequence sequences[SEQUENCES];
    nd_generator *g = NULL;
    for (int q = 0; q < SEQUENCES; q++) {
        for (int64_t i = 0; i < prompt_size(q); i++) {
            prompts[q][i] = prompt_id(q, i);
        }
        sequences[q] = (nd_sequence){.prompt = prompts[q],
                                     .prompt_count = prompt_size(q),
                                     .max_new = NEW,
                                     .request = (uint64_t)q,
                                     .ids = out->ids[q]};
    }
    ND_TRY(mesh_generator_open(rank, &t->options, 5, &g));
    nd_status status = nd_generator_run(g, sequences, SEQUENCES, &t->rules);
    for (int q = 0; q < SEQUENCES; q++) {
        out->count[q] = sequences[q].count;
        out->finish[q] = sequences[q].finish;
    }
    if (rank->rank == 0) {
        t->counts = g->counts;
    }
    return status;
}

static nd_status body(nd_rank *rank, void *context)
{
    task *t = context;
    texts *out = &t->out[rank->rank];
    return t->plain ? plain_loop(rank, &t->rules, out) : run_generator(rank, t, out);
}

static nd_status run_on(int tp, task *t)
{
    mesh_ranks job = mesh_ranks_of((nd_mesh){{1, 1, 1, 1, tp}}, 3, false, body, t);
    job.shape.rms_eps = 1e-5;
    job.shape.kv_heads = 2; /* with tp 4 two ranks have copies of each */
    return mesh_ranks_run(&job);
}

static void assert_run(int tp, task *t)
{
    cr_assert_eq(run_on(tp, t), ND_OK, "tp %d, batch %lld, rows %lld: %s", tp,
                 (long long)t->options.batch, (long long)t->options.rows, nd_error_last()->message);
}

static void assert_same_texts(const nd_sampling *sampling)
{
    static const nd_generate_options options[] = {
        {.batch = 1, .rows = 1, .capacity = CAPACITY},
        {.batch = 1, .rows = 8, .capacity = CAPACITY},
        {.batch = 3, .rows = 5, .capacity = CAPACITY},
        {.batch = SEQUENCES, .rows = 64, .capacity = CAPACITY},
        {.batch = 32, .rows = 32, .capacity = CAPACITY},
    };
    static task plain, t;
    plain = (task){.plain = true, .rules = {.sampling = *sampling}};
    assert_run(1, &plain);
    for (int tp = 1; tp <= RANKS_MAX; tp *= 2) {
        for (size_t o = 0; o < sizeof options / sizeof *options; o++) {
            t = (task){.options = options[o], .rules = {.sampling = *sampling}};
            assert_run(tp, &t);
            for (int r = 0; r < tp; r++) {
                cr_expect_eq(memcmp(&t.out[r], &plain.out[0], sizeof(texts)), 0,
                             "tp %d, options %zu: rank %d has other tokens", tp, o, r);
            }
            cr_expect_eq(t.counts.new_tokens, SEQUENCES * NEW);
            cr_expect_eq(t.counts.prompt_tokens, 55);
            if (o == 0) { /* every call has one row */
                cr_expect_eq(t.counts.decode_tokens, SEQUENCES * NEW);
                cr_expect(t.counts.prompt_seconds == 0 && t.counts.decode_seconds > 0);
            }
            if (o == 3) { /* all prompts are one call */
                cr_expect_eq(t.counts.decode_tokens, SEQUENCES * (NEW - 1));
                cr_expect_eq(t.counts.calls, NEW, "%lld calls", (long long)t.counts.calls);
            }
        }
    }
}

Test(generate, greedy_texts_are_those_of_the_plain_loop)
{
    assert_same_texts(&(nd_sampling){.top_p = 1});
}

Test(generate, drawn_texts_are_those_of_the_plain_loop)
{
    assert_same_texts(&(nd_sampling){.temperature = 4, .top_p = 0.95, .seed = 11});
}

/* Rows of a call are shared by all tp ranks, and FP8 products take 16 of them: 48 by three. */
Test(generate, three_tp_ranks_generate_alike_in_fp8)
{
    static task t;
    t = (task){.options = {.batch = 3, .rows = 5, .capacity = CAPACITY},
               .rules = {.sampling = {.top_p = 1}}};
    mesh_ranks job = mesh_ranks_of((nd_mesh){{1, 1, 1, 1, 3}}, 2, false, body, &t);
    job.shape.hidden = 48;
    job.shape.ffn = 96;
    job.shape.heads = job.shape.kv_heads = 3;
    job.shape.rms_eps = 1e-5;
    job.config.train.precision = ND_PRECISION_FP8;
    job.config.fp8.recipe = ND_FP8_ROWWISE;
    cr_assert_eq(mesh_ranks_run(&job), ND_OK, "%s", nd_error_last()->message);
    for (int r = 1; r < 3; r++) {
        cr_expect_eq(memcmp(&t.out[r], &t.out[0], sizeof(texts)), 0, "rank %d", r);
    }
    cr_expect_eq(t.counts.new_tokens, SEQUENCES * NEW);
}

/* Ends: a token of text 0, in the middle or where the text is complete anyway, ends every text that
 * has it. */
Test(generate, an_end_token_ends_a_text_and_is_its_last)
{
    static const int64_t places[] = {2, NEW - 1};
    static task whole, t;
    whole = (task){.options = {.batch = 2, .rows = 16, .capacity = CAPACITY},
                   .rules = {.sampling = {.temperature = 4, .top_p = 1, .seed = 3}}};
    assert_run(1, &whole);
    for (int q = 0; q < 2 * SEQUENCES; q++) {
        const int text = q % SEQUENCES;
        const int32_t *ids = whole.out[0].ids[text];
        int32_t end = whole.out[0].ids[0][places[q / SEQUENCES]];
        int64_t n = 0;
        if (text == 0) {
            t = whole;
            t.rules.ends = &(nd_ids){.data = &end, .count = 1};
            assert_run(1, &t);
        }
        while (n < NEW && ids[n] != end) {
            n++;
        }
        cr_expect_eq(t.out[0].count[text], nd_min(n + 1, NEW), "text %d", q);
        cr_expect_eq(t.out[0].finish[text], n < NEW ? ND_FINISH_EOS : ND_FINISH_LENGTH, "text %d",
                     q);
        cr_expect_eq(memcmp(t.out[0].ids[text], ids, (size_t)t.out[0].count[text] * sizeof *ids), 0,
                     "text %d", q);
    }
}

enum { SHORTEST = NEW - SEQUENCES + 1 }; /* the longest text is stopped where it is complete */

typedef struct visits {
    int64_t tokens[SEQUENCES], ends[SEQUENCES];
    int64_t asked;
} visits;

static nd_status visit_token(void *context, int64_t sequence, int32_t id, bool *stop)
{
    visits *v = context;
    *stop = ++v->tokens[sequence] == sequence + SHORTEST;
    return ND_OK;
}

static nd_status visit_end(void *context, int64_t sequence)
{
    visits *v = context;
    v->ends[sequence]++;
    return ND_OK;
}

Test(generate, a_visitor_sees_each_token_and_may_end_a_text)
{
    static task t;
    visits v = {0};
    t = (task){.options = {.batch = 3, .rows = 16, .capacity = CAPACITY},
               .rules = {.sampling = {.temperature = 4, .top_p = 1, .seed = 3},
                         .token = visit_token,
                         .end = visit_end,
                         .context = &v}};
    assert_run(1, &t);
    for (int q = 0; q < SEQUENCES; q++) {
        cr_expect_eq(t.out[0].count[q], q + SHORTEST);
        cr_expect_eq(t.out[0].finish[q], ND_FINISH_STOP);
        cr_expect_eq(v.tokens[q], q + SHORTEST);
        cr_expect_eq(v.ends[q], 1);
    }
    /* An end token is that also where the visitor stops. */
    t.rules.ends = &(nd_ids){.data = &(int32_t){t.out[0].ids[0][SHORTEST - 1]}, .count = 1};
    v = (visits){0};
    assert_run(1, &t);
    cr_expect(t.out[0].finish[0] == ND_FINISH_EOS && v.tokens[0] == SHORTEST);
}

static nd_status stop_at_fifth(void *context, bool *stop)
{
    visits *v = context;
    *stop = ++v->asked == 5;
    return ND_OK;
}

Test(generate, a_signal_stops_between_two_calls)
{
    static task t;
    visits v = {0};
    const nd_stop_check check = {stop_at_fifth, &v};
    t = (task){.options = {.batch = 1, .rows = 64, .capacity = CAPACITY},
               .rules = {.sampling = {.top_p = 1}, .check = &check}};
    cr_expect_eq(run_on(1, &t), ND_ERR_PREEMPTED);
    cr_expect_eq(t.counts.calls, 4);
    cr_expect_eq(t.out[0].count[0], 4);
    cr_expect_eq(t.out[0].finish[0], ND_FINISH_NONE);
}

static void assert_scores(int tp, nd_precision precision, nd_status (*scores)(nd_rank *, void *))
{
    mesh_ranks job = mesh_ranks_of((nd_mesh){{1, 1, 1, 1, tp}}, 3, false, scores, NULL);
    job.shape.rms_eps = 1e-5;
    job.config.train.precision = precision;
    cr_assert_eq(mesh_ranks_run(&job), ND_OK, "%s", nd_error_last()->message);
}

/* Scores in pieces, and with a beginning that the text before had too. */
static nd_status score_body(nd_rank *rank, void *context)
{
    enum { COUNT = 30 }; /* the last one is not in the cache */
    static const nd_generate_options small = {.batch = 2, .rows = 3, .capacity = COUNT - 1};
    static const nd_generate_options large = {.batch = 32, .rows = 64, .capacity = CAPACITY};
    int32_t ids[COUNT];
    nd_token_score one[COUNT], other[COUNT];
    nd_generator *g = NULL;
    for (int i = 0; i < COUNT; i++) {
        ids[i] = prompt_id(4, i);
    }
    ND_TRY(mesh_generator_open(rank, &large, 5, &g));
    ND_TRY(nd_generator_score(g, ids, COUNT, 1, one));
    ND_TRY(mesh_generator_open(rank, &small, 5, &g));
    for (int64_t from = 1; from <= COUNT; from += 7) {
        ND_TRY(nd_generator_score(g, ids, COUNT, from, other));
        for (int64_t i = from; i < COUNT; i++) {
            ND_CHECK(one[i - 1].log_probability == other[i - from].log_probability &&
                         one[i - 1].greedy == other[i - from].greedy,
                     "from %lld: token %lld has another score", (long long)from, (long long)i);
        }
    }
    int64_t before = g->counts.prompt_tokens;
    ids[COUNT - 1]++; /* only the last one differs, and no row follows on it */
    ND_TRY(nd_generator_score(g, ids, COUNT, COUNT - 1, other));
    int64_t computed = g->counts.prompt_tokens - before;
    ND_CHECK(computed == 1, "%lld tokens were computed again", (long long)computed);
    return ND_OK;
}

/* These may lie between two scores of one text. */

enum { COUNT = 20, SHORT = 8 };

/* A text that is generated takes the place of what the first score computed. */
static nd_status generate_between(nd_generator *g, const int32_t *text, const int32_t *other)
{
    const nd_generate_rules greedy = {.sampling = {.top_p = 1}};
    int32_t new[NEW];
    nd_sequence sequence = {.prompt = other, .prompt_count = COUNT, .max_new = NEW, .ids = new};
    return nd_generator_run(g, &sequence, 1, &greedy);
}

/* The token behind a shorter text that was scored last is not taken for one of the cache. */
static nd_status score_between(nd_generator *g, const int32_t *text, const int32_t *other)
{
    nd_token_score ignored[COUNT];
    ND_TRY(nd_generator_score(g, other, COUNT, 1, ignored));
    return nd_generator_score(g, text, SHORT, 1, ignored);
}

static nd_status score_twice(nd_rank *rank, void *context)
{
    static const nd_generate_options options = {.batch = 2, .rows = COUNT, .capacity = CAPACITY};
    static nd_status (*const between[])(nd_generator *, const int32_t *,
                                        const int32_t *) = {generate_between, score_between};
    int32_t text[COUNT], other[COUNT];
    nd_token_score before, after;
    nd_generator *g = NULL;
    for (int i = 0; i < COUNT; i++) {
        other[i] = prompt_id(4, i);
        text[i] = i < SHORT - 1 ? prompt_id(5, i) : other[i];
    }
    ND_TRY(mesh_generator_open(rank, &options, 5, &g));
    for (int i = 0; i < (rank->config->train.precision == ND_PRECISION_FP8 ? 1 : 2); i++) {
        ND_TRY(nd_generator_score(g, text, COUNT, COUNT - 1, &before));
        ND_TRY(between[i](g, text, other));
        ND_TRY(nd_generator_score(g, text, COUNT, COUNT - 1, &after));
        ND_CHECK(before.log_probability == after.log_probability,
                 "case %d: the score is %g, and then %g", i, before.log_probability,
                 after.log_probability);
    }
    return ND_OK;
}

/* In FP8 one scale is that of all rows of a call, also of those that belong to no text. Scores of
 * other pieces differ there. */
Test(generate, another_text_between_two_scores_changes_no_score)
{
    assert_scores(1, ND_PRECISION_FP32, score_twice);
    assert_scores(4, ND_PRECISION_FP8, score_twice);
}

Test(generate, scores_do_not_depend_on_the_pieces)
{
    assert_scores(1, ND_PRECISION_FP32, score_body);
}

static nd_status check_body(nd_rank *rank, void *context)
{
    return nd_generate_check(rank, context);
}

Test(generate, meshes_and_sizes_that_cannot_be_are_named)
{
    static const struct {
        nd_mesh mesh;
        int64_t capacity;
        nd_precision precision;
        nd_status status;
        const char *words;
        int64_t batch, rows; /* 0: 1 and 8 */
    } cases[] = {
        {{{1, 1, 2, 1, 1}}, 40, ND_PRECISION_FP32, ND_ERR_CONFIG, "mesh.dp_shard is 2"},
        {{{1, 1, 1, 2, 1}}, 40, ND_PRECISION_FP32, ND_ERR_CONFIG, "mesh.cp is 2"},
        {{{1, 1, 1, 1, 1}}, 65, ND_PRECISION_FP32, ND_ERR_DATA, "max_position_embeddings is 64"},
        {{{1, 1, 1, 1, 1}}, 64, ND_PRECISION_FP32, ND_OK, ""},
        {{{1, 1, 1, 1, 1}}, 1, ND_PRECISION_FP32, ND_ERR_DATA, "room for 1 tokens"},
        {{{1, 1, 1, 1, 1}}, 2, ND_PRECISION_FP32, ND_OK, ""},
        {{{1, 1, 1, 1, 3}}, 40, ND_PRECISION_FP32, ND_ERR_CONFIG, "tp"},
        {{{1, 1, 1, 1, 1}}, 40, ND_PRECISION_FP8, ND_ERR_CONFIG, "--fp8-recipe rowwise"},
        {{{1, 1, 1, 1, 1}}, 40, ND_PRECISION_FP32, ND_ERR_CONFIG, "--prefill-chunk", 1, 1ll << 31},
        {{{1, 1, 1, 1, 1}}, 40, ND_PRECISION_FP32, ND_OK, "", 1, INT32_MAX},
        /* 4 bytes for each of 3 x 40 x 2 x 4 x 16 keys and values, and of 97 logits */
        {{{1, 1, 1, 1, 1}}, 40, ND_PRECISION_FP32, ND_ERR_RESOURCE, "need 6.48e+10 GiB", 1ll << 50},
        {{{1, 1, 1, 1, 1}},
         40,
         ND_PRECISION_FP32,
         ND_ERR_RESOURCE,
         "use a smaller --max-batch",
         1ll << 50},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nd_generate_options options = {.batch = cases[i].batch ? cases[i].batch : 1,
                                       .rows = cases[i].rows ? cases[i].rows : 8,
                                       .capacity = cases[i].capacity};
        mesh_ranks job = mesh_ranks_of(cases[i].mesh, 3, false, check_body, &options);
        job.config.train.precision = cases[i].precision;
        job.config.fp8.recipe = ND_FP8_DELAYED;
        cr_expect_eq(mesh_ranks_run(&job), cases[i].status, "case %zu", i);
        cr_expect_not_null(strstr(nd_error_last()->message, cases[i].words), "case %zu: %s", i,
                           nd_error_last()->message);
    }
}

// SPDX-License-Identifier: Apache-2.0
/*
 * Packing keeps loss masks: the sum of the losses of rows in a row, cut into blocks anywhere, is
 * the sum over each row alone. A row sees the rows before it in its block, so attention is left out
 * (its output projection is zero): then a loss depends on an input and its label alone, and a
 * mask that moved, was lost at a border, or let the first token of a row count would show. Blocks
 * begin in prompts here, since the first token of a block is the label of none.
 */
#include <criterion/criterion.h>
#include <math.h>

#include "runtime/base/rng.h"
#include "tests/parity/mesh_data.h"
#include "trainer/corpus/token_file.h"
#include "trainer/step/step.h"

enum { ROWS = 12, VOCAB = 97, SEQUENCE = 32, TOKENS_MAX = 256 };

typedef struct rows {
    int32_t ids[TOKENS_MAX];
    int32_t begin[ROWS + 1], prompt[ROWS]; /* tokens */
} rows;

static tempdir dir;

TEMPDIR_SUITE(packed, tempdir_leave_empty, .timeout = 300);

static rows make_rows(void)
{
    rows r = {.begin = {0}};
    for (int i = 0; i < ROWS; i++) {
        int32_t prompt = 1 + (int32_t)(nd_rng_u64(3, 0, (uint64_t)i) % 5);
        int32_t border = (r.begin[i] + SEQUENCE) / (SEQUENCE + 1) * (SEQUENCE + 1) - r.begin[i];
        prompt = border < 9 && prompt <= border ? border + 1 : prompt;
        r.prompt[i] = prompt;
        r.begin[i + 1] = r.begin[i] + (prompt < 5 ? 9 : prompt + 4);
    }
    cr_assert_leq(r.begin[ROWS], TOKENS_MAX);
    for (int32_t t = 0; t < r.begin[ROWS]; t++) {
        r.ids[t] = (int32_t)(nd_rng_u64(4, 0, (uint64_t)t) % VOCAB);
    }
    return r;
}

/* Rows [first, last) as token files with their mask. */
static void write_rows(const rows *r, int first, int last, const char *prefix)
{
    nd_token_files out;
    assert_ok(nd_token_files_open(prefix, VOCAB, NULL, &out));
    for (int i = first; i < last; i++) {
        int32_t count = r->begin[i + 1] - r->begin[i], span[2] = {0, r->prompt[i]};
        const nd_corpus_piece piece = {.ids = {(int32_t *)r->ids + r->begin[i], (size_t)count, 0},
                                       .ends = {&count, 1, 0},
                                       .spans = {span, 2, 0}};
        assert_ok(nd_token_files_write(&out, &piece));
    }
    assert_ok(nd_token_files_commit(&out));
    nd_token_files_fini(&out);
}

static nd_status zero_span(void *context, const nd_span *span)
{
    float *master = context;
    for (int64_t i = 0; span->param->id == ND_PARAM_O && i < span->rows * span->cols; i++) {
        master[span->begin + i] = 0.0f;
    }
    return ND_OK;
}

static nd_status remove_attention(void *context, nd_trainer *t)
{
    const nd_layout *layout = t->model->layout;
    for (int u = 0; u < layout->unit_count; u++) {
        ND_TRY(nd_layout_each_span(layout, &layout->units[u], layout->shard_index, zero_span,
                                   t->model->fsdp.master));
    }
    nd_fsdp_weights_changed(&t->model->fsdp);
    return ND_OK;
}

static nd_status note_tokens(void *context, nd_trainer *t)
{
    if (t->rank->rank == 0) {
        *(int64_t *)context = t->position.tokens_seen;
    }
    return ND_OK;
}

/* Adds the losses of these rows, packed, and the number of labels that count. */
static void add_losses(const rows *r, int first, int last, const mesh_case *mesh, double *sum,
                       int64_t *labels)
{
    char prefix[128];
    int64_t tokens = 0, count = r->begin[last] - r->begin[first];
    snprintf(prefix, sizeof prefix, "%s/rows", dir.path);
    write_rows(r, first, last, prefix);
    mesh_job job = mesh_job_on_tokens(prefix, mesh_small_llama(VOCAB), ND_PRECISION_FP32);
    job.format = ND_DATA_MEGATRON;
    job.optimizer = ND_OPTIMIZER_SGD;
    job.sequence = SEQUENCE;
    job.global_batch = (count + SEQUENCE) / (SEQUENCE + 1); /* all blocks, in one step */
    job.steps = 1;
    job.start = remove_attention;
    job.end = note_tokens;
    job.context = &tokens;
    mesh_result result = mesh_trained(&job, mesh);
    *sum += result.loss[0] * (double)tokens;
    *labels += tokens;
}

Test(packed, losses_have_the_sum_of_those_of_the_rows_alone)
{
    static const mesh_case meshes[] = {{"one worker", 1, 1, 1, 1, 1},
                                       {"cp 2 x tp 2", 1, 1, 2, 2, 1}};
    const rows r = make_rows();
    double alone = 0.0;
    int64_t labels = 0, counted = 0, inside = 0;
    for (int i = 0; i < ROWS; i++) {
        add_losses(&r, i, i + 1, &meshes[0], &alone, &labels);
        counted += r.begin[i + 1] - r.begin[i] - r.prompt[i];
        inside += r.begin[i] % (SEQUENCE + 1) != 0;
    }
    cr_assert_eq(labels, counted, "%ld labels count, not %ld", (long)labels, (long)counted);
    cr_assert_geq(inside, ROWS - 2, "blocks cut rows");
    for (size_t m = 0; m < sizeof meshes / sizeof *meshes; m++) {
        double packed = 0.0;
        int64_t together = 0;
        add_losses(&r, 0, ROWS, &meshes[m], &packed, &together);
        cr_expect_eq(together, counted, "%s: %ld labels count, not %ld", meshes[m].name,
                     (long)together, (long)counted);
        cr_expect_lt(fabs(packed / alone - 1), 1e-5, "%s: %.9g packed, %.9g alone", meshes[m].name,
                     packed, alone);
    }
}

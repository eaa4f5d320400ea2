// SPDX-License-Identifier: Apache-2.0
/*
 * Bounds.
 *
 * A gradient in F32 is a sum over n tokens whose order depends on the mesh: a relative error of
 * about sqrt(n) x 6e-8 in the L2 norm, of which six times are allowed. A tensor whose gradient
 * nearly cancels has the error of its terms, so a share of the norm of all gradients is allowed
 * too. The worst tensor of 400 seeds is off by 4.0 times sqrt(n) x 6e-8. A norm behind a branch
 * divides what nearly cancelled by its size: there one worker runs again, from weights with another
 * last bit, and 2.5 times what that changes are added. The worst of 2,150 seeds needs 0.14 of them.
 *
 * In BF16 and FP8, ranks that only share out micro-batches compute each of them with the bits of
 * one worker, so that its gradients are those of F32 sums again. Where tp or cp cut a sum, other
 * values are rounded: both runs are off from F32 by roundings of the same kind, and so from each
 * other by about the sum of the two. What one worker is off by is measured, of each tensor and of
 * all of them, since one tensor of few numbers may be close by luck.
 */
#include "tests/drawn/drawn_check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/isa.h"
#include "runtime/base/rng.h"
#include "tests/parity/mesh_data.h"
#include "tests/support/ranks.h"
#include "trainer/checkpoint/saver.h"
#include "trainer/weights/weights.h"

typedef struct drawn_run {
    const drawn_case *c;
    tempdir dir;
    mesh_job job;
    mesh_case mesh, one;
    bool shares; /* ranks only share out micro-batches */
    char *checkpoint;
    char model[300];
    nd_saver *savers[DRAWN_RANKS_MAX];
    nd_save_report reports[DRAWN_RANKS_MAX];
} drawn_run;

/* Rows of prompts and completions of very different lengths; no block of the sequence is all
 * prompt. */
static const char *write_rows(tempdir *dir, const char *name, int64_t tokens, int64_t sequence)
{
    const uint64_t seed = (uint64_t)name[0], longest = (uint64_t)sequence / 2;
    static const char letters[] =
        "the quick brown fox jumps over the lazy dog, then sits down to rest";
    const size_t capacity = (size_t)tokens * 4 + 4096;
    char *text = malloc(capacity);
    size_t used = 0;
    int64_t bytes = 0;
    for (uint64_t row = 0; bytes < tokens + 400; row++) {
        const int prompt = (int)(nd_rng_u64(seed, 1, row) % (longest < 60 ? longest + 1 : 60));
        const int completion = (int)(1 + nd_rng_u64(seed, 2, row) % 30);
        used += (size_t)snprintf(text + used, capacity - used,
                                 "{\"prompt\": \"%.*s\", \"completion\": \"%.*s\"}\n", prompt,
                                 letters, completion, letters + row % 30);
        bytes += prompt + completion;
    }
    const char *path = tempdir_write(dir, name, text, used);
    free(text);
    return path;
}

static char *write_data(drawn_run *r, const char *name, int64_t blocks)
{
    const drawn_case *c = r->c;
    const int64_t tokens = blocks * (c->sequence + 1);
    return strdup(
        c->rows ? write_rows(&r->dir, name, tokens, c->sequence)
                : mesh_token_file(&r->dir, name, (int)tokens, c->vocab, name[0] == 'a' ? 0 : 61));
}

static int64_t has(nd_family_switch of, const drawn_case *c)
{
    return of.key ? c->biases : of.on;
}

static nd_shape shape_of(const drawn_case *c)
{
    const nd_family_row *family = &nd_families[c->family];
    nd_shape shape = {
        .family = (nd_family)c->family,
        .vocab = c->vocab,
        .hidden = c->hidden,
        .ffn = c->ffn * c->tp,
        .layers = c->layers,
        .heads = c->kv_heads * c->group * c->tp,
        .kv_heads = c->kv_heads * c->tp / c->copies,
        .head_dim = c->head_dim,
        .max_positions = c->sequence + 3,
        .rms_eps = 1e-5,
        .init_std = 0.08,
        .tied = c->tied,
        .rope = {.type = (nd_rope_type)c->rope,
                 .theta = 10000.0,
                 .factor = 4.0,
                 .low_freq_factor = 1.0,
                 .high_freq_factor = 4.0,
                 .original_max_positions = 32},
        .bos_id = -1,
        .eos_id = -1,
        .qkv_bias = has(family->qkv_bias, c),
        .o_bias = has(family->o_bias, c),
        .mlp_bias = has(family->mlp_bias, c),
        .qk_norm = family->qk_norm,
        .post_norm = family->post_norm,
        .window = c->window,
        .rotated = family->partial > 0 && family->partial < 1 ? nd_round_up(c->head_dim / 2, 2) : 0,
        .window_theta = c->window > 0 ? family->window_theta : 0,
        .embedding_scale = family->scaled || family->root_scale ? 3 : 0,
        .residual_scale = family->scaled ? 0.3 : 0,
        .attention_scale = family->scaled || family->query_scalar > 0 ? 0.25 : 0,
        .logits_divisor = family->scaled ? 3 : 0,
    };
    if (family->window == ND_WINDOW_LISTED || family->window == ND_WINDOW_SWITCHED) {
        nd_layer_set_add(&shape.full, 0);
    }
    if (family->unturned_period > 0 || (family->full_unturned && c->window > 0)) {
        nd_layer_set_add(&shape.unturned, 0);
    }
    return shape;
}

/* The bits of products of F32, and of all where oneDNN makes them, depend on threads and rows. */
static bool has_own_products(const drawn_case *c)
{
    nd_cpu_isa isa;
    bool own = false;
    return c->precision != ND_PRECISION_FP32 && nd_cpu_isa_choose(&isa) == ND_OK &&
           nd_cpu_products_choose(isa, &own) == ND_OK && own;
}

static void fill_job(drawn_run *r)
{
    const drawn_case *c = r->c;
    const int64_t batch = c->replicate * c->shard * c->micro_batch * c->accumulation;
    mesh_job *job = &r->job;
    *job = mesh_job_on_tokens(write_data(r, "a.data", batch * c->steps + 3), shape_of(c),
                              (nd_precision)c->precision);
    job->second_path = c->sources > 1 ? write_data(r, "b.data", batch * c->steps + 3) : NULL;
    job->format = c->rows ? ND_DATA_JSONL : ND_DATA_LLMC;
    job->tokenizer = c->rows ? "bytes" : "file";
    job->global_batch = batch;
    job->sequence = c->sequence;
    job->steps = c->steps;
    if (c->sgd) {
        job->optimizer = ND_OPTIMIZER_SGD;
        job->lr = 0.05;
        job->weight_decay = 0.0;
    }
    job->max_grad_norm = c->clips ? 0.5 : 0.0;
    job->recipe = (nd_fp8_recipe)c->recipe;
    job->all_gather = c->codes;
    job->amax_compute = c->largest ? ND_FP8_AMAX_MAX : ND_FP8_AMAX_MOST_RECENT;
    job->history_length = c->history;
    job->filter = drawn_filters[c->filter];
    job->validates = true;
    /* Statistics of a row are merged tile after tile: the bits of BF16 depend on tiles. */
    job->limits.head_columns = c->head_columns;
    job->limits.head_rows = has_own_products(c) ? 0 : c->head_rows;
}

static void fill_run(drawn_run *r)
{
    const drawn_case *c = r->c;
    fill_job(r);
    r->shares = c->cp == 1 && c->tp == 1;
    r->mesh = (mesh_case){"the mesh",
                          (int)c->replicate,
                          (int)c->shard,
                          (int)c->cp,
                          (int)c->tp,
                          c->micro_batch,
                          .zero2 = c->zero2,
                          .ring = c->ring,
                          .recompute = (nd_recompute)c->recompute,
                          .ulysses = (int)c->ulysses};
    /* A scale is that of a micro-batch, whose samples are then the same. */
    r->one = (mesh_case){"one worker", 1, 1, 1, 1, r->shares ? c->micro_batch : 1};
    if (c->precision == ND_PRECISION_FP8) {
        r->one.micro_batch = c->micro_batch;
        while (r->one.micro_batch * c->sequence % 16 != 0) {
            r->one.micro_batch = r->job.global_batch; /* a multiple of the mesh's */
        }
    }
}

/* saving and restoring */

/* Saves the model and loads it over other weights. */
static nd_status save_model(drawn_run *r, nd_trainer *t)
{
    nd_fsdp *fsdp = &t->model->fsdp;
    const size_t bytes = (size_t)fsdp->layout->shard_total * sizeof *fsdp->master;
    nd_hf_reader *reader = NULL;
    float *before = NULL;
    nd_status status = ND_OK;
    ND_TRY(nd_weights_save(fsdp, r->model, ND_DTYPE_F32, false, NULL, NULL));
    ND_TRY(nd_hf_reader_open(r->model, &reader));
    ND_TRY_OUT(nd_hf_reader_check(reader));
    ND_TRY_OUT(ND_ALLOC(fsdp->layout->shard_total, &before));
    memcpy(before, fsdp->master, bytes);
    for (int64_t i = 0; i < fsdp->layout->shard_total; i++) { /* padding stays 0 */
        fsdp->master[i] *= 2;
    }
    ND_TRY_OUT(nd_weights_load(fsdp, reader));
    for (int64_t i = 0; i < fsdp->layout->shard_total && status == ND_OK; i++) {
        if (memcmp(&before[i], &fsdp->master[i], sizeof *before) != 0) {
            status =
                nd_fail(ND_ERR_INTERNAL,
                        "element %lld of rank %d is %.9g after the model was saved and "
                        "loaded, and was %.9g",
                        (long long)i, t->rank->rank, (double)fsdp->master[i], (double)before[i]);
        }
    }
out:
    free(before);
    nd_hf_reader_close(reader);
    return status;
}

static nd_status open_saver(void *context, nd_trainer *t)
{
    drawn_run *r = context;
    const nd_saver_options options = {
        .trainer = t,
        .run = r->dir.path,
        .run_id = "drawn",
        .host = "host",
        .checksum = ND_CHECKSUM_XXH3,
        .waits = r->c->waits,
        .batch_samples = r->job.global_batch,
    };
    ND_TRY(nd_saver_create(&options, &r->savers[t->rank->rank]));
    return save_model(r, t);
}

static nd_status save(void *context, nd_trainer *t, int64_t step)
{
    drawn_run *r = context;
    const int rank = t->rank->rank;
    nd_save_report report;
    ND_TRY(nd_saver_advance(r->savers[rank], t->received->save, &report));
    r->reports[rank] = report.ended ? report : r->reports[rank];
    return step + 1 == r->c->saved ? nd_saver_begin(r->savers[rank], "interval", 77) : ND_OK;
}

static nd_status end_saving(void *context, nd_trainer *t)
{
    drawn_run *r = context;
    const int rank = t->rank->rank;
    nd_save_report report;
    ND_TRY(nd_saver_finish(r->savers[rank], &report));
    r->reports[rank] = report.ended ? report : r->reports[rank];
    ND_CHECK(nd_saver_destroy(r->savers[rank]), "the writer hangs");
    ND_CHECK(r->reports[rank].ended && r->reports[rank].good, "the save of step %lld failed: %s",
             (long long)r->c->saved, r->reports[rank].why);
    return ND_OK;
}

static nd_status restore(void *context, nd_trainer *t)
{
    drawn_run *r = context;
    nd_manifest manifest = {0};
    nd_restored restored;
    nd_status status = nd_restore_checkpoint(t, r->checkpoint, &manifest, true, &restored);
    nd_manifest_fini(&manifest);
    return status;
}

/* comparing */

/* ||a - b|| of one tensor; without b ||a||. */
static double distance(const float *a, const float *b, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++) {
        const double d = (double)a[i] - (b ? (double)b[i] : 0);
        sum += d * d;
    }
    return sqrt(sum);
}

/* Like distance, but over the gradients of all tensors. */
static double distance_of_all(const mesh_result *a, const mesh_result *b)
{
    double all = 0;
    for (int t = 0; t < a->tensors; t++) {
        all = hypot(all, distance(a->gradients[t], b ? b->gradients[t] : NULL, a->sizes[t]));
    }
    return all;
}

/*
 * How far apart two runs are, at most, as a share of how far one of them is from F32: roundings
 * that have nothing to do with each other add up as squares. A row's scale depends on the row
 * alone, so most codes of rows are the same in both. Where a norm is behind a branch, the few
 * roundings of what nearly cancelled outweigh all others, and chance does not even them out: twice
 * as much.
 */
static double alike(const drawn_case *c)
{
    const bool rows = c->recipe == ND_FP8_ROWWISE || c->recipe == ND_FP8_ROWWISE_GW_HP;
    return (rows ? 0.9 : M_SQRT2) * (nd_families[c->family].post_norm ? 2 : 1);
}

/* The relative error of a gradient's F32 sums. */
static double sum_error(const drawn_run *r)
{
    const double tokens = (double)(r->job.global_batch * r->job.sequence);
    return fmax(1e-5, 6 * sqrt(tokens) * 6e-8);
}

/* base: a run from which both may be off, in F32 or with nudged weights; NULL: they differ by F32
 * sums alone. */
static nd_status compare_gradients(const drawn_run *r, const mesh_result *got,
                                   const mesh_result *want, const mesh_result *base,
                                   const char *what)
{
    const double relative = sum_error(r), all = distance_of_all(want, NULL);
    const double rounding = base ? distance_of_all(want, base) / all : 0;
    const double apart = distance_of_all(got, want), most = alike(r->c) * rounding + relative;
    ND_CHECK(!base || apart <= most * all,
             "%s: all gradients are off by %.3g of %.3g, more than %.3g", what, apart, all,
             most * all);
    for (int t = 0; t < want->tensors; t++) {
        const int64_t count = want->sizes[t];
        const float *mine = got->gradients[t], *other = want->gradients[t];
        const double size = distance(other, NULL, count), off = distance(mine, other, count);
        const double seen = base ? distance(other, base->gradients[t], count) : 0;
        const double bound =
            relative * (size + 0.01 * all) + 2.5 * (seen + rounding * (size + 0.1 * all));
        ND_CHECK(off <= bound, "%s: the gradient of %s is off by %.3g of %.3g, more than %.3g",
                 what, want->names[t], off, size, bound);
    }
    return ND_OK;
}

static nd_status compare_number(double got, double want, double relative, const char *what,
                                const char *name, int64_t step)
{
    ND_CHECK(fabs(got - want) <= relative * fabs(want),
             "%s: the %s of step %lld is %.9g, and %.9g is expected, within %.1e", what, name,
             (long long)step + 1, got, want, relative);
    return ND_OK;
}

/* The mesh, or `want`'s own worker by other ops, against one worker. `first`: of want's steps. */
static nd_status compare_steps(const drawn_run *r, const mesh_result *got, const mesh_result *want,
                               int64_t first, bool exact, const char *what)
{
    /* The first update is made of equal gradients, but for rounding; AdamW magnifies the noise of
     * tiny ones, and BF16 and FP8 round to the other side. */
    const bool f32 = r->c->precision == ND_PRECISION_FP32;
    const bool cancels = nd_families[r->c->family].post_norm && !f32; /* see alike */
    for (int64_t s = first; s < r->c->steps; s++) {
        const double early = exact ? 2e-6 : 2e-2, late = f32 ? 1e-4 : 3e-2;
        const double loss = s == 0 ? early : late, norm = s == 0 ? early * 10 : late * 4;
        ND_TRY(compare_number(got->loss[s - first], want->loss[s], loss, what, "loss", s));
        if (!(cancels && s > 0) &&
            (r->c->recipe != ND_FP8_DELAYED || s > 1)) { /* scales of 1 do not fit yet */
            ND_TRY(compare_number(got->norm[s - first], want->norm[s], norm, what, "norm", s));
        }
        for (int i = 0; i < 2 * (r->c->sources > 1 ? 2 : 0); i++) {
            ND_TRY(compare_number(got->source_sums[s - first][i], want->source_sums[s][i], late,
                                  what, "sum of a source", s));
        }
    }
    return compare_number(got->validation, want->validation, f32 ? 1e-4 : 3e-2, what, "validation",
                          r->c->steps - 1);
}

static nd_status compare_bits(const drawn_run *r, const mesh_result *got, const mesh_result *want)
{
    for (int64_t s = r->c->saved; s < r->c->steps; s++) {
        ND_TRY(compare_number(got->loss[s - r->c->saved], want->loss[s], 0, "resumed", "loss", s));
        ND_TRY(compare_number(got->norm[s - r->c->saved], want->norm[s], 0, "resumed", "norm", s));
    }
    for (int t = 0; t < want->tensors; t++) {
        ND_CHECK(memcmp(got->weights[t], want->weights[t], (size_t)want->sizes[t] * 4) == 0,
                 "resumed: %s has other bits", want->names[t]);
    }
    return compare_number(got->validation, want->validation, 0, "resumed", "validation",
                          r->c->steps - 1);
}

/* A bias that starts at 0 and whose gradient cancels, as that of keys without positions, holds
 * nothing but the errors of its updates. base: as above. */
static nd_status compare_weights(const drawn_run *r, const mesh_result *got,
                                 const mesh_result *want, const mesh_result *base)
{
    const double rounding = base ? distance_of_all(want, base) : 0;
    const double error = 0.01 * sum_error(r) * distance_of_all(want, NULL) + 0.25 * rounding;
    const double updates = r->job.lr * (double)r->c->steps;
    for (int t = 0; t < want->tensors && r->c->sgd && r->c->precision == ND_PRECISION_FP32; t++) {
        const int64_t count = want->sizes[t];
        const float *mine = got->weights[t], *other = want->weights[t];
        const double off = distance(mine, other, count);
        const double seen = base ? distance(other, base->weights[t], count) : 0;
        const double bound = 1e-5 * distance(other, NULL, count) + updates * error + 2.5 * seen;
        ND_CHECK(off <= bound, "the mesh: %s is off by %.2e, more than %.2e", want->names[t], off,
                 bound);
    }
    return ND_OK;
}

/* runs */

/* The mesh saves and goes on, then goes back. */
static nd_status run_mesh(drawn_run *r, mesh_result *out)
{
    mesh_job job = r->job;
    job.threads = has_own_products(r->c) ? (int)r->c->threads : 1;
    job.limits.head_rows = r->c->head_rows;
    const int64_t ranks = r->c->replicate * r->c->shard * r->c->cp * r->c->tp;
    const int64_t least = drawn_case_weights(r->c) / ranks / 40; /* not too many rounds */
    job.limits.save_piece =
        r->c->save_piece > 0 && r->c->save_piece < least ? least : r->c->save_piece;
    /* Two halves, each with a round from every other rank. */
    job.staging_bytes = (size_t)(r->c->staging * 2 * (DRAWN_RANKS_MAX - 1));
    job.start = open_saver;
    job.after_step = save;
    job.end = end_saving;
    job.rewind = restore;
    job.context = r;
    return mesh_run(&job, &r->mesh, out);
}

static nd_status run_resumed(drawn_run *r, mesh_result *out)
{
    mesh_job job = r->job;
    mesh_case mesh = r->c->other_mesh ? r->one : r->mesh;
    mesh.recompute = (nd_recompute)r->c->other_recompute;
    job.threads = has_own_products(r->c) ? (int)r->c->other_threads : 1;
    job.limits.head_rows = r->c->head_rows;
    job.staging_bytes = (size_t)(r->c->staging * 2 * (DRAWN_RANKS_MAX - 1));
    job.start = restore;
    job.context = r;
    job.first_step = r->c->saved;
    job.steps = r->c->steps - r->c->saved;
    return mesh_run(&job, &mesh, out);
}

/* Each weight becomes the next F32 above it or below it. */
static nd_status nudge(void *context, nd_trainer *t)
{
    nd_fsdp *fsdp = &t->model->fsdp;
    (void)context;
    for (int64_t i = 0; i < fsdp->layout->shard_total; i++) { /* padding stays 0 */
        const float up = nd_rng_u64(5, 0, (uint64_t)i) % 2 == 0 ? 1 : -1;
        fsdp->master[i] *= 1 + up * 0x1p-23f;
    }
    nd_fsdp_weights_changed(fsdp);
    return ND_OK;
}

static nd_status run_nudged(drawn_run *r, mesh_result *out)
{
    mesh_job job = r->job;
    job.start = nudge;
    job.validates = false;
    return mesh_run(&job, &r->one, out);
}

static nd_status run_reference(drawn_run *r, mesh_result *out)
{
    mesh_job job = r->job;
    job.reference = true;
    job.precision = ND_PRECISION_FP32;
    job.steps = 1;
    job.validates = false;
    return mesh_run(&job, &r->one, out);
}

static nd_status check_resumed(drawn_run *r, const mesh_result *mesh, const mesh_result *one)
{
    mesh_result resumed = {0};
    ND_TRY(run_resumed(r, &resumed));
    return r->c->other_mesh
               ? compare_steps(r, &resumed, one, r->c->saved, false, "resumed by one worker")
               : compare_bits(r, &resumed, mesh);
}

static nd_status check_runs(drawn_run *r)
{
    const bool f32 = r->c->precision == ND_PRECISION_FP32;
    mesh_result reference = {0}, one = {0}, nudged = {0}, mesh = {0};
    const bool ill = f32 && nd_families[r->c->family].post_norm;
    ND_TRY(run_reference(r, &reference));
    ND_TRY(mesh_run(&r->job, &r->one, &one));
    ND_TRY(ill ? run_nudged(r, &nudged) : ND_OK);
    ND_TRY(compare_number(one.loss[0], reference.loss[0], f32 ? 2e-6 : 3e-2, "against ref", "loss",
                          0));
    ND_TRY(f32 ? compare_gradients(r, &one, &reference, ill ? &nudged : NULL, "against ref")
               : ND_OK);
    ND_TRY(run_mesh(r, &mesh));
    ND_TRY(compare_gradients(r, &mesh, &one,
                             ill                ? &nudged
                             : f32 || r->shares ? NULL
                                                : &reference,
                             "against one worker"));
    ND_TRY(compare_steps(r, &mesh, &one, 0, f32 || r->shares, "against one worker"));
    ND_TRY(compare_weights(r, &mesh, &one, ill ? &nudged : NULL));
    return check_resumed(r, &mesh, &one);
}

nd_status drawn_check(const drawn_case *c)
{
    drawn_run r = {.c = c};
    setenv("ND_CPU_ISA", drawn_isas[c->isa], 1);
    setenv("ND_CPU_PACKED", drawn_packed[c->packed], 1);
    *drawn_isas[c->isa] ? 0 : unsetenv("ND_CPU_ISA");
    *drawn_packed[c->packed] ? 0 : unsetenv("ND_CPU_PACKED");
    tempdir_make(&r.dir);
    fill_run(&r);
    snprintf(r.model, sizeof r.model, "%s/model", r.dir.path);
    nd_status status = nd_checkpoint_path(r.dir.path, c->saved, &r.checkpoint);
    status = status == ND_OK ? check_runs(&r) : status;
    tempdir_remove(&r.dir);
    free((char *)r.job.data_path);
    free((char *)r.job.second_path);
    free(r.checkpoint);
    return status;
}

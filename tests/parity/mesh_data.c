// SPDX-License-Identifier: Apache-2.0
#include "tests/parity/mesh_data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/isa.h"
#include "runtime/base/rng.h"

nd_shape mesh_small_llama(int64_t vocab)
{
    return (nd_shape){
        .vocab = vocab,
        .hidden = 64,
        .ffn = 128,
        .layers = 2,
        .heads = 8,
        .kv_heads = 4,
        .head_dim = 16,
        .max_positions = 128,
        .rms_eps = 1e-5,
        .init_std = 0.08,
        .rope = {.type = ND_ROPE_DEFAULT, .theta = 10000.0},
    };
}

const char *mesh_token_file(tempdir *dir, const char *name, int tokens, int64_t vocab, int period)
{
    enum { HEADER = 256 };
    size_t count = HEADER + (size_t)tokens;
    uint32_t *words = calloc(count, sizeof *words);
    words[0] = 20240801;
    words[1] = 7;
    words[2] = (uint32_t)tokens;
    for (int i = 0; i < tokens; i++) {
        uint64_t at = (uint64_t)(period ? i % period : i), r = nd_rng_u64(5, 0, at);
        words[HEADER + i] = (uint32_t)((r % 4 ? at * at / 7 : r / 4) % (uint64_t)vocab);
    }
    const char *path = tempdir_write(dir, name, words, count * sizeof *words);
    free(words);
    return path;
}

mesh_job mesh_job_on_tokens(const char *path, nd_shape shape, nd_precision precision)
{
    return (mesh_job){
        .shape = shape,
        .data_path = path,
        .format = ND_DATA_LLMC,
        .tokenizer = "file",
        .optimizer = ND_OPTIMIZER_ADAMW,
        .precision = precision,
        .lr = 2e-3,
        .max_grad_norm = 1.0,
        .weight_decay = 0.1,
    };
}

mesh_job mesh_sized_job(tempdir *dir, int tokens, nd_shape shape, nd_precision precision, int batch,
                        int sequence, int steps)
{
    const char *path = mesh_token_file(dir, "tokens.bin", tokens, shape.vocab, 0);
    mesh_job job = mesh_job_on_tokens(path, shape, precision);
    job.global_batch = batch;
    job.sequence = sequence;
    job.steps = steps;
    return job;
}

bool mesh_own_products(void)
{
    nd_cpu_isa isa;
    bool own = false;
    assert_ok(nd_cpu_isa_choose(&isa));
    assert_ok(nd_cpu_products_choose(isa, &own));
    return own;
}

mesh_result mesh_trained(const mesh_job *job, const mesh_case *mesh)
{
    mesh_result result;
    assert_ok(mesh_run(job, mesh, &result));
    return result;
}

void mesh_expect_failure(const mesh_job *job, const mesh_case *mesh, nd_status expected)
{
    mesh_result result;
    cr_assert_eq(mesh_run(job, mesh, &result), expected, "%s: %s", mesh->name,
                 nd_error_last()->message);
}

void mesh_expect_same(const mesh_result *got, const mesh_result *want, int parts, const char *name)
{
    const bool per_step = (parts & (MESH_LOSSES | MESH_NORMS)) != 0;
    cr_assert_eq(got->tensors, want->tensors, "%s", name);
    cr_assert(!per_step || got->steps == want->steps, "%s", name);
    for (int64_t s = 0; per_step && s < got->steps; s++) {
        cr_assert(!(parts & MESH_LOSSES) || memcmp(&got->loss[s], &want->loss[s], 8) == 0,
                  "%s: loss %.17g of step %ld, not %.17g", name, got->loss[s], (long)s,
                  want->loss[s]);
        cr_assert(!(parts & MESH_NORMS) || memcmp(&got->norm[s], &want->norm[s], 8) == 0,
                  "%s: norm %.17g of step %ld, not %.17g", name, got->norm[s], (long)s,
                  want->norm[s]);
    }
    for (int t = 0; t < got->tensors; t++) {
        const size_t bytes = (size_t)got->sizes[t] * sizeof(float);
        cr_assert(!(parts & MESH_GRADIENTS) ||
                      memcmp(got->gradients[t], want->gradients[t], bytes) == 0,
                  "%s: the gradient of %s has other bits", name, got->names[t]);
        cr_assert(!(parts & MESH_WEIGHTS) || memcmp(got->weights[t], want->weights[t], bytes) == 0,
                  "%s: %s has other bits", name, got->names[t]);
    }
}

void mesh_expect_same_recomputed(const mesh_job *job, mesh_case mesh)
{
    mesh.recompute = ND_RECOMPUTE_NONE;
    const mesh_result expected = mesh_trained(job, &mesh);
    for (int mode = ND_RECOMPUTE_SELECTIVE; mode <= (int)ND_RECOMPUTE_FULL; mode++) {
        mesh.recompute = (nd_recompute)mode;
        const mesh_result got = mesh_trained(job, &mesh);
        mesh_expect_same(&got, &expected, MESH_LOSSES | MESH_WEIGHTS, mesh.name);
    }
}

static void expect_below(double error, double most, const char *name, const char *what,
                         const char *of)
{
    cr_assert(most == 0 || error < most, "%s: the %s of %s differs by %.2e", name, what, of, error);
}

void mesh_expect_near(const mesh_result *got, const mesh_result *want, mesh_bounds most,
                      const char *name)
{
    for (int64_t s = 0; s < got->steps; s++) {
        char step[32];
        snprintf(step, sizeof step, "step %d", (int)s + 1);
        expect_below(fabs(got->loss[s] / want->loss[s] - 1), most.loss, name, "loss", step);
        expect_below(fabs(got->norm[s] / want->norm[s] - 1), most.norm, name, "norm", step);
    }
    for (int i = 0; i < got->tensors; i++) {
        expect_below(mesh_relative_l2(got->gradients[i], want->gradients[i], got->sizes[i]),
                     most.gradient, name, "gradient", got->names[i]);
        expect_below(mesh_relative_l2(got->weights[i], want->weights[i], got->sizes[i]),
                     most.weight, name, "weight", got->names[i]);
    }
}

void mesh_expect_all_near(const mesh_job *job, const mesh_case *one, const mesh_case *meshes,
                          size_t count, mesh_bounds most)
{
    const mesh_result want = mesh_trained(job, one);
    cr_assert(job->steps == 1 || want.loss[job->steps - 1] < want.loss[0], "the model learns");
    for (size_t i = 0; i < count; i++) {
        const mesh_result got = mesh_trained(job, &meshes[i]);
        mesh_expect_near(&got, &want, most, meshes[i].name);
    }
}

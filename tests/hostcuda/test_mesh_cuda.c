// SPDX-License-Identifier: Apache-2.0
/*
 * The whole trainer with device cuda over the doubles: one worker and meshes, against one worker on
 * the CPU.
 *
 * Bounds. F32: as in tests/parity/test_mesh.c, gradients within 1e-5 in relative L2 and losses
 * within 1e-5. BF16 and FP8: a loss is a mean over hundreds of tokens of terms whose logits err by
 * a few BF16 roundings (2^-8) of numbers of size about 1, in part at random: 2^-8 of it covers
 * both. A wrong scale, a lost wait or a missing term is far above.
 */
#include <criterion/criterion.h>
#include <math.h>

#include "runtime/base/rng.h"
#include "tests/hostcuda/doubles/double.h"
#include "tests/hostcuda/mesh_cuda.h"
#include "tests/parity/mesh_run.h"
#include "tests/support/tempdir.h"

enum { SEQUENCE = 32, GLOBAL_BATCH = 4, STEPS = 3, TOKENS = 3000, VOCAB = 96 };

static tempdir dir;
static const mesh_case one = {"one worker", 1, 1, 1, 1, 1, .zero2 = true};

static nd_llama_shape shape_of(void)
{
    return (nd_llama_shape){
        .vocab = VOCAB,
        .hidden = 64,
        .ffn = 96,
        .layers = 2,
        .heads = 4,
        .kv_heads = 2,
        .head_dim = 16,
        .max_positions = 128,
        .rms_eps = 1e-5,
        .init_std = 0.08,
        .rope = {.type = ND_ROPE_DEFAULT, .theta = 10000.0},
    };
}

static const char *token_file(void)
{
    static uint32_t words[256 + TOKENS];
    words[0] = 20240801;
    words[1] = 7;
    words[2] = TOKENS;
    for (int i = 0; i < TOKENS; i++) {
        uint64_t r = nd_rng_u64(5, 0, (uint64_t)i);
        words[256 + i] = (uint32_t)(r % 4 ? (uint64_t)(i * i / 7) % VOCAB : r / 4 % VOCAB);
    }
    return tempdir_write(&dir, "tokens.bin", words, sizeof words);
}

static mesh_job job_of(const char *path, nd_precision precision)
{
    return (mesh_job){
        .shape = shape_of(),
        .data_path = path,
        .format = ND_DATA_LLMC,
        .tokenizer = "file",
        .global_batch = GLOBAL_BATCH,
        .sequence = SEQUENCE,
        .steps = STEPS,
        .optimizer = ND_OPTIMIZER_ADAMW,
        .precision = precision,
        .lr = 0.003,
        .max_grad_norm = 1.0,
        .weight_decay = 0.1,
    };
}

static void expect_alike(const mesh_case *mesh, const mesh_result *got, const mesh_result *want,
                         nd_precision precision)
{
    bool exact = precision == ND_PRECISION_FP32;
    double bound = exact ? 1e-5 : 1.0 / 256.0;
    for (int64_t step = 0; step < STEPS; step++) {
        double difference = fabs(got->loss[step] - want->loss[step]);
        cr_expect(difference <= bound * want->loss[step], "%s: loss %lld is %.7f, on the CPU %.7f",
                  mesh->name, (long long)step + 1, got->loss[step], want->loss[step]);
    }
    for (int t = 0; t < got->tensors && exact; t++) {
        double error = mesh_relative_l2(got->gradients[t], want->gradients[t], got->sizes[t]);
        cr_expect(error < 1e-5, "%s: gradient of %s is off by %.2e", mesh->name, got->names[t],
                  error);
    }
}

static void compare(nd_precision precision, const mesh_case *meshes, int count, int order,
                    bool cast_units)
{
    tempdir_make(&dir);
    mesh_job job = job_of(token_file(), precision);
    mesh_result want, got;
    mesh_use_gpus(false, false);
    cr_assert_eq(mesh_run(&job, &one, &want), ND_OK, "%s", nd_error_last()->message);
    mesh_use_gpus(true, cast_units);
    nd_double_machine_get()->order = order;
    for (int i = 0; i < count; i++) {
        cr_assert_eq(mesh_run(&job, &meshes[i], &got), ND_OK, "%s", nd_error_last()->message);
        expect_alike(&meshes[i], &got, &want, precision);
        mesh_result_free(&got);
    }
    mesh_result_free(&want);
    tempdir_remove(&dir);
}

static const mesh_case meshes[] = {
    {"one GPU", 1, 1, 1, 1, 1},
    {"one GPU, full recompute, micro-batch 2", 1, 1, 1, 1, 2, .recompute = ND_RECOMPUTE_FULL},
    {"hsdp 2 x 2 x tp 2", 2, 2, 1, 2, 1},
    {"fsdp 2 x cp 2", 1, 2, 2, 1, 1},
    {"fsdp 2 x cp 2, ring", 1, 2, 2, 1, 1, .ring = true},
};

enum { MESHES = sizeof meshes / sizeof *meshes };

Test(mesh_cuda, f32, .timeout = 300)
{
    compare(ND_PRECISION_FP32, meshes, MESHES, ND_DOUBLE_LAZY, false);
}

Test(mesh_cuda, bf16, .timeout = 300)
{
    compare(ND_PRECISION_BF16, meshes, MESHES, ND_DOUBLE_LAZY, false);
}

Test(mesh_cuda, fp8, .timeout = 300)
{
    compare(ND_PRECISION_FP8, meshes, MESHES, ND_DOUBLE_LAZY, false);
}

/* The other streams run as early as they can: what they read must be there, what they write must be
 * free. */
Test(mesh_cuda, f32_with_eager_streams, .timeout = 300)
{
    compare(ND_PRECISION_FP32, meshes + 2, MESHES - 2, ND_DOUBLE_OTHERS, false);
    compare(ND_PRECISION_FP32, meshes + 2, 1, ND_DOUBLE_EAGER, false);
}

/* What a model does whose weights in the compute dtype do not fit beside its state. */
Test(mesh_cuda, units_cast_one_at_a_time, .timeout = 300)
{
    compare(ND_PRECISION_BF16, meshes, 2, ND_DOUBLE_OTHERS, true);
    compare(ND_PRECISION_FP8, meshes, 2, ND_DOUBLE_LAZY, true);
}

// SPDX-License-Identifier: Apache-2.0
/*
 * Packed weights and threads change no number; that other modes change none is test_mesh.c, and
 * what they are for test_wire.c and test_activations.c. Clipping changes an update only where the
 * norm is above its bound, and then by one factor.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/isa.h"
#include "tests/parity/mesh_data.h"
#include "tests/support/forms.h"
#include "tests/support/skip.h"

enum { LAYERS = 6, STEPS = 2, GLOBAL_BATCH = 8, SEQUENCE = 32 };

static tempdir dir;

TEMPDIR_SUITE(modes, tempdir_leave_empty);

static mesh_job job_of(void)
{
    enum { VOCAB = 256 };
    nd_shape shape = mesh_small_llama(VOCAB);
    shape.hidden = 32;
    shape.ffn = 64;
    shape.layers = LAYERS;
    shape.heads = 4;
    shape.kv_heads = 2;
    shape.head_dim = 8;
    mesh_job job =
        mesh_sized_job(&dir, 4000, shape, ND_PRECISION_BF16, GLOBAL_BATCH, SEQUENCE, STEPS);
    job.weight_decay = 0;
    return job;
}

/* Packed weights of all ranks. */
typedef struct packed_plan {
    atomic_size_t bytes;  /* that are planned */
    atomic_bool possible; /* whether the CPU's products keep any */
    atomic_size_t ops;    /* bytes that are planned for what the ops hold */
    char unkept[512];     /* what rank 0 says of those that are left out; "" if none are */
} packed_plan;

static nd_status read_plan(void *context, nd_trainer *trainer)
{
    packed_plan *plan = context;
    const nd_rank *rank = trainer->rank;
    if (rank->rank == 0 &&
        !nd_trainer_describe_unkept(trainer, plan->unkept, sizeof plan->unkept)) {
        plan->unkept[0] = '\0';
    }
    plan->possible = kept_bytes(rank->ops, rank->device, 1, 32, 32, true, ND_DTYPE_BF16) > 0;
    for (int i = 0; i < trainer->plan.count; i++) {
        const nd_mem_buffer *buffer = &trainer->plan.buffers[i];
        plan->bytes += strstr(buffer->name, ", packed") ? buffer->bytes : 0;
        plan->ops += strcmp(buffer->name, "packed operands, partial sums") == 0 ? buffer->bytes : 0;
    }
    return ND_OK;
}

/* In BF16, or in FP8 with weights that are gathered in BF16. */
static mesh_result run_packed(const mesh_case *mesh, nd_precision precision, const char *packed,
                              int host_ranks, packed_plan *plan)
{
    mesh_job job = job_of();
    job.precision = precision;
    job.recipe = mesh->zero2 ? ND_FP8_ROWWISE : ND_FP8_TENSORWISE;
    job.filter =
        "q_proj,o_proj,gate_proj,up_proj,down_proj"; /* k and v have 16 rows, too few for tp */
    job.max_grad_norm = 1.0;
    job.host_ranks = host_ranks;
    job.end = read_plan;
    job.context = plan;
    setenv("ND_CPU_PACKED", packed, 1);
    mesh_result result = mesh_trained(&job, mesh);
    unsetenv("ND_CPU_PACKED");
    return result;
}

/* Losses, gradients and weights have the same bits whether each product packs its operands or
 * packed weights of a step are kept, for which the memory is planned. */
static void expect_packed_equal(const mesh_case *mesh, nd_precision precision)
{
    packed_plan none = {0}, some = {0};
    mesh_result anew = run_packed(mesh, precision, "anew", 1, &none),
                kept = run_packed(mesh, precision, "kept", 1, &some);
    cr_assert_eq(none.bytes, 0, "%s: %zu bytes are planned for nothing", mesh->name, none.bytes);
    cr_assert_eq(some.bytes > 0, some.possible, "%s: %zu bytes are planned", mesh->name,
                 some.bytes);
    mesh_expect_same(&kept, &anew, MESH_ALL, mesh->name);
}

Test(modes, packed_weights_change_no_bit)
{
    const mesh_case cases[] = {
        {"one, 8 micro-batches", 1, 1, 1, 1, 1},
        {"one, full recompute", 1, 1, 1, 1, 8, .recompute = ND_RECOMPUTE_FULL},
        {"one, all but attention", 1, 1, 1, 1, 8, .recompute = ND_RECOMPUTE_ALL_BUT_ATTENTION},
        {"fsdp 2 x tp 2, zero-2", 1, 2, 1, 2, 2, .zero2 = true},
        {"fsdp 2", 1, 2, 1, 1, 2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        expect_packed_equal(&cases[i], ND_PRECISION_BF16);
        expect_packed_equal(&cases[i], ND_PRECISION_FP8);
    }
}

/* As many workers as no host has memory for: packed weights are the first to go, and it is said. */
Test(modes, packed_weights_are_left_out_where_memory_is_short)
{
    packed_plan kept = {0}, plan = {0};
    char words[64];
    run_packed(&mesh_one, ND_PRECISION_BF16, "kept", 1, &kept);
    cr_assert_str_empty(kept.unkept, "%s", kept.unkept);
    run_packed(&mesh_one, ND_PRECISION_BF16, "kept", 1 << 30, &plan);
    cr_assert_eq(plan.bytes, 0, "%zu bytes are planned", plan.bytes);
    snprintf(words, sizeof words, "would need %.1f MiB of each worker",
             (double)kept.bytes / 1048576.0);
    cr_assert_eq(strstr(plan.unkept, "packed weights of the blocks and the head ") != NULL &&
                     strstr(plan.unkept, words) != NULL && strstr(plan.unkept, "; free memory"),
                 (bool)kept.possible, "no \"%s\" in: %s", words, plan.unkept);
}

/* `large`: every op is cut into pieces, and there are two micro-batches. Two tiles of the
 * vocabulary. */
static mesh_result run_with_threads(bool large, nd_precision precision, int threads)
{
    enum { VOCAB = 1301, TOKENS = 8192 };
    static const mesh_case one = {"one", 1, 1, 1, 1, 2};
    nd_shape shape = mesh_small_llama(VOCAB);
    if (large) {
        shape.hidden = 128;
        shape.ffn = 352;
        shape.max_positions = 256;
    }
    mesh_job job =
        mesh_sized_job(&dir, TOKENS, shape, precision, large ? 4 : 2, (int)shape.max_positions, 3);
    job.max_grad_norm = 0.5;
    job.recipe = ND_FP8_TENSORWISE;
    job.threads = threads;
    return mesh_trained(&job, &one);
}

static void expect_threads_change_no_bit(nd_precision precision)
{
    static const int threads[] = {2, 3, 7};
    const char *isa = getenv("ND_CPU_ISA");
    const bool emulated = isa && strcmp(isa, "amx_emulated") == 0; /* slowly */
    mesh_result first = run_with_threads(!emulated, precision, 1);
    for (size_t i = 0; i < sizeof threads / sizeof *threads; i++) {
        char name[32];
        mesh_result other = run_with_threads(!emulated, precision, threads[i]);
        snprintf(name, sizeof name, "%d threads", threads[i]);
        mesh_expect_same(&first, &other, MESH_ALL, name);
    }
}

Test(modes, threads_change_no_bit_of_a_step_in_bf16)
{
    if (!mesh_own_products()) { /* the bits of oneDNN's depend on the number of threads */
        skip_test("BF16 is multiplied by oneDNN here");
    }
    expect_threads_change_no_bit(ND_PRECISION_BF16);
}

Test(modes, threads_change_no_bit_of_a_step_in_fp8)
{
    if (!mesh_own_products()) { /* the bits of oneDNN's depend on the number of threads */
        skip_test("FP8 is multiplied by oneDNN here");
    }
    expect_threads_change_no_bit(ND_PRECISION_FP8);
}

static void expect_emulated_equal(nd_precision precision)
{
    setenv("ND_CPU_ISA", "amx", 1);
    mesh_result hardware = run_with_threads(false, precision, 2);
    setenv("ND_CPU_ISA", "amx_emulated", 1);
    mesh_result emulated = run_with_threads(false, precision, 2);
    mesh_expect_same(&hardware, &emulated, MESH_ALL, "amx and amx_emulated");
}

Test(modes, emulated_tiles_leave_the_bits_of_a_step_with_amx)
{
    if (nd_cpu_isa_detect() != ND_CPU_ISA_AMX) {
        skip_test("no step is compared with emulated tiles: this CPU has no AMX");
    }
    expect_emulated_equal(ND_PRECISION_BF16);
    expect_emulated_equal(ND_PRECISION_FP8);
}

static size_t workspace_of(int threads)
{
    const nd_ops *ops = NULL;
    nd_device *device = NULL;
    assert_ok(nd_device_open_cpu(threads, &device));
    assert_ok(nd_ops_cpu(device, &ops));
    const size_t bytes = ops->workspace(device);
    nd_device_close(device);
    return bytes;
}

/* Panels of each thread where products are ours, and partial sums. */
Test(modes, the_plan_counts_what_the_ops_hold)
{
    packed_plan plan = {0};
    const mesh_case mesh = {"fsdp 2", 1, 2, 1, 1, 2};
    run_packed(&mesh, ND_PRECISION_BF16, "kept", 1, &plan);
    const size_t one = workspace_of(1), three = workspace_of(3);
    cr_assert_eq(plan.ops, 2 * one, "%zu bytes are planned for two workers with %zu each",
                 (size_t)plan.ops, one);
    cr_assert_gt(one, 1 << 20);
    cr_assert_eq(three > one + (1 << 18), (bool)plan.possible,
                 "%zu bytes with a thread, %zu with "
                 "three",
                 one, three);
}

/* One step of SGD, which unlike AdamW is not blind to the size of gradients. */
static mesh_result update(double lr, double max_grad_norm)
{
    mesh_job job = job_of();
    job.steps = 1;
    job.optimizer = ND_OPTIMIZER_SGD;
    job.precision = ND_PRECISION_FP32;
    job.lr = lr;
    job.max_grad_norm = max_grad_norm;
    return mesh_trained(&job, &(mesh_case){"fsdp 2 x tp 2", 1, 2, 1, 2, 2});
}

Test(modes, clipping_scales_an_update_to_its_bound_and_never_up)
{
    const double lr = 0.125;
    mesh_result start = update(0.0, 0.0), free_run = update(lr, 0.0);
    const double norm = free_run.norm[0], bound = norm / 4;
    mesh_result below = update(lr, 4 * norm), above = update(lr, bound);
    cr_assert_gt(norm, 0.0);
    for (int t = 0; t < start.tensors; t++) {
        for (int64_t i = 0; i < start.sizes[t]; i++) {
            double w = start.weights[t][i], g = free_run.gradients[t][i];
            double expected = w - lr * (bound / (norm + 1e-6)) * g;
            /* the factor and two products are rounded relative to the change, the sum to itself */
            double most = ldexp(3 * fabs(expected - w) + fabs(w) + fabs(expected), -23);
            cr_assert_eq(below.weights[t][i], free_run.weights[t][i], "%s: a norm below the bound",
                         start.names[t]);
            cr_assert_leq(fabs(above.weights[t][i] - expected), most,
                          "%s: element %d is %.9g after a clipped step, %.9g expected",
                          start.names[t], (int)i, above.weights[t][i], expected);
        }
    }
}

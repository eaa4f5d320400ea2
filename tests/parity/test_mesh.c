// SPDX-License-Identifier: Apache-2.0
/*
 * Mesh equivalence in F32: every mesh against one worker at equal global batch.
 *
 * Bounds. A gradient element is a sum over at most 768 tokens whose order depends on the mesh:
 * relative error about sqrt(768) x 6e-8 = 1.7e-6 in the L2 norm, so 1e-5 leaves a factor of 6; a
 * wrong factor or a missing term is orders above it. Losses are means of F64 sums of F32 terms:
 * 1e-6 relative. AdamW divides by the root of the second moment, which magnifies the noise of tiny
 * gradients: losses and norms within 1e-5.
 */
#include <criterion/criterion.h>

#include "tests/parity/mesh_data.h"
#include "tests/support/tempdir.h"

/* The last step has samples of the second epoch. */
enum { SEQUENCE = 32, GLOBAL_BATCH = 24, STEPS = 6, TOKENS = 4300 };

static const mesh_case one = {"one worker", 1, 1, 1, 1, 1, .zero2 = true};
static tempdir dir;

TEMPDIR_SUITE(mesh, tempdir_leave_empty, .timeout = 600);

/* GQA, odd vocabulary (padded to tp), ffn that only 4 and its divisors cut. */
static nd_shape shape_of(int64_t vocab, int64_t ffn, bool tied)
{
    nd_shape shape = mesh_small_llama(vocab);
    shape.hidden = 40;
    shape.ffn = ffn;
    shape.layers = 3;
    shape.head_dim = 6;
    shape.tied = tied;
    return shape;
}

static const char *token_file(int64_t vocab)
{
    return mesh_token_file(&dir, "tokens.bin", TOKENS, vocab, 0);
}

static mesh_job job_of(nd_shape shape, const char *path, nd_optimizer_kind optimizer)
{
    const bool sgd = optimizer == ND_OPTIMIZER_SGD;
    mesh_job job = mesh_job_on_tokens(path, shape, ND_PRECISION_FP32);
    job.global_batch = GLOBAL_BATCH;
    job.sequence = SEQUENCE;
    job.steps = STEPS;
    job.optimizer = optimizer;
    job.lr = sgd ? 0.2 : 2e-3;
    job.max_grad_norm = sgd ? 0.0 : 0.5;
    job.weight_decay = sgd ? 0.0 : 0.1;
    return job;
}

static void compare_all(const mesh_job *job, const mesh_case *meshes, size_t count)
{
    const bool sgd = job->optimizer == ND_OPTIMIZER_SGD;
    const mesh_bounds most = {sgd ? 1e-6 : 1e-5, 1e-5, 1e-5, sgd ? 1e-5 : 0};
    mesh_expect_all_near(job, &one, meshes, count, most);
}

static void both_optimizers(nd_shape shape, const mesh_case *meshes, size_t count)
{
    const char *path = token_file(shape.vocab);
    mesh_job sgd = job_of(shape, path, ND_OPTIMIZER_SGD);
    mesh_job adamw = job_of(shape, path, ND_OPTIMIZER_ADAMW);
    compare_all(&sgd, meshes, count);
    compare_all(&adamw, meshes, count);
}

#define COUNT(array) (sizeof(array) / sizeof *(array))

Test(mesh, data_parallel_and_sharding)
{
    static const mesh_case meshes[] = {
        {"ddp 2", 2, 1, 1, 1, 1},
        {"ddp 4, micro-batch 2", 4, 1, 1, 1, 2},
        {"fsdp 2", 1, 2, 1, 1, 1},
        {"fsdp 2, zero-2", 1, 2, 1, 1, 1, .zero2 = true},
        {"fsdp 3, micro-batch 2", 1, 3, 1, 1, 2},
        {"fsdp 4", 1, 4, 1, 1, 1},
        {"fsdp 4, zero-2, micro-batch 2", 1, 4, 1, 1, 2, .zero2 = true},
        {"fsdp 8", 1, 8, 1, 1, 1},
        {"fsdp 8, zero-2", 1, 8, 1, 1, 1, .zero2 = true},
        {"hsdp 2 x 2", 2, 2, 1, 1, 1},
    };
    both_optimizers(shape_of(97, 75, false), meshes, COUNT(meshes));
}

Test(mesh, tensor_parallel)
{
    static const mesh_case meshes[] = {
        {"tp 2", 1, 1, 1, 2, 1},
        {"tp 4", 1, 1, 1, 4, 1},
        {"tp 4, micro-batch 2", 1, 1, 1, 4, 2},
        {"dp 2 x tp 2", 2, 1, 1, 2, 1},
        {"fsdp 2 x tp 2", 1, 2, 1, 2, 1},
        {"hsdp 2 x 2 x tp 2", 2, 2, 1, 2, 1},
        {"fsdp 6 x tp 2", 1, 6, 1, 2, 1},
    };
    both_optimizers(shape_of(97, 76, false), meshes, COUNT(meshes));
}

Test(mesh, context_parallel)
{
    static const mesh_case meshes[] = {
        {"cp 2", 1, 1, 2, 1, 1},
        {"cp 2, ring", 1, 1, 2, 1, 1, .ring = true},
        {"cp 4, micro-batch 2", 1, 1, 4, 1, 2},
        {"cp 4, ring, micro-batch 2", 1, 1, 4, 1, 2, .ring = true},
        {"cp 8", 1, 1, 8, 1, 1},
        {"cp 8, ring", 1, 1, 8, 1, 1, .ring = true},
        {"fsdp 2 x cp 2", 1, 2, 2, 1, 1},
        {"fsdp 2 x cp 2 x tp 2", 1, 2, 2, 2, 1},
        {"fsdp 2 x cp 2 x tp 2, ring", 1, 2, 2, 2, 1, .ring = true},
        {"cp 2, ulysses", 1, 1, 2, 1, 1, .ulysses = 2},
        {"cp 4, ulysses, micro-batch 2", 1, 1, 4, 1, 2, .ulysses = 4},
        {"cp 4, ulysses 2 of allgather", 1, 1, 4, 1, 1, .ulysses = 2},
        {"cp 8, ulysses 4 of ring", 1, 1, 8, 1, 1, .ulysses = 4, .ring = true},
        {"fsdp 2 x cp 2 x tp 2, ulysses", 1, 2, 2, 2, 1, .ulysses = 2},
    };
    both_optimizers(shape_of(97, 76, false), meshes, COUNT(meshes));
}

Test(mesh, tied_embeddings)
{
    static const mesh_case meshes[] = {
        {"tied, fsdp 3", 1, 3, 1, 1, 1},
        {"tied, tp 2", 1, 1, 1, 2, 1},
        {"tied, fsdp 2 x cp 2 x tp 2", 1, 2, 2, 2, 1},
        {"tied, ddp 2, recompute", 2, 1, 1, 1, 1, .recompute = ND_RECOMPUTE_FULL},
    };
    both_optimizers(shape_of(101, 76, true), meshes, COUNT(meshes));
}

/* Biases of every linear, heads that are normed and turned in part, GELU, and norms that multiply
 * by 1 + w. */
static nd_shape shape_with_switches(void)
{
    nd_shape shape = shape_of(97, 76, false);
    shape.family = ND_FAMILY_GEMMA3_TEXT;
    shape.qkv_bias = shape.o_bias = shape.mlp_bias = shape.qk_norm = 1;
    shape.embedding_scale = 3, shape.residual_scale = 0.3, shape.attention_scale = 0.2;
    shape.logits_divisor = 3;
    nd_layer_set_add(&shape.unturned, 1);
    shape.rope.query_beta = 0.3, shape.rope.original_max_positions = 5;
    shape.rotated = 4;
    return shape;
}

Test(mesh, switches)
{
    static const mesh_case meshes[] = {
        {"switches, fsdp 2, micro-batch 2", 1, 2, 1, 1, 2},
        {"switches, tp 2", 1, 1, 1, 2, 1},
        {"switches, cp 2", 1, 1, 2, 1, 1},
        {"switches, cp 2, ring", 1, 1, 2, 1, 1, .ring = true},
        {"switches, cp 2, ulysses", 1, 1, 2, 1, 1, .ulysses = 2},
        {"switches, hsdp 2 x 2 x tp 4", 2, 2, 1, 4, 1},
        {"switches, fsdp 2 x cp 2 x tp 2", 1, 2, 2, 2, 1, .recompute = ND_RECOMPUTE_FULL},
    };
    both_optimizers(shape_with_switches(), meshes, COUNT(meshes));
}

/* Several ranks of tp have copies of a KV head, with its biases. */
Test(mesh, copies_of_kv_heads)
{
    static const mesh_case two[] = {
        {"2 KV heads, tp 4", 1, 1, 1, 4, 1},
        {"2 KV heads, tp 8, micro-batch 2", 1, 1, 1, 8, 2},
        {"2 KV heads, fsdp 2 x tp 4", 1, 2, 1, 4, 1, .recompute = ND_RECOMPUTE_FULL},
        {"2 KV heads, hsdp 2 x 2 x tp 4, zero-2", 2, 2, 1, 4, 1, .zero2 = true},
        {"2 KV heads, cp 2 x tp 4, ring", 1, 1, 2, 4, 1, .ring = true},
        {"2 KV heads, ulysses 2 x tp 4", 1, 1, 2, 4, 1, .ulysses = 2},
    };
    static const mesh_case single[] = {
        {"1 KV head, tp 2 x cp 2", 1, 1, 2, 2, 1},
        {"1 KV head, tp 3", 1, 1, 1, 3, 3},
        {"1 KV head, fsdp 2 x cp 2 x tp 2, ring", 1, 2, 2, 2, 1, .ring = true},
    };
    /* Three ranks of six have the same 2 heads of 4; two of four the same 3 of 6. */
    static const mesh_case neither[] = {
        {"4 KV heads, tp 6", 1, 1, 1, 6, 3},
        {"4 KV heads, fsdp 2 x tp 6", 1, 2, 1, 6, 3, .recompute = ND_RECOMPUTE_FULL},
        {"4 KV heads, ulysses 2 x tp 6", 1, 1, 2, 6, 3, .ulysses = 2},
    };
    static const mesh_case more_heads[] = {
        {"6 KV heads, tp 4", 1, 1, 1, 4, 1},
        {"6 KV heads, cp 2 x tp 4, ring", 1, 1, 2, 4, 1, .ring = true},
    };
    nd_shape shape = shape_with_switches();
    shape.ffn = 80;
    shape.kv_heads = 2;
    both_optimizers(shape, two, COUNT(two));
    shape.heads = 12;
    shape.ffn = 72;
    shape.kv_heads = 4;
    both_optimizers(shape, neither, COUNT(neither));
    shape.kv_heads = 6;
    both_optimizers(shape, more_heads, COUNT(more_heads));
    shape = shape_of(97, 78, true);
    shape.heads = 6;
    shape.kv_heads = 1;
    both_optimizers(shape, single, COUNT(single));
}

/* Norms behind the branches. */
static nd_shape shape_with_norms_behind(void)
{
    nd_shape shape = shape_of(97, 76, false);
    shape.o_bias = shape.mlp_bias = shape.qk_norm = shape.post_norm = 1;
    return shape;
}

Test(mesh, norms_behind)
{
    static const mesh_case meshes[] = {
        {"norms behind, tp 2", 1, 1, 1, 2, 1},
        {"norms behind, fsdp 2 x cp 2 x tp 2", 1, 2, 2, 2, 1, .recompute = ND_RECOMPUTE_FULL},
    };
    static const mesh_case as_one[] = {
        {"norms of all heads, fsdp 2, micro-batch 2", 1, 2, 1, 1, 2},
        {"norms of all heads, hsdp 2 x 2 x cp 2", 2, 2, 2, 1, 1},
        {"norms of all heads, tp 2", 1, 1, 1, 2, 1},
        {"norms of all heads, fsdp 2 x cp 2 x tp 4", 1, 2, 2, 4, 1, .recompute = ND_RECOMPUTE_FULL},
    };
    static const mesh_case both[] = {
        {"norms before and behind, fsdp 2 x cp 2 x tp 2", 1, 2, 2, 2, 1,
         .recompute = ND_RECOMPUTE_FULL},
        {"norms before and behind, tp 2", 1, 1, 1, 2, 1, .recompute = ND_RECOMPUTE_SELECTIVE},
    };
    static const mesh_case neither = {"norms of all heads, 4 KV heads, tp 6", 1, 1, 1, 6, 3};
    nd_shape shape = shape_with_norms_behind();
    both_optimizers(shape, meshes, COUNT(meshes));
    shape.post_norm = 2;
    shape.family = ND_FAMILY_GEMMA3_TEXT;
    both_optimizers(shape, both, COUNT(both));
    shape = shape_with_norms_behind();
    shape.qk_norm = 2;
    shape.kv_heads = 2;
    both_optimizers(shape, as_one, COUNT(as_one));
    shape.heads = 12;
    shape.ffn = 72;
    shape.kv_heads = 4;
    both_optimizers(shape, &neither, 1);
}

Test(mesh, windows)
{
    static const mesh_case meshes[] = {
        {"windows, tp 2", 1, 1, 1, 2, 1},
        {"windows, cp 2", 1, 1, 2, 1, 1},
        {"windows, cp 2, ring", 1, 1, 2, 1, 1, .ring = true},
        {"windows, cp 4, micro-batch 2", 1, 1, 4, 1, 2},
        {"windows, cp 4, ring, micro-batch 2", 1, 1, 4, 1, 2, .ring = true},
        {"windows, cp 8, ring", 1, 1, 8, 1, 1, .ring = true},
        {"windows, cp 4, ulysses 2 of ring", 1, 1, 4, 1, 1, .ulysses = 2, .ring = true},
        {"windows, fsdp 2 x cp 2 x tp 2", 1, 2, 2, 2, 1, .recompute = ND_RECOMPUTE_FULL},
    };
    nd_shape shape = shape_of(97, 76, false);
    shape.window = 11;
    nd_layer_set_add(&shape.full, 0);
    both_optimizers(shape, meshes, COUNT(meshes));
}

static void recompute_all_modes(nd_shape shape)
{
    static const mesh_case base[] = {
        {"one", 1, 1, 1, 1, 1},
        {"fsdp 2 x cp 2 x tp 2", 1, 2, 2, 2, 1, .ring = true},
        {"cp 2 x tp 2, ulysses", 1, 1, 2, 2, 1, .ulysses = 2},
        {"hsdp 2 x 2 x tp 2", 2, 2, 1, 2, 1},
    };
    mesh_job job = job_of(shape, token_file(97), ND_OPTIMIZER_ADAMW);
    job.steps = 4;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        job.precision = bf16 ? ND_PRECISION_BF16 : ND_PRECISION_FP32;
        for (size_t i = 0; i < COUNT(base); i++) {
            mesh_expect_same_recomputed(&job, base[i]);
        }
    }
}

/* Recompute changes no bit, whatever it drops. */
Test(mesh, recompute_gives_the_same_bits)
{
    recompute_all_modes(shape_of(97, 76, false));
}

Test(mesh, recompute_with_switches)
{
    recompute_all_modes(shape_with_switches());
}

Test(mesh, recompute_with_norms_behind)
{
    recompute_all_modes(shape_with_norms_behind());
}

// SPDX-License-Identifier: Apache-2.0
/*
 * Separate documents in whole steps: packed rows give the loss and the gradient of the same rows
 * one by one, on any mesh; and nothing of a document reaches another one.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/rng.h"
#include "tests/parity/mesh_data.h"
#include "trainer/corpus/token_file.h"

enum { S = 32, VOCAB = 97, ROWS = 10, BLOCKS = 4 };

/* Four blocks of whole rows, with borders at places that no chunk of a cp rank begins at. The first
 * three rows alone are a block, in this order. A row of one token is in none. */
static const int lengths[ROWS] = {14, 11, 8, 33, 1, 2, 17, 13, 20, 9};

static tempdir dir;

TEMPDIR_SUITE(documents, tempdir_leave_empty);

static int32_t id_of(int row, int token)
{
    return (int32_t)(nd_rng_u64(9, (uint64_t)row, (uint64_t)token) % VOCAB);
}

typedef struct rows_file {
    nd_token_files out;
    nd_corpus_piece piece;
    char prefix[PATH_MAX];
} rows_file;

static void add_token(rows_file *f, int32_t id, bool counts)
{
    const int32_t at = (int32_t)f->piece.ids.count, span[2] = {at, at + 1};
    assert_ok(nd_ids_add(&f->piece.ids, &id, 1));
    assert_ok(counts ? ND_OK : nd_ids_add(&f->piece.spans, span, 2));
}

static void end_row(rows_file *f)
{
    const int32_t end = (int32_t)f->piece.ids.count;
    assert_ok(nd_ids_add(&f->piece.ends, &end, 1));
}

static void begin_file(const char *name, rows_file *f)
{
    memset(f, 0, sizeof *f);
    snprintf(f->prefix, sizeof f->prefix, "%s/%s", dir.path, name);
    assert_ok(nd_token_files_open(f->prefix, VOCAB, NULL, &f->out));
}

static void end_file(rows_file *f)
{
    assert_ok(nd_token_files_write(&f->out, &f->piece));
    assert_ok(nd_token_files_commit(&f->out));
    nd_token_files_fini(&f->out);
    free(f->piece.ids.data);
    free(f->piece.ends.data);
    free(f->piece.spans.data);
}

/* alone: each row is filled up to a block, of which only its own tokens count. */
static void write_rows(const char *name, bool alone, rows_file *f)
{
    begin_file(name, f);
    for (int r = 0; r < ROWS; r++) {
        for (int t = 0; t < (alone ? S + 1 : lengths[r]); t++) {
            const bool own = t < lengths[r];
            add_token(f, own ? id_of(r, t) : 0, own && t > r % 3);
        }
        end_row(f);
    }
    end_file(f);
}

static mesh_job job_of(const rows_file *f, nd_precision precision, bool separate)
{
    mesh_job job = mesh_job_on_tokens(f->prefix, mesh_small_llama(VOCAB), precision);
    job.format = ND_DATA_MEGATRON;
    job.sequence = S;
    job.steps = 1;
    job.global_batch = separate ? BLOCKS : ROWS;
    job.separate = separate;
    job.validates = true;
    job.optimizer = ND_OPTIMIZER_SGD;
    return job;
}

static const mesh_case meshes[] = {
    {"one", 1, 1, 1, 1, 1},
    {"one, batch 2", 1, 1, 1, 1, 2},
    {"recompute", 1, 1, 1, 1, 1, .recompute = ND_RECOMPUTE_FULL},
    {"tp 2", 1, 1, 1, 2, 1},
    {"cp 2", 1, 1, 2, 1, 1},
    {"cp 4, batch 2", 1, 1, 4, 1, 2},
    {"cp 2, ring", 1, 1, 2, 1, 1, .ring = true},
    {"cp 4, ring, recompute", 1, 1, 4, 1, 1, .ring = true, .recompute = ND_RECOMPUTE_SELECTIVE},
    {"cp 2, tp 2", 1, 1, 2, 2, 2},
    {"cp 4, ulysses", 1, 1, 4, 1, 1, .ulysses = 4},
    {"cp 4, ulysses 2 of ring, batch 2", 1, 1, 4, 1, 2, .ring = true, .ulysses = 2},
    {"cp 2, ulysses, tp 2, recompute", 1, 1, 2, 2, 1, .ulysses = 2, .recompute = ND_RECOMPUTE_FULL},
    {"fsdp 2, cp 2", 1, 2, 2, 1, 1},
};
enum { MESHES = sizeof meshes / sizeof *meshes };

/* Bounds: those of test_mesh.c in F32. In BF16 both round alike but for the order of sums, whose
 * operands have 8 bits: errors of single products are 2^-9, and their share in the norm of a
 * gradient is no larger than some of them; what leaks or is lost is a tenth and more. */
static void check_packed(nd_precision precision, double bound)
{
    rows_file packed, alone;
    write_rows("packed", false, &packed);
    write_rows("alone", true, &alone);
    const mesh_job one = job_of(&alone, precision, false), many = job_of(&packed, precision, true);
    mesh_result want = mesh_trained(&one, &meshes[0]);
    for (int m = 0; m < MESHES; m++) {
        mesh_result got = mesh_trained(&many, &meshes[m]);
        mesh_expect_near(&got, &want, (mesh_bounds){.loss = bound, .gradient = bound},
                         meshes[m].name);
        const double validation = fabs(got.validation / want.validation - 1);
        cr_assert_lt(validation, bound, "%s: the loss of a validation differs by %.2e",
                     meshes[m].name, validation);
    }
}

Test(documents, packed_rows_give_the_sums_of_rows_alone)
{
    check_packed(ND_PRECISION_FP32, 1e-5);
}

Test(documents, packed_rows_give_the_sums_of_rows_alone_in_bf16)
{
    check_packed(ND_PRECISION_BF16, 3e-2);
}

/* Whole rows, some as long as a block; or documents of one to five tokens, which stand in the order
 * of the file, and of which ranks exchange only keys that are seen. Enough for the blocks of a
 * step. */
static void write_drawn(const char *name, int seed, rows_file *f)
{
    begin_file(name, f);
    for (int r = 0, tokens = 0; tokens < 2 * BLOCKS * (S + 1); r++) {
        const uint64_t draw = nd_rng_u64(seed, (uint64_t)r, 0);
        const int other =
            seed == 0 && draw % 8 == 1 ? S + 1 : 1 + (int)(draw / 8 % (seed ? 5 : 14));
        const int length = draw % 4 == 0 ? 1 : other;
        for (int t = 0; t < length; t++) {
            add_token(f, id_of(r, t), seed == 1 || t > r % 3);
        }
        end_row(f);
        tokens += length;
    }
    end_file(f);
}

/* Against one worker with the same packing. Bounds: those above. With a scale for a tensor that of
 * a loss is from test_fp8_mesh.c, and gradients pass four products in each of two layers, which
 * round them to E5M2: each by up to 2^-3, 2^-3 / sqrt 3 in the mean square, otherwise in each of
 * two runs, since a scale that differs in its last bit moves all codes. */
static void check_drawn(nd_precision precision, mesh_bounds most)
{
    char name[96];
    static const mesh_case exchanges[] = {
        /* 16 tokens a rank, which FP8 products take */
        {"cp 4", 1, 1, 4, 1, 2},
        {"cp 4, ring", 1, 1, 4, 1, 2, .ring = true},
        {"cp 2, ulysses 2", 1, 1, 2, 1, 2, .ulysses = 2},
        {"cp 4, ulysses 4", 1, 1, 4, 1, 2, .ulysses = 4},
        {"cp 4, ulysses 2 of ring", 1, 1, 4, 1, 2, .ring = true, .ulysses = 2},
        {"cp 4, ulysses 2 of allgather", 1, 1, 4, 1, 2, .ulysses = 2},
    };
    for (int seed = 0; seed < 2; seed++) {
        rows_file drawn;
        write_drawn("drawn", seed, &drawn);
        mesh_job job = job_of(&drawn, precision, true);
        job.filter = "_proj";
        mesh_result want = mesh_trained(&job, &meshes[1]);
        for (size_t m = 0; m < 2 * sizeof exchanges / sizeof *exchanges; m++) {
            mesh_case mesh = exchanges[m / 2];
            mesh.tp = 1 + (int)m % 2;
            mesh_result got = mesh_trained(&job, &mesh);
            snprintf(name, sizeof name, "packing %d, %s, tp %d", seed, mesh.name, mesh.tp);
            mesh_expect_near(&got, &want, most, name);
        }
    }
}

Test(documents, drawn_packings_are_those_of_one_worker)
{
    check_drawn(ND_PRECISION_FP32, (mesh_bounds){.loss = 1e-5, .gradient = 1e-5});
}

Test(documents, drawn_packings_are_those_of_one_worker_in_bf16)
{
    check_drawn(ND_PRECISION_BF16, (mesh_bounds){.loss = 3e-2, .gradient = 3e-2});
}

Test(documents, drawn_packings_are_those_of_one_worker_in_fp8)
{
    check_drawn(ND_PRECISION_FP8,
                (mesh_bounds){.loss = 5e-3, .gradient = 0x1p-3 * sqrt(2 * 8 / 3.0)});
}

/* RoPE sees differences of positions alone, so these give the same but for rounding. */
Test(documents, positions_that_run_on_round_otherwise)
{
    rows_file packed;
    write_rows("packed", false, &packed);
    mesh_job job = job_of(&packed, ND_PRECISION_FP32, true);
    mesh_result restart = mesh_trained(&job, &meshes[0]);
    job.running = true;
    mesh_result running = mesh_trained(&job, &meshes[0]);
    cr_assert_neq(memcmp(restart.norm, running.norm, sizeof running.norm[0]), 0);
    cr_assert_lt(fabs(running.loss[0] / restart.loss[0] - 1), 1e-5);
}

/* Three documents, of which the middle one counts; a token of another one is changed. */
static void write_three(const char *name, int changed, rows_file *f)
{
    begin_file(name, f);
    for (int r = 0, at = 0; r < 3; r++) {
        for (int t = 0; t < lengths[r]; t++, at++) {
            add_token(f, (id_of(r, t) + (at == changed ? 1 : 0)) % VOCAB, r == 1 && t > 0);
        }
        end_row(f);
    }
    end_file(f);
}

static mesh_result run_three(const mesh_case *mesh, nd_precision precision, bool separate,
                             int changed)
{
    rows_file f;
    char name[32];
    snprintf(name, sizeof name, "three%d", changed);
    write_three(name, changed, &f);
    mesh_job job = job_of(&f, precision, separate);
    const int micro = (int)mesh->micro_batch * mesh->dp_shard;
    job.global_batch = micro; /* the only block, some times */
    return mesh_trained(&job, mesh);
}

Test(documents, no_bit_of_a_document_reaches_another_one)
{
    static const int changed[] = {0, 5, 13, 25, 29, 32}; /* of the first and the last document */
    char name[96];
    for (int m = 0; m < MESHES; m++) {
        const nd_precision precision = m % 2 ? ND_PRECISION_BF16 : ND_PRECISION_FP32;
        mesh_result want = run_three(&meshes[m], precision, true, -1);
        for (size_t i = 0; i < sizeof changed / sizeof *changed; i++) {
            mesh_result got = run_three(&meshes[m], precision, true, changed[i]);
            snprintf(name, sizeof name, "%s, token %d", meshes[m].name, changed[i]);
            mesh_expect_same(&got, &want, MESH_LOSSES | MESH_NORMS, name);
        }
    }
    mesh_result before = run_three(&meshes[0], ND_PRECISION_FP32, false, -1),
                after = run_three(&meshes[0], ND_PRECISION_FP32, false, 5);
    cr_assert_neq(memcmp(before.loss, after.loss, sizeof before.loss[0]), 0,
                  "joined documents do not see each other");
}

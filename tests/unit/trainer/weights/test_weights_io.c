// SPDX-License-Identifier: Apache-2.0
/* Weights of ranks that are threads, to a model folder and back on another mesh. The tables and the
 * block have more elements, also on one of four ranks, than a load or a save handles at a time. The
 * pieces of a block end within rows of down, which tp splits by columns. */
#include <criterion/criterion.h>
#include <unistd.h>

#include "runtime/base/rng.h"
#include "tests/support/tempdir.h"
#include "tests/unit/trainer/mesh_ranks.h"
#include "trainer/weights/weights.h"

enum { VOCAB = 40009, FFN = 12004, SEED = 5 };

typedef struct folder_job {
    const char *folder;
    nd_dtype dtype;
    int seed; /* above SEED */
    nd_family family;
} folder_job;

static nd_status save(nd_rank *rank, void *context)
{
    const folder_job *job = context;
    mesh_shards *shards;
    ND_TRY(mesh_shards_open(rank, false, &shards));
    ND_TRY(mesh_fill(shards->layout, SEED + job->seed, shards->fsdp.master));
    return nd_weights_save(&shards->fsdp, job->folder, job->dtype, false, NULL, NULL);
}

static nd_status compare_span(void *context, const nd_span *span)
{
    const float *master = context;
    for (int64_t i = 0; i < span->rows * span->cols; i++) {
        int64_t element = nd_span_global(span, i);
        float found = master[span->begin + i];
        float expected = mesh_param_value(SEED, span->param, element);
        ND_CHECK(found == expected, "element %lld of %s is %g, not %g", (long long)element,
                 span->param->name, (double)found, (double)expected);
    }
    return ND_OK;
}

static nd_status load_and_compare(const char *folder, mesh_shards *shards)
{
    nd_hf_reader *reader = NULL;
    nd_status status = ND_OK;
    ND_TRY(nd_hf_reader_open(folder, &reader));
    ND_TRY_OUT(nd_hf_reader_check(reader));
    ND_TRY_OUT(nd_weights_load(&shards->fsdp, reader));
    status = mesh_each_span(shards->layout, compare_span, shards->fsdp.master);
out:
    nd_hf_reader_close(reader);
    return status;
}

static nd_status load(nd_rank *rank, void *context)
{
    const folder_job *job = context;
    mesh_shards *shards;
    ND_TRY(mesh_shards_open(rank, false, &shards));
    return load_and_compare(job->folder, shards);
}

static void run(nd_mesh mesh, nd_status (*body)(nd_rank *, void *), folder_job *context)
{
    mesh_ranks job = mesh_ranks_of(mesh, 1, false, body, context);
    job.shape.vocab = VOCAB;
    job.shape.ffn = FFN;
    job.shape.family = context->family;
    job.shape.qkv_bias = context->family == ND_FAMILY_QWEN2;
    job.shape.qk_norm = context->family == ND_FAMILY_QWEN3;
    job.shape.rms_eps = 1e-5;
    job.shape.bos_id = job.shape.eos_id = -1;
    assert_ok(mesh_ranks_run(&job));
}

static tempdir dir;

TEMPDIR_SUITE(weights_io, tempdir_leave_empty);

/* Each is loaded on the mesh of the next one. BF16 holds the values too. The families have biases,
 * norms of heads, and files with one tensor for q k v and one for gate and up. */
Test(weights_io, families_come_back_on_any_mesh)
{
    static const struct {
        nd_mesh mesh;
        nd_dtype dtype;
        nd_family family;
    } cases[] = {{{{1, 1, 2, 1, 2}}, ND_DTYPE_F32, ND_FAMILY_QWEN2},
                 {{{1, 2, 1, 1, 2}}, ND_DTYPE_F32, ND_FAMILY_QWEN3},
                 {{{1, 1, 3, 1, 1}}, ND_DTYPE_F32, ND_FAMILY_PHI3},
                 {{{1, 1, 2, 1, 2}}, ND_DTYPE_BF16, ND_FAMILY_LLAMA},
                 {{{1, 2, 1, 1, 2}}, ND_DTYPE_F32, ND_FAMILY_LLAMA},
                 {{{1, 1, 3, 1, 1}}, ND_DTYPE_BF16, ND_FAMILY_LLAMA},
                 {{{1, 1, 1, 1, 1}}, ND_DTYPE_F32, ND_FAMILY_LLAMA}};
    enum { CASES = sizeof cases / sizeof *cases };
    for (int c = 0; c < CASES; c++) {
        char name[16];
        nd_hf_reader *reader = NULL;
        float value = 0;
        snprintf(name, sizeof name, "model-%d", c);
        folder_job job = {tempdir_file(&dir, name), cases[c].dtype, 0, cases[c].family};
        run(cases[c].mesh, save, &job);
        run(cases[(c + 1) % CASES].mesh, load, &job);
        assert_ok(nd_hf_reader_open(job.folder, &reader));
        cr_expect_eq(nd_hf_reader_read(reader, "model.layers.0.self_attn.qkv_proj.weight", 0, 1,
                                       &value) == ND_OK,
                     cases[c].family == ND_FAMILY_PHI3, "case %d", c);
        nd_hf_reader_close(reader);
    }
}

/* Each rank reads another folder, so that an element tells which rank has read it. */

enum { READERS = 4 };

typedef struct reader_job {
    char folders[READERS][4096]; /* of the ranks */
    bool shrinks;                /* that of rank 1, once it is open */
    bool leaves;                 /* rank 1, instead of loading */
} reader_job;

typedef struct reader_check {
    const nd_rank *rank;
    const nd_fsdp *fsdp;
    bool kept; /* the BF16 weights that a rank keeps, not the F32 master weights */
} reader_check;

/* Returns the rank that reads a parameter, of dp_replicate 2 x tp 2 without shards. */
static int reader_of(const nd_rank *rank, const nd_param *p)
{
    nd_coord reader = rank->coord;
    reader.at[ND_AXIS_DP_REPLICATE] = p->unit->index % 2;
    if (p->split == ND_SPLIT_NONE) {
        reader.at[ND_AXIS_TP] = p->unit->index / 2 % 2;
    }
    return nd_mesh_rank_of(&rank->mesh, reader);
}

static nd_status compare_reader(void *context, const nd_span *span)
{
    const reader_check *c = context;
    const nd_param *p = span->param;
    const int rank = reader_of(c->rank, p);
    const nd_bf16 *kept = c->kept ? nd_fsdp_kept(c->fsdp, p->unit, p->segment) : NULL;
    const int64_t begin = span->begin - p->unit->segments[p->segment].shard_offset;
    for (int64_t i = 0; i < span->rows * span->cols; i++) {
        int64_t element = nd_span_global(span, i);
        float found = kept ? nd_bf16_to_f32(kept[begin + i]) : c->fsdp->master[span->begin + i];
        float expected = mesh_param_value((uint64_t)(SEED + rank), p, element);
        ND_CHECK(found == expected, "rank %d: element %lld of %s is %g, not %g of rank %d",
                 c->rank->rank, (long long)element, p->name, (double)found, (double)expected, rank);
    }
    return ND_OK;
}

static nd_status load_own(nd_rank *rank, void *context)
{
    const reader_job *job = context;
    mesh_shards *shards;
    nd_hf_reader *reader = NULL;
    nd_status status = ND_OK;
    ND_TRY(mesh_shards_open(rank, false, &shards));
    ND_TRY_OUT(nd_hf_reader_open(job->folders[rank->rank], &reader));
    if (job->shrinks && rank->rank == 1) {
        char path[4200];
        snprintf(path, sizeof path, "%s/model.safetensors", job->folders[1]);
        ND_CHECK(truncate(path, 4096) == 0, "cannot truncate %s", path);
    }
    if (job->leaves && rank->rank == 1) {
        goto out;
    }
    status = nd_weights_load(&shards->fsdp, reader);
    if (job->shrinks || job->leaves) {
        const nd_failure_cause expected = job->leaves       ? ND_CAUSE_OWN
                                          : rank->rank == 1 ? ND_CAUSE_LOCAL
                                                            : ND_CAUSE_ELSEWHERE;
        ND_CHECK(status == ND_ERR_IO && nd_error_last()->cause == expected,
                 "rank %d: %d, cause %d: %s", rank->rank, (int)status, (int)nd_error_last()->cause,
                 nd_error_last()->message);
        status = ND_OK;
    } else if (status == ND_OK) {
        reader_check check = {rank, &shards->fsdp, false};
        status = mesh_each_span(shards->layout, compare_reader, &check);
    }
out:
    nd_hf_reader_close(reader);
    return status;
}

static nd_status load_converted(nd_rank *rank, void *context)
{
    const reader_job *job = context;
    nd_config config = *rank->config;
    nd_hf_reader *reader = NULL;
    nd_model *m = NULL;
    config.train.precision = ND_PRECISION_BF16;
    rank->config = &config;
    ND_TRY(mesh_model_open(rank, &(nd_model_options){.forward_only = true}, 99, &m));
    nd_status status = nd_hf_reader_open(job->folders[rank->rank], &reader);
    status = status == ND_OK ? nd_weights_load(&m->fsdp, reader) : status;
    if (status == ND_OK) {
        reader_check check = {rank, &m->fsdp, true};
        status = mesh_each_span(m->layout, compare_reader, &check);
    }
    nd_hf_reader_close(reader);
    return status;
}

Test(weights_io, what_several_ranks_hold_is_read_by_one_of_them)
{
    static reader_job readers;
    mesh_ranks job = mesh_ranks_of((nd_mesh){{1, 1, 1, 1, 1}}, 3, false, save, NULL);
    job.shape.rms_eps = 1e-5;
    job.shape.bos_id = job.shape.eos_id = -1;
    for (int r = 0; r < READERS; r++) {
        char name[16];
        snprintf(name, sizeof name, "model-%d", r);
        snprintf(readers.folders[r], sizeof readers.folders[r], "%s", tempdir_file(&dir, name));
        folder_job saved = {readers.folders[r], ND_DTYPE_F32, r};
        job.context = &saved;
        assert_ok(mesh_ranks_run(&job));
    }
    job.mesh = (nd_mesh){{1, 2, 1, 1, 2}};
    job.body = load_own;
    job.context = &readers;
    assert_ok(mesh_ranks_run(&job));
    job.body = load_converted;
    assert_ok(mesh_ranks_run(&job));
    job.body = load_own;
    readers.leaves = true; /* the others lose a rank, and no read of theirs has failed */
    assert_ok(mesh_ranks_run(&job));
    readers.leaves = false;
    readers.shrinks = true;
    assert_ok(mesh_ranks_run(&job));
}

/* More bytes than are passed on at a time, which are no whole words, of each rank in turn. */
static nd_status share_bytes(nd_rank *rank, void *context)
{
    unsigned char bytes[10003];
    for (int owner = 0; owner < rank->world_size; owner++) {
        for (size_t i = 0; i < sizeof bytes; i++) { /* the others have something else there */
            bytes[i] = (unsigned char)(i % 251 + (size_t)rank->rank);
        }
        ND_TRY(nd_shared_bytes(rank, ND_GROUP_WORLD, bytes, sizeof bytes, rank->rank == owner));
        for (size_t i = 0; i < sizeof bytes; i++) {
            ND_CHECK(bytes[i] == (unsigned char)(i % 251 + (size_t)owner), "byte %zu", i);
        }
    }
    return ND_OK;
}

Test(weights_io, bytes_of_one_rank_reach_the_others)
{
    const mesh_ranks job = mesh_ranks_of((nd_mesh){{1, 1, 1, 1, 3}}, 1, false, share_bytes, NULL);
    assert_ok(mesh_ranks_run(&job));
}

/* Initial values. */

static nd_status check_fresh(void *context, const nd_span *span)
{
    const float *master = context;
    const nd_param *p = span->param;
    for (int64_t i = 0; i < span->rows * span->cols; i++) {
        uint64_t element = (uint64_t)nd_span_global(span, i);
        float found = master[span->begin + i];
        float expected =
            p->init == ND_INIT_ONE ? 1.0f : 0.5f * nd_rng_normal(SEED, p->random_stream, element);
        ND_CHECK(found == expected, "element %lld of %s is %g, not %g", (long long)element, p->name,
                 (double)found, (double)expected);
    }
    return ND_OK;
}

static nd_status init(nd_rank *rank, void *context)
{
    mesh_shards *shards;
    ND_TRY(mesh_shards_open(rank, false, &shards));
    ND_TRY(nd_weights_init(&shards->fsdp, 0.5, SEED));
    return mesh_each_span(shards->layout, check_fresh, shards->fsdp.master);
}

/* Norms longer than the ones that are copied at a time. */
Test(weights_io, initial_values_depend_on_the_element_alone)
{
    static const nd_mesh meshes[] = {{{1, 1, 1, 1, 1}}, {{1, 1, 3, 1, 2}}};
    for (int m = 0; m < 2; m++) {
        mesh_ranks job = mesh_ranks_of(meshes[m], 1, false, init, NULL);
        job.shape.hidden = 16400;
        job.shape.vocab = 5;
        job.shape.ffn = 4;
        job.shape.heads = job.shape.kv_heads = 2;
        job.shape.head_dim = 2;
        assert_ok(mesh_ranks_run(&job));
    }
}

// SPDX-License-Identifier: Apache-2.0
/*
 * A model that generates holds what its plan says, also while its weights are loaded: the pages of
 * this process against the plan, of a model of 36 million parameters in a folder of F32 values.
 * Without conversion on the way its F32 weights would be 144 MB more. In FP8 linears are held as
 * codes alone.
 */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/support/skip.h"
#include "tests/support/tempdir.h"
#include "tests/unit/trainer/mesh_ranks.h"
#include "trainer/generate/generate.h"
#include "trainer/weights/weights.h"

enum {
    LAYERS = 4,
    HIDDEN = 512,
    FFN = 4096,
    VOCAB = 8192,
    SLACK = 12 << 20 /* what the reader and the C library hold, and pages that are rounded up */
};

static void set_sizes(nd_shape *s)
{
    s->vocab = VOCAB;
    s->hidden = HIDDEN;
    s->ffn = FFN;
    s->heads = s->kv_heads = 8;
    s->head_dim = 64;
    s->rms_eps = 1e-5;
    s->bos_id = s->eos_id = -1;
}

static void write_model(const char *folder, const nd_shape *shape)
{
    enum { PIECE = 1 << 16 };
    static float piece[PIECE];
    const nd_mesh mesh = {{1, 1, 1, 1, 1}};
    const nd_layout_options options = {.shape = shape, .mesh = &mesh};
    const nd_hf_writer_options writing = {.shape = *shape, .dtype = ND_DTYPE_F32};
    nd_layout *layout = NULL;
    nd_hf_writer *writer = NULL;
    cr_assert_eq(nd_layout_create(&options, &layout), ND_OK);
    cr_assert_eq(nd_hf_writer_open(folder, &writing, &writer), ND_OK);
    for (int64_t i = 0; i < PIECE; i++) {
        piece[i] = mesh_value(7, i);
    }
    for (int i = 0; i < layout->param_count; i++) {
        const int64_t count = layout->params[i].rows * layout->params[i].cols;
        for (int64_t at = 0; at < count; at += PIECE) {
            const int64_t n = count - at < PIECE ? count - at : PIECE;
            cr_assert_eq(nd_hf_writer_write(writer, layout->params[i].name, at, n, piece), ND_OK);
        }
    }
    cr_assert_eq(nd_hf_writer_commit(writer), ND_OK);
    nd_layout_destroy(layout);
}

/* Kilobytes of this process: VmRSS or VmHWM, the most since forget_peak. */
static int64_t kilobytes(const char *key)
{
    char line[256];
    long long found = -1;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && found < 0 && fgets(line, sizeof line, f)) {
        if (strncmp(line, key, strlen(key)) == 0) {
            sscanf(line + strlen(key), ": %lld", &found);
        }
    }
    if (f) {
        fclose(f);
    }
    return found;
}

static bool forget_peak(void)
{
    int fd = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);
    bool done = fd >= 0 && write(fd, "5", 1) == 1;
    if (fd >= 0) {
        close(fd);
    }
    return done;
}

typedef struct load_job {
    const char *folder;
    int64_t before, peak; /* bytes */
    size_t planned, weights;
    int64_t rows; /* of a call */
} load_job;

static nd_status load_body(nd_rank *rank, void *context)
{
    static const nd_generate_options sizes = {.batch = 1, .rows = 17, .capacity = 32};
    load_job *job = context;
    nd_hf_reader *reader = NULL;
    nd_generator *g = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_hf_reader_open(job->folder, &reader));
    job->before = kilobytes("VmRSS") * 1024;
    ND_TRY_OUT(nd_generator_create(rank, &sizes, &g));
    ND_TRY_OUT(nd_generator_commit(g));
    ND_TRY_OUT(nd_weights_load(&g->model->fsdp, reader));
    job->peak = kilobytes("VmHWM") * 1024;
    job->planned = g->plan.total;
    job->rows = g->cache.tokens;
    job->weights = nd_memplan_class_bytes(&g->plan, ND_MEM_WEIGHTS) +
                   nd_memplan_class_bytes(&g->plan, ND_MEM_STATE);
out:
    nd_generator_destroy(g);
    nd_hf_reader_close(reader);
    return status;
}

Test(load_memory, weights_are_converted_as_they_are_read)
{
    static const struct {
        nd_precision precision;
        double linear, other; /* bytes for each parameter */
    } cases[] = {
        {ND_PRECISION_FP8, 1.0, 2.0}, {ND_PRECISION_BF16, 2.0, 2.0}, {ND_PRECISION_FP32, 4.0, 4.0}};
    const double linears = LAYERS * (4.0 * HIDDEN * HIDDEN + 3.0 * HIDDEN * FFN);
    size_t least = 0;
    tempdir dir;
    load_job load = {0};
    mesh_ranks job = mesh_ranks_of((nd_mesh){{1, 1, 1, 1, 1}}, LAYERS, false, load_body, &load);
    set_sizes(&job.shape);
    const double parameters = (double)nd_shape_parameters(&job.shape);
    tempdir_make(&dir);
    load.folder = tempdir_file(&dir, "model");
    write_model(load.folder, &job.shape);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        job.config.train.precision = cases[i].precision;
        if (!forget_peak()) {
            skip_test("this system does not forget the peak of a process's memory");
        }
        cr_assert_eq(mesh_ranks_run(&job), ND_OK, "%s", nd_error_last()->message);
        /* As many as the FP8 products of every backend take. */
        cr_expect_eq(load.rows, cases[i].precision == ND_PRECISION_FP8 ? 32 : 17);
        const double held = (double)(load.peak - load.before);
        const double bytes = cases[i].linear * linears + cases[i].other * (parameters - linears);
        cr_expect_gt(load.planned, least, "a plan of %zu bytes, %zu in less precision",
                     load.planned, least);
        least = load.planned;
        cr_expect_leq(fabs((double)load.weights - bytes), 0.01 * parameters,
                      "%zu bytes for %.0f parameters", load.weights, parameters);
        cr_expect_leq(held, (double)load.planned + SLACK, "a peak of %.0f, planned %zu", held,
                      load.planned);
        cr_expect_geq(held, (double)load.weights - SLACK, "a peak of %.0f, weights %zu", held,
                      load.weights);
    }
    tempdir_remove(&dir);
}

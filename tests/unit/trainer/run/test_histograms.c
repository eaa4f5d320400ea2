// SPDX-License-Identifier: Apache-2.0
/* Each element of each tensor is counted once, however ranks share it. */
#include "trainer/run/histograms.h"

#include <criterion/criterion.h>
#include <string.h>

#include "tests/unit/trainer/mesh_ranks.h"

/* What rank 0's sink got. */
typedef struct received {
    int64_t elements; /* of all tensors' weights */
    int tensors;
} received;

static nd_status take(void *self, const nd_histogram_record *record)
{
    received *r = self;
    if (strncmp(record->tag, "weights/", strlen("weights/")) == 0) {
        r->tensors++;
        for (int i = 0; i < ND_HISTOGRAM_BUCKETS; i++) {
            r->elements += record->histogram->count[i];
        }
    }
    return ND_OK;
}

/* The test has it. */
static void give_back(void *self)
{
}

static nd_status count_body(nd_rank *rank, void *context)
{
    nd_memplan plan;
    nd_trainer trainer = {.rank = rank, .position.step = 2};
    nd_run_histograms histograms = {0};
    nd_sinks sinks = {0};
    nd_status status = ND_OK;
    ND_TRY(mesh_model_open(rank, 3, &plan, &trainer.model));
    if (rank->rank == 0) {
        ND_TRY_OUT(nd_sinks_add(&sinks, (nd_sink){.name = "test",
                                                  .required = true,
                                                  .self = context,
                                                  .histogram = take,
                                                  .close = give_back}));
    }
    ND_TRY_OUT(nd_run_histograms_init(&histograms, &trainer));
    ND_TRY_OUT(nd_run_histograms_step(&histograms, &sinks));
    ND_TRY_OUT(nd_sinks_flush(&sinks));
out:
    nd_sinks_close(&sinks);
    nd_run_histograms_fini(&histograms);
    mesh_model_close(&plan, trainer.model);
    return status;
}

Test(histograms, each_element_counts_once_on_any_mesh)
{
    static const nd_mesh meshes[] = {{{1, 1, 1, 1, 1}},
                                     {{1, 1, 1, 1, 4}},
                                     {{1, 2, 2, 1, 1}},
                                     {{1, 1, 2, 1, 2}},
                                     {{1, 1, 1, 2, 2}}};
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        received all = {0};
        mesh_ranks job = {.mesh = meshes[i],
                          .shape = mesh_shape_of(2, false),
                          .config = mesh_config_of(),
                          .body = count_body,
                          .context = &all};
        job.config.log.histogram_interval = 2;
        cr_assert_eq(mesh_ranks_run(&job), ND_OK, "mesh %zu: %s", i, nd_error_last()->message);
        cr_expect_eq(all.tensors, 2 * 9 + 3, "mesh %zu: %d tensors", i, all.tensors);
        cr_expect_eq(all.elements, nd_shape_parameters(&job.shape), "mesh %zu: %lld of %lld", i,
                     (long long)all.elements, (long long)nd_shape_parameters(&job.shape));
    }
}

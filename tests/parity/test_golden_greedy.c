// SPDX-License-Identifier: Apache-2.0
/* Greedy texts through the cache are those of transformers (scripts/goldens/greedy.py). */
#include <criterion/criterion.h>

#include "tests/parity/golden_run.h"
#include "tests/support/tempdir.h"
#include "trainer/generate/generate.h"

enum { NEW = 20, TEXTS = 3, CAPACITY = 64 };

/* A model of another name with lists of layers, as bits. */
typedef struct model {
    const char *name, *base;
    uint64_t full, unturned;
} model;

static void check_texts(nd_generator *g, const nd_golden *golden, const char *name)
{
    const nd_generate_rules rules = {.sampling = {.top_p = 1}};
    int32_t ids[TEXTS][NEW];
    const int32_t *want[TEXTS];
    nd_sequence sequences[TEXTS];
    for (int i = 0; i < TEXTS; i++) {
        char key[64];
        snprintf(key, sizeof key, "%s.%d", name, i);
        const nd_safetensors_tensor *text = nd_golden_find(golden, key);
        cr_assert_not_null(text, "%s", key);
        want[i] = nd_golden_i32(golden, key, -1);
        sequences[i] = (nd_sequence){.prompt = want[i],
                                     .prompt_count = text->shape[0] - NEW,
                                     .max_new = NEW,
                                     .request = (uint64_t)i,
                                     .ids = ids[i]};
    }
    assert_ok(nd_generator_run(g, sequences, TEXTS, &rules));
    for (int i = 0; i < TEXTS; i++) {
        for (int n = 0; n < NEW; n++) {
            cr_assert_eq(ids[i][n], want[i][sequences[i].prompt_count + n],
                         "%s: token %d of text %d is %d", name, n, i, ids[i][n]);
        }
    }
}

static void check_model(const model *m)
{
    const nd_generate_options options = {.batch = 2, .rows = 6, .capacity = CAPACITY};
    nd_golden *golden = NULL;
    nd_generator *g = NULL;
    golden_run f;
    golden_run_open(&f, m->base, (golden_options){ND_PRECISION_FP32});
    f.rank.shape.full.bits[0] = m->full ? m->full : f.rank.shape.full.bits[0];
    f.rank.shape.unturned.bits[0] = m->unturned ? m->unturned : f.rank.shape.unturned.bits[0];
    assert_ok(nd_golden_open("greedy/greedy.safetensors", &golden));
    assert_ok(nd_generator_create(&f.rank, &options, &g));
    assert_ok(nd_generator_commit(g));
    assert_ok(nd_weights_load(&g->model->fsdp, f.weights));
    check_texts(g, golden, m->name);
    nd_generator_destroy(g);
    nd_golden_close(golden);
    golden_run_close(&f);
}

#define GOLDEN(name_)                                                                              \
    Test(golden_greedy, name_)                                                                     \
    {                                                                                              \
        check_model(&(model){.name = #name_, .base = #name_});                                     \
    }
EACH_FAMILY_GOLDEN(GOLDEN)

Test(golden_greedy, windows_in_a_list_of_layers)
{
    check_model(&(model){.name = "ministral_lists", .base = "ministral", .full = 1 << 0});
}

Test(golden_greedy, rope_in_a_list_of_layers)
{
    check_model(&(model){.name = "smollm3_lists", .base = "smollm3", .unturned = 1 << 0});
}

// SPDX-License-Identifier: Apache-2.0
/* Each number of a model and of a configuration at its edges, one at a time: no reader, plan or op
 * may stumble over it. */
#include <criterion/criterion.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "tests/e2e/mutate.h"
#include "tests/support/inputs.h"

TestSuite(mutated_numbers, .init = mutate_setup, .fini = mutate_teardown);

static const char *const edges[] = {"-1",
                                    "0",
                                    "1",
                                    "3",
                                    "17",
                                    "257",
                                    "4096",
                                    "65537",
                                    "1048576",
                                    "16777216",
                                    "2147483647",
                                    "2147483648",
                                    "1099511627776",
                                    "9223372036854775807"};
enum { EDGES = sizeof edges / sizeof *edges, STEP_MAX = 257 };

Test(mutated_numbers, of_a_model)
{
    static const char *const keys[] = {"vocab_size",
                                       "hidden_size",
                                       "intermediate_size",
                                       "num_hidden_layers",
                                       "num_attention_heads",
                                       "num_key_value_heads",
                                       "max_position_embeddings",
                                       "head_dim"};
    for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
        inputs_write_model(mutate_dir(), 16, 32, 1);
        json_t *model = json_load_file(tempdir_file(mutate_dir(), "model.json"), 0, NULL);
        cr_assert(model);
        for (size_t e = 0; e < EDGES; e++) {
            char name[128];
            long long value = strtoll(edges[e], NULL, 10);
            snprintf(name, sizeof name, "%s = %s", keys[k], edges[e]);
            json_object_set_new(model, keys[k], json_integer(value));
            cr_assert_eq(json_dump_file(model, tempdir_file(mutate_dir(), "model.json"), 0), 0);
            mutate_judge(name, "check" MUTATE_INPUT MUTATE_TEXT);
            if (value <= STEP_MAX) { /* a step of a larger model takes too long */
                mutate_judge(name, MUTATE_TRAIN MUTATE_TEXT);
            }
        }
        json_decref(model);
    }
}

/* Types of fields.def: numbers, then others. */
enum { TYPE_INT, TYPE_REAL, TYPE_PAIR, TYPE_BOOL, TYPE_CHOICE, TYPE_TEXT, TYPE_LIST };

Test(mutated_numbers, of_a_configuration)
{
    static const struct {
        const char *key;
        int type;
    } fields[] = {
#define ND_FIELD(section, key, type, ...) {#section "." #key, TYPE_##type},
#include "runtime/config/fields.def"
    };
    for (size_t f = 0; f < sizeof fields / sizeof *fields; f++) {
        for (size_t e = 0; e < EDGES && fields[f].type <= TYPE_REAL; e++) {
            char name[128], arguments[1024];
            /* Each thread has a few MiB, which Meson's MALLOC_PERTURB_ fills: too much for CI. */
            if (strcmp(fields[f].key, "launch.threads_per_worker") == 0 &&
                strtoll(edges[e], NULL, 10) == 4096) {
                continue;
            }
            snprintf(name, sizeof name, "%s = %s", fields[f].key, edges[e]);
            snprintf(arguments, sizeof arguments, "check" MUTATE_INPUT MUTATE_TEXT " --set %s=%s",
                     fields[f].key, edges[e]);
            mutate_judge(name, arguments);
        }
    }
}

// SPDX-License-Identifier: Apache-2.0
/* Each number of a model and of a configuration at its edges, one at a time: no reader, plan or op
 * may stumble over it. */
#include <criterion/criterion.h>
#include <jansson.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tests/e2e/mutate.h"
#include "tests/support/inputs.h"

TestSuite(mutated_numbers, .init = mutate_setup, .fini = mutate_teardown);

static const long long edges[] = {-1,        0,         1,         3,        17,
                                  257,       4096,      65537,     1 << 20,  1 << 24,
                                  INT32_MAX, 1ll << 31, 1ll << 40, INT64_MAX};
enum { EDGES = sizeof edges / sizeof *edges };

/* Gives a key of the file's object another number. */
static void set_number(const char *file, const char *key, long long value)
{
    json_t *object = json_load_file(tempdir_file(mutate_dir(), file), 0, NULL);
    cr_assert_eq(json_object_set_new(object, key, json_integer(value)), 0);
    cr_assert_eq(json_dump_file(object, tempdir_file(mutate_dir(), file), 0), 0);
    json_decref(object);
}

Test(mutated_numbers, of_a_model)
{
    /* A step of a model above `most` takes too long or too much memory. */
    static const struct {
        const char *key;
        long long most;
    } keys[] = {{"vocab_size", 65537},
                {"hidden_size", 257},
                {"intermediate_size", 65537},
                {"num_hidden_layers", 257},
                {"num_attention_heads", 257},
                {"num_key_value_heads", 257},
                {"max_position_embeddings", 1048576},
                {"head_dim", 257}};
    for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
        inputs_write_model(mutate_dir(), 16, 32, 1);
        for (size_t e = 0; e < EDGES; e++) {
            char name[128];
            snprintf(name, sizeof name, "%s = %lld", keys[k].key, edges[e]);
            set_number("model.json", keys[k].key, edges[e]);
            mutate_judge(name, "check" MUTATE_INPUT MUTATE_TEXT);
            if (edges[e] <= keys[k].most) {
                mutate_judge(name, MUTATE_TRAIN MUTATE_TEXT);
            }
        }
    }
}

/* Types of fields.def: numbers, then others. */
enum {
    TYPE_INT,
    TYPE_REAL,
    TYPE_PAIR,
    TYPE_BOOL,
    TYPE_CHOICE,
    TYPE_CHOICES,
    TYPE_TEXT,
    TYPE_LIST,
    TYPE_SOURCES
};

/* Values above these are only checked, not trained. */
static const struct {
    const char *key;
    long long most;
} too_long[] = {
    {"launch.threads_per_worker", 17}, /* each has a stack, and they share the CPUs of the test */
    {"train.steps", 257},
    {"train.micro_batch_size", 257},
    {"train.gradient_accumulation_steps", 257},
};

/* The arguments that make a run use the fields whose names begin with `begin`. */
static const struct {
    const char *begin, *arguments;
} uses[] = {
    {"fp8.", " --set train.precision=fp8 --set fp8.recipe=delayed --set fp8.filter=*"},
    {"checkpoint.", " --set checkpoint.interval=1"},
    {"train.validation_", " --set data.validation_path=text.txt"},
    {"optimizer.decay_steps", " --set optimizer.schedule=wsd"},
};

static bool is_trained(const char *key, long long value)
{
    for (size_t i = 0; i < sizeof too_long / sizeof *too_long; i++) {
        if (strcmp(key, too_long[i].key) == 0 && value > too_long[i].most) {
            return false;
        }
    }
    return true;
}

static const char *use_of(const char *key)
{
    for (size_t i = 0; i < sizeof uses / sizeof *uses; i++) {
        if (strncmp(key, uses[i].begin, strlen(uses[i].begin)) == 0) {
            return uses[i].arguments;
        }
    }
    return "";
}

/* Checks the configuration with the field's value, and trains one step if it is good. Returns
 * whether a step was trained. */
static bool judge_field(const char *key, long long value)
{
    char name[128], arguments[1024];
    snprintf(name, sizeof name, "%s = %lld", key, value);
    snprintf(arguments, sizeof arguments, "check" MUTATE_INPUT MUTATE_TEXT "%s --set %s=%lld",
             use_of(key), key, value);
    if (mutate_judge(name, arguments) != 0 || !is_trained(key, value)) {
        return false;
    }
    snprintf(arguments, sizeof arguments, MUTATE_TRAIN MUTATE_TEXT "%s --set %s=%lld", use_of(key),
             key, value);
    return mutate_judge(name, arguments) == 0;
}

Test(mutated_numbers, of_a_configuration)
{
    static const struct {
        const char *key;
        int type;
    } fields[] = {
#define TYPE_CHOICE(type)                 TYPE_CHOICE
#define ND_FIELD(section, key, type, ...) {#section "." #key, TYPE_##type},
#include "runtime/config/fields.def"
    };
    int trained = 0;
    for (size_t f = 0; f < sizeof fields / sizeof *fields; f++) {
        for (size_t e = 0; e < EDGES && fields[f].type <= TYPE_REAL; e++) {
            /* Each thread has a few MiB, which Meson's MALLOC_PERTURB_ fills: too much for CI. */
            if (strcmp(fields[f].key, "launch.threads_per_worker") == 0 && edges[e] == 4096) {
                continue;
            }
            trained += judge_field(fields[f].key, edges[e]);
        }
    }
    fprintf(stderr, "%d configurations were trained\n", trained);
    cr_assert_gt(trained, 150);
}

#define SAVED_CONFIG        "saved/model/config.json"
#define SAVED               " --model saved/model --model-verify false"
#define USING               " --log-level error --precision fp32 --threads-per-worker 1" SAVED
#define USE(command, flags) command USING flags
#define GENERATING          USE("generate", " --prompt-file prompts.jsonl")
#define EVALUATING          USE("eval", " --data text.txt --sequence-length 32")

static void save_model(void)
{
    mutate_write("prompts.jsonl", "{\"ids\": [1, 2]}\n{\"ids\": [3], \"max_new_tokens\": 2}\n");
    mutate_run("train" MUTATE_INPUT MUTATE_TEXT
               " --num-steps 1 --set output.dir=saved --set output.save_model=true");
}

/* The numbers of a saved model beside weights that do not change with them. */
Test(mutated_numbers, of_a_model_that_is_used)
{
    static const char *const keys[] = {"vocab_size",
                                       "hidden_size",
                                       "intermediate_size",
                                       "num_hidden_layers",
                                       "num_attention_heads",
                                       "num_key_value_heads",
                                       "max_position_embeddings",
                                       "head_dim",
                                       "eos_token_id",
                                       "rope_theta"};
    static mutate_file good;
    int used = 0;
    save_model();
    mutate_read(SAVED_CONFIG, &good);
    for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
        for (size_t e = 0; e < EDGES; e++) {
            char name[128];
            snprintf(name, sizeof name, "%s = %lld", keys[k], edges[e]);
            set_number(SAVED_CONFIG, keys[k], edges[e]);
            used += mutate_judge(name, GENERATING " --max-new-tokens 3") == 0;
            used += mutate_judge(name, EVALUATING) == 0;
        }
        tempdir_write(mutate_dir(), SAVED_CONFIG, good.bytes, good.size);
    }
    cr_assert_gt(used, 20, "%d", used);
}

/* Flags with numbers, for a model with room for long sequences. */
Test(mutated_numbers, of_generate_and_eval)
{
    static const struct {
        const char *command, *flag;
        long long most; /* more texts or tokens take too long */
    } flags[] = {
        {GENERATING, "--max-new-tokens", 257},
        {GENERATING " --max-new-tokens 3", "--max-batch", INT64_MAX},
        {GENERATING " --max-new-tokens 3", "--prefill-chunk", INT64_MAX},
        {GENERATING " --max-new-tokens 3", "--top-k", INT64_MAX},
        {GENERATING " --max-new-tokens 3", "--seed", INT64_MAX},
        {GENERATING " --max-new-tokens 3 --temperature 1 --seed 2", "--top-p", INT64_MAX},
        {GENERATING " --max-new-tokens 3", "--temperature", INT64_MAX},
        {USE("generate", " --interactive"), "--context", INT64_MAX},
        {USE("eval", " --serve-stdin"), "--context", INT64_MAX},
        {USE("eval", " --data text.txt"), "--sequence-length", 4096},
        {EVALUATING, "--micro-batch-size", 257},
    };
    save_model();
    set_number(SAVED_CONFIG, "max_position_embeddings", 1 << 20);
    for (size_t f = 0; f < sizeof flags / sizeof *flags; f++) {
        for (size_t e = 0; e < EDGES; e++) {
            char name[128], arguments[512];
            if (edges[e] > flags[f].most && edges[e] < 1ll << 31) {
                continue;
            }
            snprintf(name, sizeof name, "%s %lld", flags[f].flag, edges[e]);
            snprintf(arguments, sizeof arguments, "%s %s %lld", flags[f].command, flags[f].flag,
                     edges[e]);
            mutate_judge(name, arguments);
        }
    }
}

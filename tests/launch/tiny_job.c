// SPDX-License-Identifier: Apache-2.0
#include "tests/launch/tiny_job.h"

#include <string.h>

#include "tests/support/port.h"

void tiny_add(tiny_arguments *arguments, const char *const *further)
{
    for (int i = 0; further && further[i]; i++) {
        cr_assert_lt(arguments->count, TINY_ARGUMENTS_MAX - 1);
        arguments->list[arguments->count++] = further[i];
    }
}

void tiny_write_inputs(tempdir *dir)
{
    static const char model[] =
        "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"hidden_size\":32,"
        "\"intermediate_size\":64,\"num_hidden_layers\":2,\"num_attention_heads\":4,"
        "\"num_key_value_heads\":2,\"vocab_size\":256,\"max_position_embeddings\":256,"
        "\"rms_norm_eps\":1e-5,\"rope_theta\":10000.0,\"hidden_act\":\"silu\","
        "\"tie_word_embeddings\":false}";
    char text[8192];
    tempdir_write(dir, "model.json", model, sizeof model - 1);
    for (size_t i = 0; i < sizeof text; i++) {
        text[i] = (char)('a' + (i * i / 7 + i / 13) % 26);
    }
    tempdir_write(dir, "text.txt", text, sizeof text);
}

const char *const *tiny_flags(const tempdir *dir, const char *name)
{
    static char words[1024];
    static tiny_arguments a;
    char *rest = words;
    a.count = 0;
    snprintf(words, sizeof words,
             "--device cpu --threads-per-worker 1 --precision fp32 --sequence-length 32 "
             "--set model.config=%s/model.json --set data.path=%s/text.txt "
             "--set output.dir=%s/run-%s --set data.validation_path= "
             "--set train.validation_interval=0 --set output.save_model=false",
             dir->path, dir->path, dir->path, name);
    for (char *word; (word = strsep(&rest, " "));) {
        tiny_add(&a, WORDS(word));
    }
    a.list[a.count] = NULL;
    return a.list;
}

void tiny_ndlaunch(launched *l, const tempdir *dir, const char *name, int workers,
                   const char *const *further)
{
    tiny_arguments a = {0};
    tiny_add(&a, WORDS(launched_program("ndlaunch"), "--num-processes", printed("%d", workers),
                       "--dp-shard-size", "-1", "--set", "log.interval=1"));
    tiny_add(&a, tiny_flags(dir, name));
    tiny_add(&a, further);
    launched_start(l, dir, name, a.list);
}

void tiny_train(launched *l, const tempdir *dir, const char *name, int workers,
                const char *const *further)
{
    tiny_arguments a = {0};
    tiny_add(&a, WORDS("--num-steps", "1000000"));
    tiny_add(&a, further);
    tiny_ndlaunch(l, dir, name, workers, a.list);
    launched_until(l, "\nstep ", 2);
}

void tiny_nodes_meet(tiny_nodes *job, const tempdir *dir)
{
    launched l;
    job->dir = dir;
    snprintf(job->endpoint, sizeof job->endpoint, "127.0.0.1:%d", port_reserve());
    snprintf(job->key_file, sizeof job->key_file, "%s/key", dir->path);
    launched_start(&l, dir, "make-key",
                   WORDS(launched_program("ndlaunch"), "--make-key", job->key_file));
    launched_expect(&l, 0);
}

void tiny_nodes_start(launched *l, const tiny_nodes *job, int node, int times,
                      const char *const *further)
{
    const char *name = times > 0 ? printed("node%d-%d", node, times) : printed("node%d", node);
    tiny_arguments a = {0};
    tiny_add(&a, WORDS("--nnodes", printed("%d", job->nodes), "--node-rank", printed("%d", node),
                       "--rdzv-endpoint", job->endpoint, "--rdzv-key-file", job->key_file));
    tiny_add(&a, job->flags);
    tiny_add(&a, further);
    tiny_ndlaunch(l, job->dir, name, job->workers, a.list);
}

void tiny_nodes_start_all(launched *nodes, const tiny_nodes *job, const char *const *further)
{
    for (int i = 0; i < job->nodes; i++) {
        tiny_nodes_start(&nodes[i], job, i, 0, further);
    }
}

void tiny_nodes_wait(launched *one, launched *other, int epoch)
{
    const char *words = printed("of epoch %d waits", epoch);
    launched_until(one, words, 2);
    launched_until(other, words, 2);
}

enum { STEP_BYTES = 160 };

/* The last record of each step: [steps + 1][STEP_BYTES], owned by the caller. */
static char *read_steps(const tempdir *dir, const char *name, int steps)
{
    char line[8192], *out = calloc((size_t)steps + 1, STEP_BYTES);
    const char *path = printed("%s/run-%s/metrics.jsonl", dir->path, name);
    FILE *f = fopen(path, "r");
    cr_assert(f && out, "%s", path);
    while (fgets(line, sizeof line, f)) {
        const char *end = strstr(line, ",\"tokens\"");
        long step = strncmp(line, "{\"step\":", 8) == 0 ? strtol(line + 8, NULL, 10) : 0;
        if (step > 0 && end) {
            cr_assert(step <= steps && end - line < STEP_BYTES, "%s", line);
            snprintf(out + step * STEP_BYTES, STEP_BYTES, "%.*s", (int)(end - line), line);
        }
    }
    fclose(f);
    return out;
}

void tiny_expect_same(const tempdir *dir, const char *name, const char *other, int steps)
{
    char *one = read_steps(dir, name, steps), *two = read_steps(dir, other, steps);
    for (int i = 1; i <= steps; i++) {
        cr_assert_str_eq(one + i * STEP_BYTES, two + i * STEP_BYTES, "%s, step %d", name, i);
    }
    cr_assert_neq(one[steps * STEP_BYTES], '\0', "%s has no step %d", name, steps);
    free(one);
    free(two);
}

const char *tiny_record(const tempdir *dir, const char *name)
{
    static char text[1 << 16];
    const char *path = printed("%s/run-%s/run.json", dir->path, name);
    FILE *f = fopen(path, "r");
    cr_assert_not_null(f, "%s", path);
    size_t got = fread(text, 1, sizeof text - 1, f);
    text[got] = '\0';
    fclose(f);
    return text;
}

// SPDX-License-Identifier: Apache-2.0
/*
 * Meshes as real processes under ndlaunch, over shared memory and between hosts: the losses of one
 * worker at equal global batch (F32, SGD, 10 steps, 1e-6 relative: sums of at most 512 F32 terms in
 * another order), and the same run twice gives the same bytes of metrics (times aside) and of the
 * saved weights.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "tests/support/inputs.h"
#include "tests/support/port.h"
#include "tests/support/shell.h"
#include "tests/support/skip.h"

enum { STEPS = 10 };

static tempdir dir;

static void setup(void)
{
    inputs_write_text(&dir, INPUTS_TEXT_MAX);
    inputs_write_model(&dir, 32, 72, 2);
}

TEMPDIR_SUITE(processes, setup, .timeout = 120);

/* A run into folder `out` with a global batch of 8 blocks of 64 tokens. */
static void train(const char *environment, const char *out, const char *mesh, int accumulation,
                  const char *more)
{
    char command[2048];
    snprintf(
        command, sizeof command,
        "%s " ND_LAUNCH
        " --device cpu --set model.config=model.json --set data.path=text.txt --sequence-length 64 "
        "--num-steps %d --precision fp32 --set optimizer.lr=0.1 --set optimizer.schedule=constant "
        "--set log.interval=100 "
        "--set output.dtype=fp32 --set output.save_model=true --set output.dir=%s "
        "--set train.gradient_accumulation_steps=%d %s %s",
        environment, STEPS, out, accumulation, mesh, more);
    shell(&dir, command);
}

static void read_losses(const char *out, double losses[STEPS])
{
    char path[256], line[4096];
    int n = 0;
    snprintf(path, sizeof path, "%s/%s/metrics.jsonl", dir.path, out);
    FILE *f = fopen(path, "r");
    cr_assert_not_null(f, "%s", path);
    while (n < STEPS && fgets(line, sizeof line, f)) {
        const char *at = strstr(line, "\"loss\":");
        if (at) {
            losses[n++] = strtod(at + 7, NULL);
        }
    }
    fclose(f);
    cr_assert_eq(n, STEPS, "%s has %d losses", path, n);
}

static void compare(const char *environment, const char *mesh, int accumulation)
{
    double expected[STEPS], got[STEPS];
    train("", "one", "--num-processes 1 --dp-shard-size 1", 8,
          "--set optimizer.name=sgd --set optimizer.max_grad_norm=0");
    train(environment, "mesh", mesh, accumulation,
          "--set optimizer.name=sgd --set optimizer.max_grad_norm=0");
    read_losses("one", expected);
    read_losses("mesh", got);
    cr_assert_lt(expected[STEPS - 1], expected[0], "the model learns");
    for (int i = 0; i < STEPS; i++) {
        cr_assert_lt(fabs(got[i] / expected[i] - 1.0), 1e-6,
                     "%s: step %d has loss %.9g, one worker %.9g", mesh, i + 1, got[i],
                     expected[i]);
    }
}

Test(processes, fsdp_4)
{
    compare("", "--num-processes 4 --dp-shard-size 4", 2);
}

Test(processes, hsdp_x_tp)
{
    compare("", "--num-processes 8 --dp-replicate-size 2 --dp-shard-size 2 --tp-size 2", 2);
}

Test(processes, cp_4_ring)
{
    compare("", "--num-processes 4 --dp-shard-size 1 --cp-size 4 --set parallel.cp_comm=ring", 8);
}

Test(processes, cp_4_ulysses_2_of_ring)
{
    compare("", "--num-processes 4 --dp-shard-size 1 --cp-size 4 --ulysses 2 --cp-comm ring", 8);
}

/* Two nodes that share no memory, as on two hosts. */
Test(processes, fsdp_x_tp_between_hosts)
{
    char both[1024];
    int port = port_reserve();
    if (shell_run(&dir, "unshare -ri true") != 0) {
        tempdir_remove(&dir);
        skip_test("IPC namespaces cannot be made here (unshare -ri)");
    }
    shell(&dir, ND_LAUNCH " --make-key key");
    snprintf(both, sizeof both,
             "node() { n=$1; shift; unshare -ri \"$@\" --nnodes 2 --node-rank $n "
             "--rdzv-endpoint 127.0.0.1:%d --rdzv-key-file key; }; "
             "both() { node 1 \"$@\" & node 0 \"$@\" && wait $!; }; both",
             port);
    compare(both, "--num-processes 4 --dp-shard-size 2 --tp-size 2", 4);
}

/* metrics.jsonl up to the first time of each line: times and memory stand last. */
#define SAME                                                                                       \
    "for r in mesh again; do sed -E 's/,\"(step|validation)_ms\".*//' $r/metrics.jsonl > $r.txt; " \
    "done; "                                                                                       \
    "cmp mesh.txt again.txt && cmp mesh/model/model.safetensors again/model/model.safetensors && " \
    "test -s mesh.txt"

Test(processes, the_same_run_twice)
{
    const char *mesh = "--num-processes 4 --dp-shard-size 2 --tp-size 2 --precision bf16";
    train("", "mesh", mesh, 2, "");
    train("", "again", mesh, 2, "");
    shell(&dir, SAME);
}

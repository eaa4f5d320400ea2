// SPDX-License-Identifier: Apache-2.0
/* What a run does when its reports go where nobody takes them. */
#include <criterion/criterion.h>
#include <string.h>

#include "tests/support/inputs.h"
#include "tests/support/shell.h"

enum { S = 64 };

static tempdir dir;

static void setup(void)
{
    inputs_write_text(&dir, 40 * (S + 1));
    inputs_write_model(&dir, 32, 64, 1);
}

TEMPDIR_SUITE(sinks_of_a_run, setup, .timeout = 240);

#define RUN                                                                                        \
    ND_LAUNCH                                                                                      \
    " --device cpu --num-processes 2 --dp-shard-size 2 --set model.config=model.json "             \
    "--sequence-length 64 --set output.dir=out --set data.path=text.txt --num-steps 8 "            \
    "--set data.validation_path= --set log.interval=1 "
#define HANGING "LD_PRELOAD=" ND_HANG_WRITES " ND_HANG_FILE="

/* As on a server that went away. The run makes its steps, saves its model, and ends well. */
Test(sinks_of_a_run, metrics_that_hang_cost_lines_and_not_the_run)
{
    shell(&dir, HANGING "out/metrics.jsonl ND_HANG_CALL=3 " RUN);
    says("step 8/8 ", "warning: 6 records of this run did not go to "
                      "metrics.jsonl");
    shell(&dir, "test -e out/model/model.safetensors && test $(wc -l < out/metrics.jsonl) = 2");
}

/* A tracker's file on the same disk is written by the same thread. */
Test(sinks_of_a_run, a_tracker_that_hangs_costs_lines_and_not_the_run)
{
    shell(&dir, HANGING "out/tensorboard/ ND_HANG_CALL=5 " RUN "--log-with tensorboard");
    says("step 8/8 ",
         "warning: TensorBoard does not answer, and the run "
         "goes on",
         "records of this run did not go to TensorBoard");
    shell(&dir, "test -e out/model/model.safetensors && grep -q '^{\"step\":1,' out/metrics.jsonl");
}

/* The lines before the one that hangs stay whole; a half of that one is passed over. */
Test(sinks_of_a_run, a_run_that_is_killed_while_its_metrics_hang_leaves_whole_lines)
{
    static const char *const halves[] = {"", "ND_HANG_HALF=1 "};
    for (size_t i = 0; i < 2; i++) {
        shell(&dir,
              shell_line(
                  "rm -rf out said; %s" HANGING "out/metrics.jsonl ND_HANG_CALL=3 " RUN
                  "--num-steps 1000000 --set log.interval=100000 >said 2>&1 & pid=$!; "
                  "for i in $(seq 1200); do grep -q 'metrics.jsonl does not answer' said && break; "
                  "sleep 0.1; done; grep -q 'metrics.jsonl does not answer' said || cat said; "
                  "kill -9 $(cat /proc/$pid/task/$pid/children) $pid; wait $pid; test $? = 137",
                  halves[i]));
        shell(&dir, "test $(wc -l < out/metrics.jsonl) = 2 && "
                    "test $(head -n 2 out/metrics.jsonl | grep -c '^{\"step\":[12],.*}$') = 2");
        shell(&dir, i == 0 ? "test -z \"$(tail -c 1 out/metrics.jsonl)\""
                           : "tail -n 1 out/metrics.jsonl | grep -q '^{\"step\":3,.*[^}]$'");
        shell(&dir, ND_TRAIN " report out | grep -q 'step 2 of 1'");
    }
}

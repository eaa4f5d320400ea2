// SPDX-License-Identifier: Apache-2.0
/* train.epochs and intervals in epochs. */
#include "tests/unit/runtime/config/support.h"

static nd_config c;

static nd_status take(int64_t samples, int64_t limit, int64_t step)
{
    assert_ok(nd_config_resolve(&c));
    return nd_config_take_epochs(&c, &(nd_epochs){samples, limit, step});
}

/* A configuration, data, and the steps that they give, or what is said. */
static const struct {
    const char *flags, *text; /* text: a file, where there are no flags */
    int64_t samples, limit, step, wanted;
    const char *said;
} cases[] = {
    {"--num-train-epochs 3", NULL, 100, INT64_MAX, 8, 38, NULL},
    {"--num_epochs 0.1", NULL, 30, INT64_MAX, 1, 3, NULL},
    {"--epochs 1.1", NULL, 50, INT64_MAX, 1, 55,
     NULL}, /* the product of doubles is a little more */
    {"--epochs 2.3", NULL, 100, INT64_MAX, 10, 23, NULL},
    {"--epochs 1.12", NULL, 50, INT64_MAX, 1, 56, NULL},
    {"--epochs 1.13", NULL, 50, INT64_MAX, 1, 57, NULL},
    {"--epochs 0.001", NULL, 30, INT64_MAX, 8, 1, NULL},
    {"--num-steps 7", NULL, 30, INT64_MAX, 8, 7, NULL},
    /* The later of steps and epochs counts; both are printed. */
    {NULL, "train:\n  epochs: 2\n", 10, INT64_MAX, 5, 4, NULL},
    {NULL, "train:\n  epochs: 2\n  steps: 4\n", 10, INT64_MAX, 5, 4, NULL},
    {NULL, "train:\n  epochs: 2\n  steps: 5\n", 10, INT64_MAX, 5, 0,
     "train.steps is 5|train.epochs 2 of 10 samples is 4 steps"},
    /* Data that end round down and limit the steps. */
    {"--epochs 1", NULL, 10, 10, 4, 2, NULL},
    {"--num-steps 3", NULL, 10, 10, 4, 0, "train.steps is 3|over after step 2"},
    {"--epochs 3", NULL, 30, 10, 4, 0, "train.epochs is 3, which is|over after step 2"},
    {"--epochs 1000", NULL, 1000000, INT64_MAX, 1, 1000000000, NULL},
    {"--epochs 1000", NULL, 1000001, INT64_MAX, 1, 0, "1000001 samples|at most 10^9"},
    {"--save-strategy epoch --eval-steps 2 --validation-path v.txt --load-best-model-at-end", NULL,
     10, INT64_MAX, 4, 0, "checkpoint.interval 3 is not a multiple of train.validation_interval 2"},
};

Test(epochs, give_steps)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_ok(cases[i].text ? read_text(&c, cases[i].text) : flags_in(&c, cases[i].flags));
        nd_status status = take(cases[i].samples, cases[i].limit, cases[i].step);
        expect_sentence(status, cases[i].said ? ND_ERR_CONFIG : ND_OK,
                        cases[i].said ? cases[i].said : "");
        cr_expect(cases[i].said || c.train.steps == cases[i].wanted, "case %zu: %lld", i,
                  (long long)c.train.steps);
        nd_config_fini(&c);
    }
    assert_ok(flags_in(&c, "--epochs 1 --warmup-ratio 0.1"));
    assert_ok(take(100, INT64_MAX, 2));
    cr_assert_eq(c.optimizer.warmup_steps, 5);
    nd_config_fini(&c);
}

Test(epochs, intervals_may_be_epochs)
{
    assert_ok(flags_in(&c, "--epochs 2 --checkpointing_steps epoch --eval-strategy epoch "
                           "--validation-path v.txt --load-best-model-at-end"));
    assert_ok(take(10, INT64_MAX, 4));
    cr_assert_eq(c.checkpoint.interval, 3);
    cr_assert_eq(c.train.validation_interval, 3);
    nd_config_fini(&c);
    assert_ok(flags_in(&c, "--epochs 2 --save-steps epoch --eval-steps epoch"));
    assert_ok(take(8, INT64_MAX, 4)); /* whole steps */
    cr_assert(c.checkpoint.interval == 2 && c.train.validation_interval == 2);
    nd_config_fini(&c);
    expect_bad_flags("--save-strategy epoch --save-total-limit 1", "--save-total-limit");
}

/* A run that may go on from elsewhere is checked when its position is known. */
Test(epochs, a_resumed_run_has_what_is_left_of_the_data)
{
    const nd_epochs e = {100, 100, 8};
    assert_ok(flags_in(&c, "--num-steps 15 --resume-from-checkpoint latest"));
    assert_ok(take(100, 100, 8));
    cr_expect_eq(nd_config_check_end(&c, &e, 10, 60), ND_OK); /* 5 steps of 8 are left */
    expect_sentence(nd_config_check_end(&c, &e, 10, 61), ND_ERR_CONFIG,
                    "train.steps is 15|over after step 14");
    expect_sentence(nd_config_check_end(&c, &e, 10, 200), ND_ERR_CONFIG, "over after step 10");
    nd_config_fini(&c);
}

// SPDX-License-Identifier: Apache-2.0
/* train.epochs and intervals in epochs. */
#include "tests/unit/runtime/config/support.h"

static nd_config c;

static nd_status take(int64_t samples, int64_t limit, int64_t step)
{
    assert_ok(nd_config_resolve(&c));
    return nd_config_take_epochs(&c, &(nd_epochs){samples, limit, step});
}

static void expect_steps(int64_t samples, int64_t step, int64_t wanted)
{
    cr_expect_eq(take(samples, INT64_MAX, step), ND_OK, "%s", nd_error_last()->message);
    cr_expect_eq(c.train.steps, wanted, "%lld", (long long)c.train.steps);
    nd_config_fini(&c);
}

Test(epochs, give_steps_rounded_up)
{
    static const struct {
        const char *flags;
        int64_t samples, step, wanted;
    } cases[] = {
        {"--num-train-epochs 3", 100, 8, 38}, {"--num_epochs 0.1", 30, 1, 3},
        {"--epochs 1.1", 50, 1, 55}, /* the product of doubles is a little more */
        {"--epochs 2.3", 100, 10, 23},        {"--epochs 1.12", 50, 1, 56},
        {"--epochs 1.13", 50, 1, 57},         {"--epochs 0.001", 30, 8, 1},
        {"--num-steps 7", 30, 8, 7},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_ok(flags_in(&c, cases[i].flags));
        expect_steps(cases[i].samples, cases[i].step, cases[i].wanted);
    }
    assert_ok(flags_in(&c, "--epochs 1 --warmup-ratio 0.1"));
    assert_ok(take(100, INT64_MAX, 2));
    cr_assert_eq(c.optimizer.warmup_steps, 5);
    nd_config_fini(&c);
}

Test(epochs, the_later_of_steps_and_epochs_counts)
{
    assert_ok(read_text(&c, "train:\n  epochs: 2\n"));
    expect_steps(10, 5, 4);
    assert_ok(read_text(&c, "train:\n  epochs: 2\n  steps: 4\n")); /* as it is printed */
    expect_steps(10, 5, 4);
    assert_ok(read_text(&c, "train:\n  epochs: 2\n  steps: 5\n"));
    expect_sentence(take(10, INT64_MAX, 5), ND_ERR_CONFIG,
                    "train.steps is 5|train.epochs 2 of 10 samples is 4 steps");
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
    assert_ok(flags_in(
        &c,
        "--save-strategy epoch --eval-steps 2 --validation-path v.txt --load-best-model-at-end"));
    expect_sentence(take(10, INT64_MAX, 4), ND_ERR_CONFIG,
                    "checkpoint.interval 3 is not a multiple of train.validation_interval 2");
    nd_config_fini(&c);
    assert_ok(flags_in(&c, "--save-strategy epoch --save-total-limit 1"));
    expect_sentence(nd_config_resolve(&c), ND_ERR_CONFIG, "--save-total-limit");
    nd_config_fini(&c);
}

Test(epochs, data_that_end_round_down_and_limit_the_steps)
{
    assert_ok(flags_in(&c, "--epochs 1"));
    assert_ok(take(10, 10, 4));
    cr_assert_eq(c.train.steps, 2);
    nd_config_fini(&c);
    assert_ok(flags_in(&c, "--num-steps 3"));
    expect_sentence(take(10, 10, 4), ND_ERR_CONFIG, "train.steps is 3|over after step 2");
    nd_config_fini(&c);
}

Test(epochs, data_that_end_before_train_epochs_are_named_by_them)
{
    assert_ok(flags_in(&c, "--epochs 3"));
    expect_sentence(take(30, 10, 4), ND_ERR_CONFIG,
                    "train.epochs is 3, which is|over after step 2");
    cr_assert_null(strstr(nd_error_last()->message, "train.steps"));
    nd_config_fini(&c);
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

// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <math.h>

#include "trainer/step/parts.h"

static nd_config config_of(nd_schedule_kind kind, int64_t steps, int64_t warmup)
{
    nd_config c = {0};
    c.train.steps = steps;
    c.optimizer.schedule = kind;
    c.optimizer.lr = 1.0;
    c.optimizer.min_lr = 0.1;
    c.optimizer.warmup_steps = warmup;
    return c;
}

static void expect(const nd_config *c, int64_t step, double lr)
{
    cr_assert_float_eq(nd_schedule_lr(c, step), lr, 1e-12, "step %ld: %g, not %g", (long)step,
                       nd_schedule_lr(c, step), lr);
}

Test(schedule, shapes_at_their_corners)
{
    nd_config constant = config_of(ND_SCHEDULE_CONSTANT, 100, 10),
              linear = config_of(ND_SCHEDULE_LINEAR, 110, 10);
    nd_config cosine = config_of(ND_SCHEDULE_COSINE, 110, 10),
              wsd = config_of(ND_SCHEDULE_WSD, 100, 10);
    expect(&constant, 1, 0.1);
    expect(&constant, 10, 1.0);
    expect(&constant, 100, 1.0);
    expect(&linear, 61, 0.55);
    expect(&linear, 10, 1.0); /* the last step of the warm-up and the first one after it */
    expect(&linear, 11, 1.0);
    expect(&linear, 110, 0.1 + 0.9 / 100);
    expect(&cosine, 61, 0.55);
    expect(&cosine, 10, 1.0);
    expect(&cosine, 11, 1.0);
    expect(&cosine, 110, 0.1 + 0.45 * (1.0 + cos(M_PI * 0.99)));
    wsd.optimizer.decay_steps = 20;
    expect(&wsd, 81, 1.0);
    expect(&wsd, 91, 0.55);
    expect(&wsd, 100, 0.1 + 0.9 / 20);
}

/* By default a tenth of the steps decays, rounded up. */
Test(schedule, wsd_decays_over_a_tenth)
{
    nd_config wsd = config_of(ND_SCHEDULE_WSD, 25, 0);
    expect(&wsd, 23, 1.0);
    expect(&wsd, 24, 1.0 - 0.9 / 3);
    expect(&wsd, 25, 1.0 - 2 * 0.9 / 3);
}

/* A warm-up or decay longer than the run leaves a finite rate between 0 and lr. */
Test(schedule, lengths_beyond_the_run)
{
    for (nd_schedule_kind kind = ND_SCHEDULE_CONSTANT; kind <= ND_SCHEDULE_WSD; kind++) {
        nd_config c = config_of(kind, 1, 20);
        c.optimizer.decay_steps = 50;
        double lr = nd_schedule_lr(&c, 1);
        cr_assert(isfinite(lr) && lr > 0.0 && lr <= 1.0, "kind %d: %g", (int)kind, lr);
        c = config_of(kind, 5, 0);
        c.optimizer.decay_steps = 50;
        for (int64_t step = 1; step <= 5; step++) {
            lr = nd_schedule_lr(&c, step);
            cr_assert(isfinite(lr) && lr >= 0.1 - 1e-12 && lr <= 1.0, "kind %d, step %ld: %g",
                      (int)kind, (long)step, lr);
        }
    }
}

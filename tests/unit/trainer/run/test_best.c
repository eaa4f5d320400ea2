// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"
#include "trainer/run/state.h"

static const nd_config config = {
    .train = {.steps = 22, .early_stopping_patience = 2, .early_stopping_threshold = 0.1},
    .checkpoint = {.interval = 4}};

Test(best, patience_counts_validations_that_are_not_lower_by_the_threshold)
{
    nd_run_best best = {0};
    nd_run_best_validated(&best, &config, 2, 3.0);
    nd_run_best_validated(&best, &config, 4, 2.95); /* lower, but by less than the threshold */
    cr_expect(best.stale == 1 && best.step == 4 && !nd_run_best_is_over(&best, &config));
    nd_run_best_validated(&best, &config, 6, 2.5);
    cr_expect(best.stale == 0 && best.step == 6);
    nd_run_best_validated(&best, &config, 8, (double)NAN);
    cr_expect(!nd_run_best_is_over(&best, &config));
    nd_run_best_validated(&best, &config, 10, 2.5);
    cr_expect(best.stale == 2 && best.loss == 2.5 && nd_run_best_is_over(&best, &config));
    nd_config exact = config, off = config;
    exact.train.early_stopping_threshold = 0.5;
    nd_run_best_validated(&best, &exact, 12, 2.0);
    cr_expect(best.stale == 3 && best.step == 12, "a gain of the threshold itself is none");
    off.train.early_stopping_patience = 0;
    cr_expect(!nd_run_best_is_over(&best, &off));
}

static nd_status keep_words(void *self, const nd_run_event *event)
{
    snprintf(self, 200, "%lld: %s", (long long)event->step, event->reason);
    return ND_OK;
}

/* By which a later start knows which losses compare. The third one ends the run early. */
Test(best, a_validation_says_how_long_separate_documents_are)
{
    nd_config separate = config;
    char said[200] = "";
    nd_run run = {.config = &separate};
    nd_sinks_add(&run.sinks, (nd_sink){.self = said, .event = keep_words});
    nd_validation_record record = {.step = 4, .loss = 2.0, .separate_length = 1};
    separate.train.sequence_length = 32;
    separate.data.documents = ND_DOCUMENTS_JOIN;
    assert_ok(nd_run_record_validation(&run, &record));
    cr_expect_eq(record.separate_length, 0);
    separate.data.documents = ND_DOCUMENTS_SEPARATE;
    assert_ok(nd_run_record_validation(&run, &record));
    cr_expect_eq(record.separate_length, 32);
    record = (nd_validation_record){.step = 8, .loss = 2.5};
    assert_ok(nd_run_record_validation(&run, &record));
    cr_expect(run.over && strstr(said, "8: 2 validations in a row were not below the lowest loss, "
                                       "2 after step 4"),
              "%s", said);
}

/* Validates and saves the state after `step`; returns whether that `ends_well` and is the best. */
static bool save_after(nd_run_best *best, int64_t step, double loss, bool ends_well)
{
    nd_run_best_validated(best, &config, step, loss);
    nd_run_best_saving(best, step);
    nd_run_best_validated(best, &config, step + 1, 0.01); /* while it is written */
    return ends_well && nd_run_best_saved(best, step);
}

Test(best, a_state_counts_when_its_checkpoint_is_durable)
{
    nd_run_best best = {0};
    nd_run_best_validated(&best, &config, 2, 1.0);
    cr_expect(!nd_run_best_saved(&best, 2) && best.saved_step == 0, "no checkpoint was begun");
    cr_expect(save_after(&best, 4, 3.0, true) && best.saved_step == 4);
    cr_expect(!save_after(&best, 8, 2.0, false) && best.saved_step == 4, "its save failed");
    cr_expect(save_after(&best, 12, 2.5, true) && best.saved_step == 12);
    cr_expect(!save_after(&best, 16, 2.5, true) && best.saved_step == 12, "it is no lower");
    cr_expect(!save_after(&best, 20, (double)NAN, true) && best.saved_step == 12);
    nd_run_best_saving(&best, 24); /* without a validation, as behind a signal */
    cr_expect(!nd_run_best_saved(&best, 24) && best.saved_step == 12);
    cr_expect(save_after(&best, 28, 0.5, true) && best.saved_step == 28 && best.saved_loss == 0.5);
}

/* A checkpoint is begun before the validation of its state, and may be durable before that ends. */
Test(best, a_state_may_be_validated_when_its_checkpoint_is_durable)
{
    nd_run_best best = {0};
    nd_run_best_saving(&best, 4);
    cr_expect(!nd_run_best_saved(&best, 4) && best.saved_step == 0);
    nd_run_best_validated(&best, &config, 4, 3.0);
    cr_expect(best.saved_step == 4 && best.saved_loss == 3.0);
    nd_run_best_saving(&best, 8);
    nd_run_best_validated(&best, &config, 8, 2.0);
    cr_expect_eq(best.saved_step, 4, "it is not durable yet");
    nd_run_best_validated(&best, &config, 10, 1.0);
    cr_expect(nd_run_best_saved(&best, 8) && best.saved_step == 8 && best.saved_loss == 2.0);
    nd_run_best_saving(&best, 12);
    nd_run_best_validated(&best, &config, 12, (double)NAN);
    cr_expect(!nd_run_best_saved(&best, 12) && best.saved_step == 8);
    nd_run_best_validated(&best, &config, 14, 0.5); /* no checkpoint here */
    cr_expect_eq(best.saved_step, 8);
}

Test(best, a_run_that_goes_on_knows_what_its_earlier_start_knew)
{
#define JOINED                                                                                     \
    "{\"step\":4,\"validation_loss\":3}\n{\"step\":8,\"validation_loss\":1}\n"                     \
    "{\"step\":12,\"validation_loss\":2}\n{\"step\":14,\"validation_loss\":2.5}\n"                 \
    "{\"step\":16,\"validation_loss\":0.25}\n"
    nd_run_best best = {0};
    fake_setup();
    fake_file("metrics.jsonl", JOINED);
    fake_write_small(4);
    fake_write_small(12); /* that of step 8 was deleted */
    assert_ok(nd_run_best_replay(&best, &config, fake_run.path, 14));
    cr_expect(best.step == 8 && best.loss == 1.0 && best.stale == 2);
    cr_expect(best.saved_step == 12 && best.saved_loss == 2.0);
    /* Losses of separate documents and of joined ones do not compare. */
    nd_config separate = config;
    separate.data.documents = ND_DOCUMENTS_SEPARATE;
    separate.train.sequence_length = 32;
    fake_file("metrics.jsonl",
              JOINED "{\"step\":18,\"validation_loss\":7.5,\"separate_length\":32}\n"
                     "{\"step\":19,\"validation_loss\":0.5,\"separate_length\":64}\n");
    assert_ok(nd_run_best_replay(&best, &separate, fake_run.path, 20));
    cr_expect(best.step == 18 && best.loss == 7.5 && best.saved_step == 0);
    tempdir_catch_stderr(&fake_run);
    assert_ok(nd_run_best_replay(&best, &config, fake_run.path, 18));
    cr_expect(best.step == 16 && best.loss == 0.25);
    const char *said = tempdir_said(&fake_run);
    cr_expect_not_null(strstr(said, "1 validations of this run were made with other"), "%s", said);
    fake_teardown();
    cr_expect_eq(nd_run_best_replay(&best, &config, fake_run.path, 14), ND_ERR_DATA);
}

/* Lines of validations that a full disk has lost. */
Test(best, a_run_that_goes_back_keeps_a_best_checkpoint_without_a_line)
{
    const nd_run_best known = {.step = 8, .loss = 1.0, .saved_step = 8, .saved_loss = 1.0};
    nd_run_best nothing = {0};
    nd_run_best higher = {.step = 6, .loss = 1.5, .saved_step = 4, .saved_loss = 3.0};
    nd_run_best lower = {.step = 4, .loss = 0.5, .saved_step = 4, .saved_loss = 0.5};
    nd_run_best earlier = {.step = 4, .loss = 3.0, .saved_step = 4, .saved_loss = 3.0};
    nd_run_best_keep(&nothing, &known, 10);
    cr_expect(nothing.step == 8 && nothing.loss == 1.0 && nothing.saved_step == 8);
    nd_run_best_keep(&higher, &known, 8);
    cr_expect(higher.step == 8 && higher.saved_step == 8 && higher.saved_loss == 1.0);
    nd_run_best_keep(&lower, &known, 10);
    cr_expect(lower.step == 4 && lower.saved_step == 4 && lower.saved_loss == 0.5);
    nd_run_best_keep(&earlier, &known, 7); /* the step of that checkpoint is taken back */
    cr_expect(earlier.step == 4 && earlier.saved_step == 4);
}

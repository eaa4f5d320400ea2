// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "trainer/report/report.h"

static char text[512];

static const char *line_of(int64_t step, double loss, double norm, double seconds, double bytes,
                           nd_speed speed)
{
    const nd_step_record record = {.step = step,
                                   .loss = loss,
                                   .grad_norm = norm,
                                   .lr = 3e-4,
                                   .tokens = 64,
                                   .step_seconds = seconds,
                                   .peak_memory_bytes = bytes};
    return nd_step_line_format(text, sizeof text, 100000, &record, &speed);
}

Test(step_line, names_every_number_with_its_unit)
{
    const nd_speed speed = {.tokens_per_second = 16320, .tflops_causal = 0.1234};
    const double bytes = 321.0 * (1 << 20);
    cr_assert_str_eq(line_of(120, 2.34567, 1.5, 0.251, bytes, speed),
                     "step 120/100000  loss 2.3457  norm 1.500  lr 3.00e-04  251 ms  "
                     "16.3 k tok/s  0.123 TFLOP/s/worker  peak 321 MiB");
    /* tiny models still show a time */
    cr_assert_not_null(strstr(line_of(120, 2, 1, 0.00321, bytes, speed), "  3.21 ms  "));
    cr_assert_not_null(strstr(line_of(120, 2, 1, 0.0123, bytes, speed), "  12 ms  "));
    cr_assert_not_null(strstr(line_of(120, 2, 1, 10, bytes, speed), "  10.0 s  "));
    const nd_speed ten = {.tflops_causal = 10};
    cr_assert_not_null(strstr(line_of(120, 2, 1, 10, bytes, ten), "  10.0 TFLOP/s/worker  "));
}

Test(step_line, fits_a_terminal)
{
    const nd_speed speed = {.tokens_per_second = 999949, .tflops_causal = 999.9};
    const double bytes = 139.4 * (1 << 30);
    cr_assert_leq(strlen(line_of(100000, 12.34567, 999.5, 99.9, bytes, speed)), 120, "%s", text);
    cr_assert_not_null(strstr(line_of(100000, 12, 999, 1234.4, bytes, speed), "  1234.4 s  "));
}

Test(step_line, not_a_number_has_no_sign)
{
    line_of(1, -NAN, copysign(NAN, -1.0), 1, 1, (nd_speed){0});
    cr_assert_not_null(strstr(text, "loss nan  norm nan  "), "%s", text);
}

Test(step_line, a_step_without_labels_has_no_loss)
{
    const nd_step_record record = {.step = 3, .loss = NAN, .lr = 3e-4};
    nd_step_line_format(text, sizeof text, 8, &record, &(nd_speed){0});
    cr_assert_not_null(strstr(text, "step 3/8  no labels  lr "), "%s", text);
    cr_assert_null(strstr(text, "nan"), "%s", text);
}

Test(step_line, never_writes_past_its_buffer)
{
    const nd_step_record record = {
        .step = INT64_MAX, .tokens = 1, .loss = 1e300, .lr = NAN, .step_seconds = 1e300};
    char small[16];
    memset(small, 'x', sizeof small);
    nd_step_line_format(small, sizeof small - 1, INT64_MAX, &record, &(nd_speed){0});
    cr_assert_eq(small[sizeof small - 2], '\0');
    cr_assert_eq(small[sizeof small - 1], 'x');
}

Test(step_line, durations)
{
    cr_assert_str_eq(nd_duration_format(text, sizeof text, 0), "0 s");
    cr_assert_str_eq(nd_duration_format(text, sizeof text, 59.4), "59 s");
    cr_assert_str_eq(nd_duration_format(text, sizeof text, 59.6), "1 min 00 s");
    cr_assert_str_eq(nd_duration_format(text, sizeof text, 243), "4 min 03 s");
    cr_assert_str_eq(nd_duration_format(text, sizeof text, 3599.6), "1 h 00 min");
    cr_assert_str_eq(nd_duration_format(text, sizeof text, 7384), "2 h 03 min");
    cr_assert_str_eq(nd_duration_format(text, sizeof text, INFINITY), "an unknown time");
    cr_assert_str_eq(nd_duration_format(text, sizeof text, NAN), "an unknown time");
    cr_assert_str_eq(nd_duration_format(text, sizeof text, 1e9), "an unknown time");
}

Test(step_line, quantities_and_bytes_keep_three_digits_or_more)
{
    cr_assert_str_eq(nd_quantity_format(text, sizeof text, 317.4), "317");
    cr_assert_str_eq(nd_quantity_format(text, sizeof text, 9999), "9999");
    cr_assert_str_eq(nd_quantity_format(text, sizeof text, 9999.7), "10.0 k");
    cr_assert_str_eq(nd_quantity_format(text, sizeof text, 999960), "1.0 M");
    cr_assert_str_eq(nd_bytes_format(text, sizeof text, 972.0 * 1024), "972 KiB");
    cr_assert_str_eq(nd_bytes_format(text, sizeof text, 973.0 * 1024), "1 MiB");
    cr_assert_str_eq(nd_bytes_format(text, sizeof text, 5e8), "477 MiB");
    cr_assert_str_eq(nd_bytes_format(text, sizeof text, 9999.0 * (1 << 20)), "9999 MiB");
    cr_assert_str_eq(nd_file_bytes_format(text, sizeof text, 999), "999 B");
    cr_assert_str_eq(nd_file_bytes_format(text, sizeof text, 1250), "1.25 kB");
    cr_assert_str_eq(nd_file_bytes_format(text, sizeof text, 306000), "306.0 kB");
    cr_assert_str_eq(nd_file_bytes_format(text, sizeof text, 5e8), "500.0 MB");
    cr_assert_str_eq(nd_bytes_format(text, sizeof text, 13.4e9), "12.5 GiB");
}

Test(step_line, bar_fills_from_left_to_right_and_fits_a_narrow_terminal)
{
    cr_assert_str_eq(nd_progress_bar_format(text, sizeof text, 0, 1000, 5, 600),
                     "[>                   ]   0 %  step 0/1000  loss 5.0000  10 min 00 s left");
    cr_assert_str_eq(nd_progress_bar_format(text, sizeof text, 500, 1000, 2.5, 42),
                     "[==========>         ]  50 %  step 500/1000  loss 2.5000  42 s left");
    cr_assert_str_eq(nd_progress_bar_format(text, sizeof text, 1000, 1000, 2, 0),
                     "[====================] 100 %  step 1000/1000  loss 2.0000  0 s left");
    cr_assert_lt(strlen(nd_progress_bar_format(text, sizeof text, 99999, 100000, 12.3456, 36000)),
                 80);
}

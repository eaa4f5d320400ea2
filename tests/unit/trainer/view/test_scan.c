// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/scan.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void expect_near(double got, double wanted)
{
    cr_assert_leq(fabs(got - wanted), fabs(wanted) * 9e-16, "%.17g, not %.17g", got, wanted);
}

static double number(const char *text)
{
    double value = NAN;
    const char *end = nd_scan_number(text, text + strlen(text), &value);
    cr_assert_eq(end, text + strlen(text), "%s", text);
    return value;
}

Test(scan, numbers_are_those_of_strtod)
{
    static const char *const texts[] = {"0",
                                        "-0.5",
                                        "12",
                                        "2.3025850929940459",
                                        "0.00029999999999999997",
                                        "1e-7",
                                        "1.5E+3",
                                        "123456789012345678901234",
                                        "9007199254740993",
                                        "3.0000000000000001e-300",
                                        "1.5e300",
                                        "0.1000000000000000055511151231257827"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        expect_near(number(texts[i]), strtod(texts[i], NULL));
    }
}

Test(scan, what_is_no_number_is_refused)
{
    static const char *const texts[] = {"", "-", ".5", "1.", "1.e5", "1e", "1e+", "x", "NaN"};
    double value;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        const char *end = texts[i] + strlen(texts[i]);
        const char *stop = nd_scan_number(texts[i], end, &value);
        cr_assert(!stop || stop < end, "%s", texts[i]);
    }
}

static const char *note(void *context, const nd_scan_member *member, const char *text,
                        const char *end)
{
    char *seen = context;
    size_t used = strlen(seen);
    const char *stop = nd_scan_value(text, end);
    snprintf(seen + used, 256 - used, "%d %.*s=%.*s;", member->meaning, (int)member->length,
             member->name, stop ? (int)(stop - text) : 0, text);
    return stop;
}

static const char *members(char seen[256], const char *text)
{
    static const nd_scan_key keys[] = {ND_SCAN_KEY("a", 7), ND_SCAN_KEY("ab", 8)};
    const nd_scan_object object = {keys, 2, note, seen};
    seen[0] = '\0';
    return nd_scan_members(&object, text, text + strlen(text));
}

Test(scan, members_come_with_their_names)
{
    char seen[256];
    const char *text = "{ \"ab\" : [1,\"]\"] , \"x\\\"y\":{},\"a\":null}rest";
    cr_assert_str_eq(members(seen, text), "rest");
    cr_assert_str_eq(seen, "8 ab=[1,\"]\"] ;-1 x\\\"y={};7 a=null;");
    cr_assert_str_eq(members(seen, "{}"), "");
    cr_assert_str_eq(seen, "");
}

Test(scan, what_is_no_object_is_refused)
{
    static const char *const texts[] = {"",          "[]",        "{",          "{\"a\"",
                                        "{\"a\":",   "{\"a\":1",  "{\"a\":1,}", "{a:1}",
                                        "{\"a\" 1}", "{\"a\":1]", "{\"a\\"};
    char seen[256];
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        cr_assert_null(members(seen, texts[i]), "%s", texts[i]);
    }
}

Test(scan, null_is_no_number)
{
    double value = 1;
    const char *text = "null,";
    cr_assert_str_eq(nd_scan_amount(text, text + strlen(text), &value), ",");
    cr_assert(isnan(value));
}

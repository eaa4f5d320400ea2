// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "runtime/base/suggest.h"

Test(suggest, distance_counts_edits_and_swaps)
{
    cr_assert_eq(nd_suggest_distance("steps", "steps"), 0);
    cr_assert_eq(nd_suggest_distance("stepz", "steps"), 1);
    cr_assert_eq(nd_suggest_distance("step", "steps"), 1);
    cr_assert_eq(nd_suggest_distance("setps", "steps"), 1, "a swap is one edit");
    cr_assert_eq(nd_suggest_distance("", "abc"), 3);
    cr_assert_eq(nd_suggest_distance("kitten", "sitting"), 3);
    cr_assert_eq(nd_suggest_distance("Num_Steps", "num-steps"), 0, "case and '_' are free");
}

Test(suggest, long_names_are_far)
{
    char name[80];
    memset(name, 'a', sizeof name);
    name[63] = '\0';
    cr_assert_eq(nd_suggest_distance(name, name), 0);
    name[63] = 'a';
    name[64] = '\0';
    cr_assert_eq(nd_suggest_distance(name, "a"), INT_MAX);
}

static const char *nearest(const char *word)
{
    static const char *const names[] = {"steps", "sequence_length", "seed",        "precision",
                                        "stepx", "optimizer.name",  "optimizer.lr"};
    static nd_suggest search;
    char name[32];
    nd_suggest_init(&search, word);
    for (int i = 0; i < 7; i++) {
        snprintf(name, sizeof name, "%s", names[i]); /* each in the place of the one before */
        nd_suggest_offer(&search, name);
    }
    return search.best;
}

Test(suggest, of_equally_near_names_one_that_begins_the_word_is_meant)
{
    cr_assert_eq(nd_suggest_distance("optimizer.lrate", "optimizer.name"),
                 nd_suggest_distance("optimizer.lrate", "optimizer.lr"));
    cr_assert_str_eq(nearest("optimizer.lrate"), "optimizer.lr");
}

Test(suggest, only_near_names_are_offered)
{
    cr_assert_str_eq(nearest("stepz"), "steps");
    cr_assert_str_eq(nearest("sequence_lenght"), "sequence_length");
    cr_assert_str_eq(nearest("precison"), "precision");
    cr_assert_null(nearest("foo"));
    cr_assert_null(nearest("tp"), "two wrong letters of two are no similarity");
    cr_assert_null(nearest(""));
}

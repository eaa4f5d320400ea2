// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/process.h"
#include "runtime/base/status.h"

/* The address sanitizer asks for this by name: an impossible size shall give NULL there too, as it
 * does without it. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "allocator_may_return_null=1";
}

static nd_status inner(int fault)
{
    return fault ? nd_fail(ND_ERR_DATA, "row %d of a.jsonl is broken", fault) : ND_OK;
}

static nd_status outer(int fault, int *reached)
{
    ND_TRY(inner(fault));
    *reached = 1;
    return ND_OK;
}

static nd_status with_cleanup(int fault, int *reached, int *cleaned)
{
    nd_status status = ND_OK;
    ND_TRY_OUT(inner(fault));
    *reached = 1;
out:
    *cleaned = 1;
    return status;
}

Test(status, the_record_holds_the_sentence_and_the_macros_pass_the_status_up)
{
    int reached = 0, cleaned = 0;
    cr_assert_eq(nd_error_last()->status, ND_OK);
    cr_assert_eq(outer(0, &reached), ND_OK);
    cr_assert(reached);
    reached = 0;
    cr_assert_eq(outer(7, &reached), ND_ERR_DATA);
    cr_assert_not(reached);
    cr_assert_eq(nd_error_last()->status, ND_ERR_DATA);
    cr_assert_str_eq(nd_error_last()->message, "row 7 of a.jsonl is broken");
    cr_assert_eq(with_cleanup(8, &reached, &cleaned), ND_ERR_DATA);
    cr_assert(cleaned && !reached);
    nd_error_clear();
    cr_assert_eq(nd_error_last()->status, ND_OK);
    cr_assert_str_eq(nd_error_last()->message, "");
}

Test(status, what_the_system_has_no_more_of_has_one_status)
{
    static const int used_up[] = {ENOMEM, EAGAIN, EMFILE, ENFILE};
    for (size_t i = 0; i < sizeof used_up / sizeof *used_up; i++) {
        cr_expect_eq(nd_fail_system(used_up[i], "thread %d", 3), ND_ERR_RESOURCE);
    }
    cr_expect_eq(nd_fail_system(ENOMEM, "thread %d", 3), ND_ERR_RESOURCE);
    cr_expect_str_eq(nd_error_last()->message, "out of host memory for thread 3");
    cr_expect_eq(nd_fail_system(EINVAL, "thread %d", 3), ND_ERR_INTERNAL);
    cr_expect_str_eq(nd_error_last()->message, "thread 3 cannot be made: Invalid argument");
}

/* Also in breadcrumbs, which keep the status. */
Test(status, control_characters_are_escaped)
{
    nd_fail(ND_ERR_DATA, "key '%s'", "a\x1b[31m\nb");
    cr_assert_str_eq(nd_error_last()->message, "key 'a\\x1b[31m\\nb'");
    cr_assert_eq(nd_fail_context(ND_ERR_DATA, "reading %s", "c\td"), ND_ERR_DATA);
    cr_assert_str_eq(nd_error_last()->message, "key 'a\\x1b[31m\\nb' (while reading c\\td)");
    nd_fail(ND_ERR_IO, "again: %s", nd_error_last()->message);
    cr_assert_str_eq(nd_error_last()->message, "again: key 'a\\x1b[31m\\nb' (while reading c\\td)");
}

/* Long paths and many breadcrumbs end in a cut text, never past the record. */
Test(status, a_message_that_is_too_long_is_cut)
{
    char *text = malloc(3 * ND_ERROR_MESSAGE_MAX);
    memset(text, 'x', 3 * ND_ERROR_MESSAGE_MAX - 1);
    text[3 * ND_ERROR_MESSAGE_MAX - 1] = '\0';
    nd_fail(ND_ERR_IO, "%s", text);
    cr_assert_eq(strlen(nd_error_last()->message), ND_ERROR_MESSAGE_MAX - 1);
    for (int room = 0; room < 16; room++) {
        nd_fail(ND_ERR_IO, "%.*s", ND_ERROR_MESSAGE_MAX - 1 - room, text);
        nd_fail_context(ND_ERR_IO, "%s", text);
        cr_assert_eq(strlen(nd_error_last()->message), ND_ERROR_MESSAGE_MAX - 1);
    }
    free(text);
}

static void *fail_in_thread(void *argument)
{
    nd_fail(ND_ERR_HANG, "of the other thread");
    return NULL;
}

Test(status, each_thread_has_its_own_record)
{
    nd_fail(ND_ERR_CONFIG, "mine");
    pthread_t thread;
    cr_assert_eq(pthread_create(&thread, NULL, fail_in_thread, NULL), 0);
    pthread_join(thread, NULL);
    cr_assert_eq(nd_error_last()->status, ND_ERR_CONFIG);
    cr_assert_str_eq(nd_error_last()->message, "mine");
}

/* Statuses are the documented exit codes: the numbers are an interface. */
Test(status, numbers_and_names)
{
    const struct {
        nd_status status;
        int code;
        const char *name;
    } expected[] = {
        {ND_OK, 0, "ok"},
        {ND_ERR_INTERNAL, 1, "internal"},
        {ND_ERR_CONFIG, 2, "configuration"},
        {ND_ERR_DATA, 65, "data"},
        {ND_ERR_NUMERIC, 70, "numeric"},
        {ND_ERR_RESOURCE, 71, "resource"},
        {ND_ERR_CANTCREATE, 73, "output"},
        {ND_ERR_IO, 74, "i/o"},
        {ND_ERR_PREEMPTED, 75, "preempted"},
        {ND_ERR_HANG, 124, "hang"},
    };
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        cr_assert_eq((int)expected[i].status, expected[i].code);
        cr_assert_str_eq(nd_status_name(expected[i].status), expected[i].name);
    }
    cr_assert_str_eq(nd_status_name((nd_status)99), "unknown");
}

Test(status, alloc_gives_zeroed_memory_and_an_error_instead_of_a_wrapped_size)
{
    int64_t *values = NULL;
    cr_assert_eq(ND_ALLOC(1000, &values), ND_OK);
    for (int i = 0; i < 1000; i++) {
        cr_assert_eq(values[i], 0);
    }
    free(values);
    values = NULL;
    /* volatile: the compiler must not see that the product is too large */
    volatile size_t count = SIZE_MAX / 4;
    cr_assert_eq(ND_ALLOC(count, &values), ND_ERR_RESOURCE);
    cr_assert_null(values);
    cr_assert_not_null(strstr(nd_error_last()->message, "elements of 8 bytes"));
    cr_assert_eq(ND_ALLOC(0, &values), ND_OK);
    cr_assert_not_null(values);
    free(values);
}

Test(status, a_broken_invariant_aborts, .signal = SIGABRT)
{
    volatile int zero = 0;
    ND_ASSERT(zero == 1);
}

static void end_with_abort(void *context)
{
    abort();
}

/* Memory of the C library may then be locked, so nothing may go on. */
Test(status, an_abort_without_an_exception_ends_the_process, .signal = SIGABRT)
{
    nd_abort_guard(ND_ABORT_EXCEPTION, end_with_abort, NULL);
}

Test(status, any_abort_of_a_guarded_call_is_caught)
{
    cr_expect_not(nd_abort_guard(ND_ABORT_ANY, end_with_abort, NULL));
}

Test(status, an_abort_is_caught_in_a_thread_that_blocks_all_signals)
{
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, NULL);
    cr_expect_not(nd_abort_guard(ND_ABORT_ANY, end_with_abort, NULL));
}

// SPDX-License-Identifier: Apache-2.0
/* Patterns matched by Oniguruma on a thread with a limit; the contract is in regex.h. */
#include "trainer/text/regex.h"

#include <math.h>
#include <oniguruma.h>
#include <stdio.h>

#include "runtime/base/thread.h"
#include "trainer/text/buffer.h"
#include "trainer/text/unicode.h"

enum {
    STACK_MAX = 1 << 22,    /* places of a match to come back to: about 200 MiB */
    RETRIES_MAX = 10000000, /* of one match, as in `tokenizers`: about a second */
    DEPTH_MAX = 250,  /* nested groups, which the compiler visits by recursion, as it does calls */
    SHORT_BYTES = 64, /* a text up to here is matched without the thread, with few steps back, */
    SHORT_RETRIES = 1000,
    SHORT_LOOKS =
        4 /* where the pattern has few look-arounds, whose steps Oniguruma does not count */
};

static const double LOOK_SECONDS = 0.02; /* between two looks at the thread's clock */

/* Used by its owner and by its thread; the last of the two frees it. */
struct nd_regex {
    const char *name; /* of the file; borrowed, and not read by the thread */
    double seconds;
    nd_thread thread; /* its stop is also set when the owner waits no longer */
    nd_monitor monitor;
    bool busy;                             /* work was asked for; under the monitor */
    nd_bytes pattern, text;                /* copies */
    regex_t *compiled;                     /* NULL: the pattern is still to be compiled */
    OnigRegion *region;                    /* of the last match */
    OnigMatchParam *limits, *few;          /* of the thread, and of a short text */
    int looks;                             /* look-arounds in the pattern */
    nd_u64s ends;                          /* of the words of the text */
    size_t taken;                          /* of these, by nd_regex_words */
    bool no_memory;                        /* for `ends` */
    int error;                             /* of Oniguruma, or 0, */
    UChar why[ONIG_MAX_ERROR_MESSAGE_LEN]; /* and what it says */
};

/* The thread. */

static void set_error(nd_regex *regex, int error, OnigErrorInfo *info)
{
    regex->error = error;
    regex->why[onig_error_code_to_str(regex->why, error, info)] = '\0';
}

static void add_end(nd_regex *regex, size_t end)
{
    regex->no_memory = nd_u64s_add(&regex->ends, end) != ND_OK;
}

/* An empty match where a word begins ends none: the next search begins a character later. */
static void match(nd_regex *regex, OnigMatchParam *limits)
{
    const UChar *text = regex->text.data, *end = text + regex->text.count;
    const size_t size = regex->text.count;
    for (size_t at = 0, from = 0; at < size && !regex->no_memory && !regex->thread.stop;) {
        const int place = from > size
                              ? ONIG_MISMATCH
                              : onig_search_with_param(regex->compiled, text, end, text + from, end,
                                                       regex->region, ONIG_OPTION_NONE, limits);
        if (place == ONIG_MISMATCH) {
            add_end(regex, size);
            return;
        }
        if (place < 0) {
            set_error(regex, place, NULL);
            return;
        }
        const size_t begin = (size_t)regex->region->beg[0], stop = (size_t)regex->region->end[0];
        if (stop <= at) {
            from += from < size ? (size_t)nd_char_at(text + from).bytes : 1;
            continue;
        }
        if (begin > at) {
            add_end(regex, begin);
        }
        if (stop > begin && !regex->no_memory) {
            add_end(regex, stop);
        }
        at = from = stop;
    }
}

static void release(void *context)
{
    nd_regex *regex = context;
    nd_monitor_fini(&regex->monitor);
    onig_free(regex->compiled);
    onig_region_free(regex->region, 1);
    onig_free_match_param(regex->limits);
    onig_free_match_param(regex->few);
    free(regex->pattern.data);
    free(regex->text.data);
    free(regex->ends.data);
    free(regex);
}

static void serve(void *context)
{
    nd_regex *regex = context;
    nd_monitor_lock(&regex->monitor);
    while (!regex->thread.stop) {
        if (!regex->busy) {
            nd_monitor_wait(&regex->monitor, ND_CLOCK_NEVER);
            continue;
        }
        nd_monitor_unlock(&regex->monitor);
        if (regex->compiled) {
            match(regex, regex->limits);
        } else {
            OnigErrorInfo info = {0};
            const UChar *pattern = regex->pattern.data;
            const int error =
                onig_new(&regex->compiled, pattern, pattern + regex->pattern.count,
                         ONIG_OPTION_NONE, ONIG_ENCODING_UTF8, ONIG_SYNTAX_DEFAULT, &info);
            if (error != ONIG_NORMAL) {
                regex->compiled = NULL;
                set_error(regex, error, &info);
            }
        }
        nd_monitor_lock(&regex->monitor);
        regex->busy = false;
        nd_monitor_tell(&regex->monitor);
    }
    nd_monitor_unlock(&regex->monitor);
}

/* The owner. */

/* The processor time that the thread has taken so far. */
static double seconds_taken(const nd_regex *regex)
{
    clockid_t clock;
    struct timespec now = {0};
    pthread_getcpuclockid(regex->thread.native, &clock);
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static nd_status fail_pattern(const nd_regex *regex, const char *why)
{
    return nd_fail(ND_ERR_DATA, "\"%s\": the pattern %.*s of \"Split\" %s", regex->name,
                   regex->pattern.count < 200 ? (int)regex->pattern.count : 200,
                   (const char *)regex->pattern.data, why);
}

/* Waits until the thread has done what was asked for. */
static nd_status wait_for(nd_regex *regex, double seconds)
{
    const double begin = seconds_taken(regex);
    nd_monitor_lock(&regex->monitor);
    regex->busy = true;
    nd_monitor_tell(&regex->monitor);
    while (regex->busy && seconds_taken(regex) - begin < seconds) {
        nd_monitor_wait(&regex->monitor, nd_clock_after(LOOK_SECONDS));
    }
    regex->thread.stop = regex->busy;
    nd_monitor_unlock(&regex->monitor);
    return regex->thread.stop ? fail_pattern(regex, "takes too long") : ND_OK;
}

static void initialize(void)
{
    OnigEncoding encoding = ONIG_ENCODING_UTF8;
    onig_initialize(&encoding, 1);
    onig_set_parse_depth_limit(DEPTH_MAX);
}

static nd_status start_thread(nd_regex *regex)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, initialize);
    regex->region = onig_region_new();
    regex->limits = onig_new_match_param();
    regex->few = onig_new_match_param();
    if (!regex->region || !regex->limits || !regex->few) {
        return nd_fail_memory("the pattern of a tokenizer");
    }
    onig_initialize_match_param(regex->limits);
    onig_set_match_stack_limit_size_of_match_param(regex->limits, STACK_MAX);
    onig_set_retry_limit_in_match_of_match_param(regex->limits, RETRIES_MAX);
    onig_initialize_match_param(regex->few);
    onig_set_match_stack_limit_size_of_match_param(regex->few, SHORT_RETRIES);
    onig_set_retry_limit_in_search_of_match_param(regex->few, SHORT_RETRIES);
    for (size_t i = 0; i + 2 < regex->pattern.count; i++) {
        const uint8_t *p = regex->pattern.data + i;
        regex->looks += p[0] == '(' && p[1] == '?' && strchr("=!<", p[2]) && p[2];
    }
    regex->thread.release = release;
    regex->thread.runs_library = true;
    return nd_thread_start(&regex->thread, &regex->monitor,
                           "a thread for the pattern of a tokenizer", serve, regex);
}

nd_status nd_regex_create(const char *pattern, size_t size, const char *name, double seconds,
                          nd_regex **out)
{
    nd_regex *regex;
    char why[ONIG_MAX_ERROR_MESSAGE_LEN + 32];
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(1, &regex));
    regex->name = name;
    regex->seconds = seconds;
    regex->monitor = (nd_monitor)ND_MONITOR_INIT;
    ND_TRY_OUT(nd_bytes_add(&regex->pattern, pattern, size));
    ND_TRY_OUT(size > ND_REGEX_PATTERN_BYTES_MAX
                   ? fail_pattern(regex, "has more than 4096 bytes, which is not supported")
                   : ND_OK);
    ND_TRY_OUT(start_thread(regex));
    ND_TRY_OUT(wait_for(regex, seconds));
    snprintf(why, sizeof why, "is not supported: %s", (const char *)regex->why);
    ND_TRY_OUT(regex->error ? fail_pattern(regex, why) : ND_OK);
    *out = regex;
    regex = NULL;
out:
    nd_regex_destroy(regex);
    return status;
}

void nd_regex_destroy(nd_regex *regex)
{
    if (regex && nd_thread_join(&regex->thread, regex->thread.stop ? 0 : INFINITY)) {
        release(regex);
    }
}

nd_status nd_regex_begin(nd_regex *regex, const uint8_t *text, size_t size)
{
    if (regex->thread.stop) {
        return fail_pattern(regex, "took too long for an earlier text");
    }
    regex->text.count = regex->ends.count = regex->taken = 0;
    regex->error = 0;
    ND_TRY(nd_bytes_add(&regex->text, text, size));
    if (size <= SHORT_BYTES && regex->looks <= SHORT_LOOKS) { /* to wake a thread takes longer */
        match(regex, regex->few);
        if (!regex->error && !regex->no_memory) {
            return ND_OK;
        }
        regex->ends.count = 0;
        regex->error = 0;
        regex->no_memory = false;
    }
    ND_TRY(wait_for(regex, regex->seconds + ND_REGEX_BYTE_SECONDS * (double)size));
    if (regex->no_memory || regex->error == ONIGERR_MEMORY) {
        regex->no_memory = false;
        return nd_fail_memory("matching the pattern of a tokenizer");
    }
    if (regex->error == ONIGERR_MATCH_STACK_LIMIT_OVER) {
        return fail_pattern(regex, "needs too much memory for a text");
    }
    if (regex->error == ONIGERR_RETRY_LIMIT_IN_MATCH_OVER) {
        return fail_pattern(regex, "takes too many steps for a text");
    }
    return regex->error ? fail_pattern(regex, (const char *)regex->why) : ND_OK;
}

int nd_regex_words(nd_regex *regex, size_t *ends, int room)
{
    int count = 0;
    while (count < room && regex->taken < regex->ends.count) {
        ends[count++] = regex->ends.data[regex->taken++];
    }
    return count;
}

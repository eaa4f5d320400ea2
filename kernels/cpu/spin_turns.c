// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/team.h"

#include <ctype.h>
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const int64_t usual_turns = 2000, active_turns = 30000000000; /* minutes */
static const char spaces[] = " \t\n\v\f\r";

static bool begins_with(const char *text, const char *word)
{
    return strncasecmp(text, word, strlen(word)) == 0;
}

/* Reads a number and its unit from the start of the text. *end is the rest of the text, or NULL
 * where it starts with no number. */
static int64_t read_number(const char *text, const char **end)
{
    static const char units[] = "kmgt";
    char *rest = NULL;
    errno = 0;
    unsigned long long number = strtoull(text, &rest, 10), scale = 1;
    if (rest == text || errno != 0) {
        *end = NULL;
        return 0;
    }
    rest += strspn(rest, spaces);
    const char *unit = *rest ? strchr(units, tolower((unsigned char)*rest)) : NULL;
    for (const char *u = units; unit && u <= unit; u++) {
        scale *= 1000;
    }
    *end = unit ? rest + 1 : rest;
    return number <= INT64_MAX / scale ? (int64_t)(number * scale) : INT64_MAX;
}

/* GOMP_SPINCOUNT; -1: there is none. */
static int64_t read_count(const char *text)
{
    const char *end = NULL;
    int64_t turns = INT64_MAX;
    if (!text) {
        return -1;
    }
    text += strspn(text, spaces);
    if (begins_with(text, "infinite") || begins_with(text, "infinity")) {
        end = text + strlen("infinite");
    } else {
        turns = read_number(text, &end);
    }
    return end && end[strspn(end, spaces)] == '\0' ? turns : -1;
}

/* OMP_WAIT_POLICY; -1: there is none. */
static int64_t read_policy(const char *text)
{
    if (!text) {
        return -1;
    }
    text += strspn(text, spaces);
    const bool active = begins_with(text, "active"), passive = begins_with(text, "passive");
    text += strlen(active ? "active" : passive ? "passive" : "");
    if (text[strspn(text, spaces)] != '\0') {
        return -1;
    }
    return active ? active_turns : passive ? 0 : -1;
}

int64_t nd_cpu_spin_turns(void)
{
    const int64_t count = read_count(getenv("GOMP_SPINCOUNT"));
    const int64_t of_policy = read_policy(getenv("OMP_WAIT_POLICY"));
    return count >= 0 ? count : of_policy >= 0 ? of_policy : usual_turns;
}

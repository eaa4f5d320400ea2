// SPDX-License-Identifier: Apache-2.0
/* Texts that grow, numbers and booleans as texts, and lists of words. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "runtime/config/reader.h"

nd_status nd_text_replace(char **target, const char *text)
{
    char *copy = strdup(text ? text : "");
    if (!copy) {
        return nd_fail_memory("a copy of a string");
    }
    free(*target);
    *target = copy;
    return ND_OK;
}

nd_status nd_text_begin(nd_text *text)
{
    *text = (nd_text){0};
    text->out = open_memstream(&text->data, &text->size);
    return text->out ? ND_OK : nd_fail_memory("a text");
}

void nd_text_quote(FILE *out, const char *value)
{
    fputc('"', out);
    for (const char *c = value; *c; c++) {
        fprintf(out, *c == '"' || *c == '\\' ? "\\%c" : "%c", *c);
    }
    fputc('"', out);
}

nd_status nd_text_finish(nd_text *text, char **out)
{
    const bool failed = ferror(text->out) != 0;
    if (fclose(text->out) != 0 || failed || !text->data) {
        free(text->data);
        return nd_fail_memory("a text of %zu bytes", text->size);
    }
    *out = text->data;
    return ND_OK;
}

bool nd_bool_parse(const char *text, bool digits, bool *out)
{
    static const char *const yes[] = {"true", "yes", "on", "1"};
    static const char *const no[] = {"false", "no", "off", "0"};
    for (int i = 0; i < 3 + digits; i++) {
        bool is_yes = strcasecmp(text, yes[i]) == 0;
        if (is_yes || strcasecmp(text, no[i]) == 0) {
            *out = is_yes;
            return true;
        }
    }
    return false;
}

bool nd_int_parse(const char *text, int64_t *out)
{
    const char *digits = text + (*text == '-' || *text == '+');
    if (!*digits || digits[strspn(digits, "0123456789")]) {
        return false;
    }
    errno = 0;
    long long value = strtoll(text, NULL, 10);
    if (errno) {
        return false;
    }
    *out = value;
    return true;
}

bool nd_real_parse(const char *text, double *out)
{
    if (!*text || text[strspn(text, "0123456789+-.eE")]) {
        return false;
    }
    char *end;
    double value = strtod(text, &end);
    if (*end || end == text || !isfinite(value)) {
        return false;
    }
    *out = value;
    return true;
}

void nd_real_format(double value, char *buffer, size_t size)
{
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(buffer, size, "%.*g", digits, value);
        if (strtod(buffer, NULL) == value) {
            return;
        }
    }
}

bool nd_list_word(const char *list, char between, int index, char *buffer, size_t size)
{
    const char ends[] = {between, '\0'};
    list = list && *list ? list : NULL;
    for (; list && index > 0; index--) {
        list = strchr(list, between);
        list = list ? list + 1 : NULL;
    }
    if (!list) {
        return false;
    }
    snprintf(buffer, size, "%.*s", (int)strcspn(list, ends), list);
    return true;
}

static char hyphen_of(char c)
{
    return c == '_' ? '-' : c;
}

bool nd_flag_list_holds(const char *list, const char *name)
{
    while (*list) {
        size_t i = 0;
        while (name[i] && hyphen_of(list[i]) == hyphen_of(name[i])) {
            i++;
        }
        if (!name[i] && (!list[i] || list[i] == ' ')) {
            return true;
        }
        list += strcspn(list, " ");
        list += strspn(list, " ");
    }
    return false;
}

void nd_flag_list_offer(nd_suggest *search, const char *list)
{
    char word[ND_FLAG_NAME_MAX];
    for (int i = 0; nd_list_word(list, ' ', i, word, sizeof word); i++) {
        nd_suggest_offer(search, word);
    }
}

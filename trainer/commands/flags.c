// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/commands/generate.h"

static bool same_name(const char *name, const char *word, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        char c = word[i] == '_' ? '-' : word[i];
        if (c != name[i]) { /* also at the end of the name */
            return false;
        }
    }
    return name[size] == '\0';
}

/* The flag of a word "--name" or "--name=value"; -1: it is none of the table. */
static int find(const nd_flag *flags, int count, const char *word, const char **value)
{
    const char *equals = strchr(word, '=');
    size_t size = equals ? (size_t)(equals - word) : strlen(word);
    *value = equals ? equals + 1 : NULL;
    for (int i = 0; i < count; i++) {
        if (same_name(flags[i].name, word, size)) {
            return i;
        }
    }
    return -1;
}

nd_status nd_flags_read(const nd_flag *flags, int flag_count, int argc, char **argv,
                        nd_flag_apply *apply, void *context)
{
    for (int i = 1; i < argc; i++) {
        const char *value;
        int flag = find(flags, flag_count, argv[i], &value);
        if (flag < 0) {
            continue;
        }
        if (!flags[flag].value && value) {
            return nd_fail(ND_ERR_CONFIG, "%s takes no value", flags[flag].name);
        }
        if (flags[flag].value && !value) {
            if (i + 1 == argc) {
                return nd_fail(ND_ERR_CONFIG, "%s needs a value: %s", flags[flag].name,
                               flags[flag].value);
            }
            value = argv[++i];
        }
        ND_TRY(apply(context, flag, value));
    }
    return ND_OK;
}

nd_status nd_flags_rest(const nd_flag *flags, int flag_count, int argc, char **argv,
                        const char *const *first, char ***rest, int *rest_count)
{
    int count = 0, firsts = 0;
    while (first[firsts]) {
        firsts++;
    }
    ND_TRY(ND_ALLOC(argc + firsts + 1, rest));
    char **out = *rest;
    out[count++] = argv[0];
    for (int i = 0; i < firsts; i++) {
        out[count++] = (char *)first[i];
    }
    for (int i = 1; i < argc; i++) {
        const char *value;
        int flag = find(flags, flag_count, argv[i], &value);
        if (flag < 0) {
            out[count++] = argv[i];
        } else {
            i += flags[flag].value && !value;
        }
    }
    *rest_count = count;
    return ND_OK;
}

void nd_flags_print(const nd_flag *flags, int flag_count)
{
    for (int i = 0; i < flag_count; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s%s%s", flags[i].name, flags[i].value ? " " : "",
                 flags[i].value ? flags[i].value : "");
        printf("  %-26s %s\n", name, flags[i].help);
    }
}

nd_status nd_flag_whole(const nd_flag *flag, const char *value, int64_t least, int64_t *out)
{
    char *end;
    errno = 0;
    long long number = strtoll(value, &end, 10);
    if (end == value || *end || errno != 0 || number < least) {
        return nd_fail(ND_ERR_CONFIG, "%s is \"%.40s\"; it must be a whole number of at least %lld",
                       flag->name, value, (long long)least);
    }
    *out = number;
    return ND_OK;
}

nd_status nd_flag_real(const nd_flag *flag, const char *value, double *out)
{
    char *end;
    double number = strtod(value, &end);
    if (end == value || *end || !isfinite(number)) {
        return nd_fail(ND_ERR_CONFIG, "%s is \"%.40s\"; it must be a number", flag->name, value);
    }
    *out = number;
    return ND_OK;
}

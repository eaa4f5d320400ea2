// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_CONFIG_SUPPORT_H
#define ND_TESTS_CONFIG_SUPPORT_H
/* Short forms for the tests of runtime/config: read a text or flags, expect a sentence. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/config/config.h"
#include "tests/support/printed.h"
#include "tests/support/tempdir.h"

/* The source tree; tests run in it when the variable is missing. */
static inline const char *source_path(const char *path)
{
    const char *root = getenv("ND_SOURCE_ROOT");
    return printed("%s/%s", root ? root : ".", path);
}

static inline nd_status read_text(nd_config *config, const char *text)
{
    assert_ok(nd_config_init(config));
    return nd_config_read_text(config, text, strlen(text), "test.yaml");
}

/* Flags without the program's name, over the defaults; what else they ask is in `asked`. */
static nd_cli asked;
#define FLAGS(config, ...)                                                                         \
    flags_of(config, sizeof((const char *[]){__VA_ARGS__}) / sizeof(const char *),                 \
             (const char *[]){__VA_ARGS__})
static inline nd_status flags_of(nd_config *config, size_t count, const char **flags)
{
    char *argv[32] = {"ndlaunch"};
    for (size_t i = 0; i < count; i++) {
        argv[i + 1] = (char *)flags[i];
    }
    assert_ok(nd_config_init(config));
    return nd_config_parse(config, &asked, (int)count + 1, argv);
}

/* Flags in one text, with blanks between them. What `asked` borrows is good until the next call. */
static inline nd_status flags_in(nd_config *config, const char *text)
{
    static char words[1024];
    char *rest = words;
    const char *flags[32];
    size_t count = 0;
    snprintf(words, sizeof words, "%s", text);
    for (char *word; (word = strsep(&rest, " "));) {
        cr_assert_lt(count, 30u);
        flags[count++] = word;
    }
    return flags_of(config, count, flags);
}

/* A file of this text, then flags in one text. */
static inline nd_status file_and_flags(nd_config *config, const char *text, const char *flags)
{
    tempdir dir;
    tempdir_make(&dir);
    tempdir_write(&dir, "test.yaml", text, strlen(text));
    nd_status status = flags_in(config, printed("%s --config-file %s", flags, dir.name));
    tempdir_remove(&dir);
    return status;
}

/* The keys in a text such as "train.steps=5;data.path=a" have these values. */
static inline void expect_keys(const nd_config *config, const char *keys, const char *input)
{
    char words[1024], *rest = words, *value = NULL;
    snprintf(words, sizeof words, "%s", keys);
    for (char *word; (word = strsep(&rest, ";"));) {
        char *equals = strchr(word, '=');
        cr_assert(equals, "%s", word);
        *equals = '\0';
        assert_ok(nd_config_get(config, word, &value));
        cr_expect_str_eq(value, equals + 1, "%s is %s, not %s: %s", word, value, equals + 1, input);
        free(value);
    }
}

/* Flags, or a text of YAML, and keys that they give; `resolved`: once the configuration is. */
typedef struct keys_case {
    const char *input, *keys;
    bool resolved;
} keys_case;

static inline void expect_cases(const keys_case *k, size_t count,
                                nd_status (*read)(nd_config *, const char *))
{
    nd_config c;
    for (const keys_case *end = k + count; k < end; k++) {
        cr_assert_eq(read(&c, k->input), ND_OK, "%s: %s", k->input, nd_error_last()->message);
        if (k->resolved) {
            cr_assert_eq(nd_config_resolve(&c), ND_OK, "%s: %s", k->input,
                         nd_error_last()->message);
        }
        expect_keys(&c, k->keys, k->input);
        nd_config_fini(&c);
    }
}

/* Flags, in one text, that are good. */
static inline void resolve_flags(nd_config *config, const char *text)
{
    assert_ok(flags_in(config, text));
    assert_ok(nd_config_resolve(config));
}

/* Every needle, separated by bars, must be in the thread's error sentence. */
static inline void expect_sentence(nd_status got, nd_status wanted, const char *needles)
{
    const char *said = nd_error_last()->message;
    char words[1024], *rest = words;
    cr_assert_eq(got, wanted, "status %d instead of %d for <%s>: %s", got, wanted, needles, said);
    snprintf(words, sizeof words, "%s", needles);
    for (char *needle; (needle = strsep(&rest, "|"));) {
        cr_expect(strstr(said, needle), "<%s> is not in: %s", needle, said);
    }
}

/* Expects that reading (`got`), or resolving what was read, is a configuration error. */
static inline void expect_bad(nd_config *config, nd_status got, const char *needles)
{
    got = got == ND_OK ? nd_config_resolve(config) : got;
    got = got == ND_OK ? nd_config_check_meeting(config) : got;
    expect_sentence(got, ND_ERR_CONFIG, needles);
    nd_config_fini(config);
}

/* Flags, or texts of YAML, each with the needles of its error. */
static inline void expect_refusals(const char *const (*refused)[2], size_t count,
                                   nd_status (*read)(nd_config *, const char *))
{
    nd_config config;
    for (size_t i = 0; i < count; i++) {
        expect_bad(&config, read(&config, refused[i][0]), refused[i][1]);
    }
}

static inline void expect_bad_text(const char *text, const char *needles)
{
    nd_config config;
    expect_bad(&config, read_text(&config, text), needles);
}

static inline void expect_bad_flags(const char *text, const char *needles)
{
    nd_config config;
    expect_bad(&config, flags_in(&config, text), needles);
}

/* For a value that is empty or has blanks. */
static inline void expect_bad_value(const char *flag, const char *value, const char *needles)
{
    nd_config config;
    expect_bad(&config, FLAGS(&config, flag, value), needles);
}

#endif

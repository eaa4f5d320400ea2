// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_CONFIG_SUPPORT_H
#define ND_TESTS_CONFIG_SUPPORT_H
/* Short forms for the tests of runtime/config: read a text or flags, expect a sentence. */
#include <criterion/criterion.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/config/config.h"

/* The source tree; tests run in it when the variable is missing. */
static inline const char *source_path(const char *path, char buffer[1024])
{
    const char *root = getenv("ND_SOURCE_ROOT");
    snprintf(buffer, 1024, "%s/%s", root ? root : ".", path);
    return buffer;
}

static inline nd_status read_text(nd_config *config, const char *text)
{
    cr_assert_eq(nd_config_init(config), ND_OK);
    return nd_config_read_text(config, text, strlen(text), "test.yaml");
}

/* Flags without the program's name, over the defaults. */
#define FLAGS(config, ...)                                                                         \
    flags_of(config, sizeof((const char *[]){__VA_ARGS__}) / sizeof(const char *),                 \
             (const char *[]){__VA_ARGS__})
static inline nd_status flags_of(nd_config *config, size_t count, const char **flags)
{
    char *argv[32] = {"ndlaunch"};
    nd_cli cli;
    for (size_t i = 0; i < count; i++) {
        argv[i + 1] = (char *)flags[i];
    }
    cr_assert_eq(nd_config_init(config), ND_OK);
    return nd_config_parse(config, &cli, (int)count + 1, argv);
}

/* Flags in one text, with blanks between them. */
static inline nd_status flags_in(nd_config *config, const char *text)
{
    char words[1024], *rest = words;
    const char *flags[32];
    size_t count = 0;
    snprintf(words, sizeof words, "%s", text);
    for (char *word; (word = strsep(&rest, " "));) {
        cr_assert_lt(count, 30u);
        flags[count++] = word;
    }
    return flags_of(config, count, flags);
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
        cr_assert_eq(nd_config_get(config, word, &value), ND_OK);
        cr_expect_str_eq(value, equals + 1, "%s is %s, not %s: %s", word, value, equals + 1, input);
        free(value);
    }
}

/* Flags, or a text of YAML, and keys that they give; `resolved`: once the configuration is. */
typedef struct keys_case {
    const char *input, *keys;
    bool resolved;
} keys_case;

static inline void expect_case(const keys_case *k, nd_status (*read)(nd_config *, const char *))
{
    nd_config c;
    cr_assert_eq(read(&c, k->input), ND_OK, "%s: %s", k->input, nd_error_last()->message);
    if (k->resolved) {
        cr_assert_eq(nd_config_resolve(&c), ND_OK, "%s: %s", k->input, nd_error_last()->message);
    }
    expect_keys(&c, k->keys, k->input);
    nd_config_fini(&c);
}

/* Every needle, up to NULL, must be in the thread's error sentence. */
static inline void expect_sentence(nd_status got, nd_status wanted, const char *input, ...)
{
    va_list args;
    cr_assert_eq(got, wanted, "status %d instead of %d for <%s>: %s", got, wanted, input,
                 nd_error_last()->message);
    va_start(args, input);
    for (const char *needle; (needle = va_arg(args, const char *));) {
        cr_expect(strstr(nd_error_last()->message, needle), "<%s> is not in: %s", needle,
                  nd_error_last()->message);
    }
    va_end(args);
}

/* The text fails to be read, or to be resolved, as a configuration error. */
#define EXPECT_BAD_TEXT(text, ...)                                                                 \
    do {                                                                                           \
        nd_config bad_;                                                                            \
        nd_status got_ = read_text(&bad_, text);                                                   \
        got_ = got_ == ND_OK ? nd_config_resolve(&bad_) : got_;                                    \
        expect_sentence(got_, ND_ERR_CONFIG, text, __VA_ARGS__, (char *)NULL);                     \
        nd_config_fini(&bad_);                                                                     \
    } while (0)

/* The same for flags: EXPECT_BAD_FLAGS(("--a", "b"), "needle", ...). */
#define UNWRAP(...) __VA_ARGS__
#define EXPECT_BAD_FLAGS(list, ...)                                                                \
    do {                                                                                           \
        nd_config bad_;                                                                            \
        nd_status got_ = FLAGS(&bad_, UNWRAP list);                                                \
        got_ = got_ == ND_OK ? nd_config_resolve(&bad_) : got_;                                    \
        got_ = got_ == ND_OK ? nd_config_check_meeting(&bad_) : got_;                              \
        expect_sentence(got_, ND_ERR_CONFIG, #list, __VA_ARGS__, (char *)NULL);                    \
        nd_config_fini(&bad_);                                                                     \
    } while (0)

#endif

// SPDX-License-Identifier: Apache-2.0
/* Values of a config.json's keys, with types and limits. */
#include <string.h>

#include "trainer/shape/keys.h"

const char *nd_key_type(const json_t *value)
{
    static const char *const names[] = {"a map",  "a list", "text",  "an integer",
                                        "a real", "true",   "false", "null"};
    return names[json_typeof(value)];
}

bool nd_key_is_unset(const json_t *value)
{
    return !value || json_is_null(value);
}

static nd_status refuse(const char *file, const char *key, const json_t *value, const char *wanted)
{
    return nd_fail(ND_ERR_DATA, "%s: %s is %s; it must be %s", file, key,
                   value ? nd_key_type(value) : "missing", wanted);
}

nd_status nd_key_int(const json_t *map, const char *file, const char *key, int64_t min, int64_t max,
                     int64_t fallback, int64_t *out)
{
    const json_t *value = json_object_get(map, key);
    if (nd_key_is_unset(value) && fallback != ND_KEY_NEEDED) {
        *out = fallback;
        return ND_OK;
    }
    if (!json_is_integer(value)) {
        return refuse(file, key, value, "an integer");
    }
    int64_t number = json_integer_value(value);
    if (number < min || number > max) {
        return nd_fail(ND_ERR_DATA, "%s: %s is %lld; supported are %lld to %lld", file, key,
                       (long long)number, (long long)min, (long long)max);
    }
    *out = number;
    return ND_OK;
}

nd_status nd_key_real(const json_t *map, const char *file, const char *key, double min, double max,
                      double fallback, double *out)
{
    const json_t *value = json_object_get(map, key);
    if (nd_key_is_unset(value) && fallback != (double)ND_KEY_NEEDED) {
        *out = fallback;
        return ND_OK;
    }
    if (!json_is_number(value)) {
        return refuse(file, key, value, "a number");
    }
    double number = json_number_value(value);
    if (!(number >= min && number <= max)) {
        return nd_fail(ND_ERR_DATA, "%s: %s is %g; supported are %g to %g", file, key, number, min,
                       max);
    }
    *out = number;
    return ND_OK;
}

nd_status nd_key_bool(const json_t *map, const char *file, const char *key, bool fallback,
                      bool *out)
{
    const json_t *value = json_object_get(map, key);
    if (nd_key_is_unset(value)) {
        *out = fallback;
        return ND_OK;
    }
    if (!json_is_boolean(value)) {
        return refuse(file, key, value, "true or false");
    }
    *out = json_is_true(value);
    return ND_OK;
}

nd_status nd_key_demand_text(const json_t *map, const char *file, const char *key,
                             const char *wanted)
{
    const json_t *value = json_object_get(map, key);
    if (nd_key_is_unset(value)) {
        return ND_OK;
    }
    if (!json_is_string(value)) {
        return nd_fail(ND_ERR_DATA, "%s: %s is %s; it must be \"%s\"", file, key,
                       nd_key_type(value), wanted);
    }
    if (strcmp(json_string_value(value), wanted) != 0) {
        return nd_fail(ND_ERR_DATA,
                       "%s: %s is \"%.80s\"; only \"%s\" is supported, so use a "
                       "model that has it",
                       file, key, json_string_value(value), wanted);
    }
    return ND_OK;
}

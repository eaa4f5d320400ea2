// SPDX-License-Identifier: Apache-2.0
#ifndef ND_SHAPE_KEYS_H
#define ND_SHAPE_KEYS_H
/*
 * For this folder alone: the values of a config.json's keys, and RoPE. `file` is what messages call
 * the map. An error is ND_ERR_DATA with the key and its value.
 */
#include <jansson.h>

#include "trainer/shape/shape.h"

/* "a list", "text": what a value is. */
const char *nd_key_type(const json_t *value);
/* A key that is absent or null. */
bool nd_key_is_unset(const json_t *value);

/* Such a key stands for `fallback`, or is an error where that is ND_KEY_NEEDED. */
#define ND_KEY_NEEDED INT64_MIN
nd_status nd_key_int(const json_t *map, const char *file, const char *key, int64_t min, int64_t max,
                     int64_t fallback, int64_t *out);
nd_status nd_key_real(const json_t *map, const char *file, const char *key, double min, double max,
                      double fallback, double *out);
nd_status nd_key_bool(const json_t *map, const char *file, const char *key, bool fallback,
                      bool *out);
/* A text must be `wanted` where the key is there. */
nd_status nd_key_demand_text(const json_t *map, const char *file, const char *key,
                             const char *wanted);

/* After the sizes: RoPE, in the old spelling (rope_theta, rope_scaling) or the new one
 * (rope_parameters). */
nd_status nd_shape_read_rope(const json_t *map, const char *file, nd_shape *shape);

#endif

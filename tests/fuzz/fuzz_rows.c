// SPDX-License-Identifier: Apache-2.0
/*
 * A line of JSON: the scanner agrees with Jansson on what it finds, where Jansson accepts the line.
 * It accepts more: NaN and Infinity, keys that stand twice, halves of surrogate pairs, bytes that
 * are no UTF-8, greater depths and numbers. Jansson 2.14 passes over some bytes of value 0 outside
 * strings, as in {"":3.\0}, so lines with such bytes are not compared.
 */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/fuzz.h"
#include "trainer/corpus/row.h"

/* Reads the input as a list: as many elements as jansson finds, each within the bytes. */
static void check_list(const uint8_t *data, size_t size, const json_t *root)
{
    nd_row_field element;
    const char *fault;
    size_t at = 0, count = 0;
    while (!(fault = nd_row_next(data, size, &at, &element)) && element.kind != ND_ROW_ABSENT) {
        ND_ASSERT(element.begin >= data && element.begin + element.size <= data + at && at <= size);
        count++;
    }
    ND_ASSERT(!fault || !json_is_array(root) || strstr(fault, "nested"));
    ND_ASSERT(fault || !root || count == json_array_size(root));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    nd_row_field fields[2] = {{.key = "text"}, {.key = "prompt"}};
    nd_bytes buffer = {0};
    size_t column = 0;
    const char *fault = nd_row_scan(data, size, fields, 2, &column);
    json_t *root = NULL;
    if (!memchr(data, 0, size)) {
        root = json_loadb((const char *)data, size, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, NULL);
    }
    ND_ASSERT(column >= 1 && column <= size + 1);
    ND_ASSERT(!fault || !json_is_object(root) || strstr(fault, "nested"));
    for (int i = 0; !fault && i < 2; i++) {
        const json_t *value = json_object_get(root, fields[i].key);
        int64_t lone = 0;
        ND_ASSERT(!value || fields[i].kind != ND_ROW_ABSENT);
        ND_ASSERT(!value || json_is_string(value) == (fields[i].kind == ND_ROW_STRING));
        if (fields[i].kind != ND_ROW_STRING) {
            continue;
        }
        ND_ASSERT(nd_row_text(&fields[i], &buffer, &lone) == ND_OK);
        if (value) {
            ND_ASSERT(fields[i].size == json_string_length(value));
            ND_ASSERT(memcmp(fields[i].begin, json_string_value(value), fields[i].size) == 0);
            ND_ASSERT(lone == 0);
        }
    }
    check_list(data, size, root);
    json_decref(root);
    free(buffer.data);
    return 0;
}

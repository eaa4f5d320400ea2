// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>
#include <string.h>

#include "runtime/base/math.h"
#include "trainer/gguf/gguf.h"

/* Numbers of the format (gguf_type). */
enum { KEY_U32 = 4, KEY_BOOL = 7, KEY_ARRAY = 9 }; /* with nd_gguf_elements */
enum { VERSION = 3, ALIGNMENT = 32 };

nd_status nd_gguf_head_init(nd_gguf_head *head, const char *family)
{
    *head = (nd_gguf_head){.family = family};
    head->keys = open_memstream(&head->keys_text, &head->keys_bytes);
    head->list = open_memstream(&head->list_text, &head->list_bytes);
    return head->keys && head->list ? ND_OK : nd_fail_memory("the head of a GGUF file");
}

/* Closes a stream; false: it lacks something. */
static bool close_stream(FILE **stream)
{
    bool whole = *stream && !ferror(*stream);
    whole = *stream && fclose(*stream) == 0 && whole;
    *stream = NULL;
    return whole;
}

void nd_gguf_head_fini(nd_gguf_head *head)
{
    close_stream(&head->keys);
    close_stream(&head->list);
    free(head->keys_text);
    free(head->list_text);
    *head = (nd_gguf_head){0};
}

/* A number of this many bytes. */
static void put(FILE *to, uint64_t value, size_t bytes)
{
    fwrite(&value, bytes, 1, to);
}

static void put_text(FILE *to, const char *text, size_t size)
{
    put(to, size, 8);
    fwrite(text, 1, size, to);
}

static FILE *begin_key(nd_gguf_head *head, const char *key, uint32_t type)
{
    const size_t family = *key == '.' ? strlen(head->family) : 0, size = strlen(key);
    head->key_count++;
    put(head->keys, family + size, 8);
    fwrite(head->family, 1, family, head->keys);
    fwrite(key, 1, size, head->keys);
    put(head->keys, type, 4);
    return head->keys;
}

void nd_gguf_u32(nd_gguf_head *head, const char *key, uint32_t value)
{
    put(begin_key(head, key, KEY_U32), value, 4);
}

void nd_gguf_f32(nd_gguf_head *head, const char *key, double value)
{
    const float f32 = (float)value;
    fwrite(&f32, sizeof f32, 1, begin_key(head, key, ND_GGUF_F32S));
}

void nd_gguf_flag(nd_gguf_head *head, const char *key, bool value)
{
    fputc(value, begin_key(head, key, KEY_BOOL));
}

void nd_gguf_text(nd_gguf_head *head, const char *key, const char *text, size_t size)
{
    put_text(begin_key(head, key, ND_GGUF_TEXTS), text, size);
}

void nd_gguf_array(nd_gguf_head *head, const char *key, nd_gguf_elements type, uint64_t count)
{
    put(begin_key(head, key, KEY_ARRAY), type, 4);
    put(head->keys, count, 8);
}

void nd_gguf_add_text(nd_gguf_head *head, const char *text, size_t size)
{
    put_text(head->keys, text, size);
}

void nd_gguf_add_number(nd_gguf_head *head, const void *number)
{
    fwrite(number, 4, 1, head->keys);
}

void nd_gguf_tensor(nd_gguf_head *head, const char *name, nd_gguf_type type, int64_t rows,
                    int64_t cols, uint64_t *offset)
{
    put_text(head->list, name, strlen(name));
    put(head->list, rows > 1 ? 2 : 1, 4); /* then the axis of adjacent elements first */
    put(head->list, (uint64_t)cols, 8);
    put(head->list, (uint64_t)rows, rows > 1 ? 8 : 0);
    put(head->list, type, 4);
    put(head->list, head->data_bytes, 8);
    head->tensor_count++;
    *offset = head->data_bytes;
    head->data_bytes +=
        nd_round_up_bytes((size_t)rows * (size_t)nd_gguf_bytes(type, cols), ALIGNMENT);
}

nd_status nd_gguf_head_write(nd_gguf_head *head, char **out, size_t *size)
{
    char *text = NULL;
    size_t bytes = 0;
    const bool keys = close_stream(&head->keys), list = close_stream(&head->list);
    FILE *all = keys && list ? open_memstream(&text, &bytes) : NULL;
    if (!all) {
        return nd_fail_memory("the head of a GGUF file");
    }
    fwrite("GGUF", 1, 4, all);
    put(all, VERSION, 4);
    put(all, head->tensor_count, 8);
    put(all, head->key_count, 8);
    fwrite(head->keys_text, 1, head->keys_bytes, all);
    fwrite(head->list_text, 1, head->list_bytes, all);
    for (size_t i = 24 + head->keys_bytes + head->list_bytes; i % ALIGNMENT != 0; i++) {
        fputc(0, all);
    }
    if (!close_stream(&all)) {
        free(text);
        return nd_fail_memory("the head of a GGUF file");
    }
    *out = text;
    *size = bytes;
    return ND_OK;
}

// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>
#include <string.h>

#include "runtime/base/math.h"
#include "trainer/gguf/gguf.h"

/* Numbers of the format (gguf_type). */
enum { KEY_U32 = 4, KEY_I32 = 5, KEY_F32 = 6, KEY_BOOL = 7, KEY_STRING = 8, KEY_ARRAY = 9 };
enum { VERSION = 3, ALIGNMENT = 32 };

nd_status nd_gguf_head_init(nd_gguf_head *head)
{
    *head = (nd_gguf_head){0};
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

static void put_u32(FILE *to, uint32_t value)
{
    fwrite(&value, sizeof value, 1, to);
}

static void put_u64(FILE *to, uint64_t value)
{
    fwrite(&value, sizeof value, 1, to);
}

static void put_text(FILE *to, const char *text, size_t size)
{
    put_u64(to, size);
    fwrite(text, 1, size, to);
}

static FILE *begin_key(nd_gguf_head *head, const char *key, uint32_t type)
{
    head->key_count++;
    put_text(head->keys, key, strlen(key));
    put_u32(head->keys, type);
    return head->keys;
}

void nd_gguf_u32(nd_gguf_head *head, const char *key, uint32_t value)
{
    put_u32(begin_key(head, key, KEY_U32), value);
}

void nd_gguf_f32(nd_gguf_head *head, const char *key, double value)
{
    begin_key(head, key, KEY_F32);
    nd_gguf_add_f32(head, (float)value);
}

void nd_gguf_flag(nd_gguf_head *head, const char *key, bool value)
{
    fputc(value, begin_key(head, key, KEY_BOOL));
}

void nd_gguf_text(nd_gguf_head *head, const char *key, const char *text, size_t size)
{
    put_text(begin_key(head, key, KEY_STRING), text, size);
}

static void begin_array(nd_gguf_head *head, const char *key, uint32_t type, uint64_t count)
{
    begin_key(head, key, KEY_ARRAY);
    put_u32(head->keys, type);
    put_u64(head->keys, count);
}

void nd_gguf_texts(nd_gguf_head *head, const char *key, uint64_t count)
{
    begin_array(head, key, KEY_STRING, count);
}

void nd_gguf_i32s(nd_gguf_head *head, const char *key, uint64_t count)
{
    begin_array(head, key, KEY_I32, count);
}

void nd_gguf_f32s(nd_gguf_head *head, const char *key, uint64_t count)
{
    begin_array(head, key, KEY_F32, count);
}

void nd_gguf_add_text(nd_gguf_head *head, const char *text, size_t size)
{
    put_text(head->keys, text, size);
}

void nd_gguf_add_i32(nd_gguf_head *head, int32_t value)
{
    fwrite(&value, sizeof value, 1, head->keys);
}

void nd_gguf_add_f32(nd_gguf_head *head, float value)
{
    fwrite(&value, sizeof value, 1, head->keys);
}

void nd_gguf_tensor(nd_gguf_head *head, const char *name, nd_gguf_type type, int64_t rows,
                    int64_t cols, uint64_t *offset)
{
    put_text(head->list, name, strlen(name));
    put_u32(head->list,
            rows > 1 ? 2 : 1); /* the format names the axis of adjacent elements first */
    put_u64(head->list, (uint64_t)cols);
    if (rows > 1) {
        put_u64(head->list, (uint64_t)rows);
    }
    put_u32(head->list, type);
    put_u64(head->list, head->data_bytes);
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
    put_u32(all, VERSION);
    put_u64(all, head->tensor_count);
    put_u64(all, head->key_count);
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

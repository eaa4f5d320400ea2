// SPDX-License-Identifier: Apache-2.0
/* The header of a file in torch DCP's dialect: what the reader accepts has its offsets in range and
 * no two entries of a tensor in one place. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "trainer/checkpoint/dcp.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const nd_dcp_list *list, uint64_t file_bytes)
{
    for (int64_t i = 0; i < list->count; i++) {
        const nd_dcp_entry *e = &list->entries[i];
        ND_ASSERT(e->begin <= e->end && e->end <= file_bytes && e->name);
        ND_ASSERT(e->rect.row >= 0 && e->rect.col >= 0 && e->rect.rows >= 0 && e->rect.cols >= 0);
        ND_ASSERT(e->rect.row <= (int64_t)1 << 60 && e->rect.rows <= (int64_t)1 << 60);
        for (int64_t j = 0; j < i && e->rect.axes <= 2; j++) {
            const nd_dcp_entry *other = &list->entries[j];
            ND_ASSERT(strcmp(e->name, other->name) != 0 || e->rect.row != other->rect.row ||
                      e->rect.col != other->rect.col || other->rect.axes > 2);
        }
    }
}

/* The first two bytes are the size of the data behind the header. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    nd_safetensors_list tensors = {0};
    nd_dcp_list list = {0};
    if (size < 2) {
        return 0;
    }
    uint64_t file_bytes = 8 + (size - 2) + (uint64_t)data[0] * 256 + data[1];
    if (nd_safetensors_parse((const char *)data + 2, size - 2, file_bytes, "input", &tensors) ==
        ND_OK) {
        if (nd_dcp_entries(&tensors, "input", &list) == ND_OK) {
            check(&list, file_bytes);
            nd_dcp_list_fini(&list);
        }
        nd_safetensors_list_fini(&tensors);
    }
    return 0;
}

// SPDX-License-Identifier: Apache-2.0
/* A whole safetensors file from memory: what the reader accepts must lie inside the file, chained
 * without holes. */
#include "tests/fuzz/fuzz.h"
#include "trainer/weights/safetensors.h"

static void check(const nd_safetensors_list *list, uint64_t file_bytes)
{
    uint64_t end = list->count > 0 ? list->tensors[0].begin : file_bytes;
    for (int64_t i = 0; i < list->count; i++) {
        const nd_safetensors_tensor *t = &list->tensors[i];
        ND_ASSERT(t->begin == end && t->end >= t->begin && t->end <= file_bytes);
        uint64_t bits = (uint64_t)nd_safetensors_tensor_count(t) *
                        (uint64_t)nd_safetensors_dtype_bits(t->dtype);
        ND_ASSERT(bits == (t->end - t->begin) * 8);
        ND_ASSERT(nd_safetensors_list_find(list, t->name) == t);
        end = t->end;
    }
    ND_ASSERT(end == file_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int fd;
    nd_safetensors_list list = {0};
    (void)fuzz_file(data, size, &fd);
    if (nd_safetensors_read_header(fd, "input", &list) == ND_OK) {
        check(&list, size);
        nd_safetensors_list_fini(&list);
    }
    return 0;
}

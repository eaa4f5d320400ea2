// SPDX-License-Identifier: Apache-2.0
/* A GGUF file from memory: what the reader accepts lies inside the file, and its values can be
 * read. */
#include "tests/fuzz/fuzz.h"
#include "trainer/weights/gguf.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int fd;
    const char *path = fuzz_file(data, size, &fd);
    nd_safetensors_list list;
    nd_shape shape;
    if (nd_gguf_open(path, &list, &shape, NULL) != ND_OK) {
        return 0;
    }
    for (int64_t i = 0; i < list.count; i++) {
        const nd_safetensors_tensor *t = &list.tensors[i];
        float value;
        ND_ASSERT(t->begin <= t->end && t->end <= size);
        if (t->shape[0] % shape.head_dim == 0) { /* as nd_hf_reader_check knows of q and k */
            const int64_t all = nd_safetensors_tensor_count(t);
            ND_ASSERT(nd_gguf_read(fd, path, t, shape.head_dim, all - 1, 1, &value) == ND_OK);
            ND_ASSERT(nd_gguf_read(fd, path, t, shape.head_dim, all / 2, 1, &value) == ND_OK);
        }
    }
    nd_safetensors_list_fini(&list);
    return 0;
}

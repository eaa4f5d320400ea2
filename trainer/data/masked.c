// SPDX-License-Identifier: Apache-2.0
/* Megatron files with a loss mask beside them (trainer/corpus/loss_mask.h), which is read when they
 * are opened and kept in memory. */
#include "trainer/data/formats.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/hash.h"

static nd_status read_mask(nd_dataset *dataset, const char *path, const char *idx)
{
    nd_masked *masked = dataset->masked;
    char index_sha256[65], bin_sha256[65], *data = NULL;
    size_t size = 0;
    const nd_loss_mask_pair pair = {.bin = dataset->path,
                                    .idx = idx,
                                    .tokens = (uint64_t)dataset->tokens,
                                    .index_sha256 = index_sha256,
                                    .bin_sha256 = bin_sha256};
    /* No two spans touch that the writers make; others may. */
    const size_t most =
        ND_LOSS_MASK_HEADER_BYTES + 16 * (size_t)dataset->tokens + ND_LOSS_MASK_DIGEST_BYTES;
    ND_TRY(nd_fs_read(path, most, ND_ERR_DATA, &data, &size));
    masked->data = (uint8_t *)data;
    ND_TRY(nd_sha256_file(idx, index_sha256));
    ND_TRY(nd_loss_mask_bin_sha256(dataset->map.data, dataset->map.size, bin_sha256));
    return nd_loss_mask_parse(masked->data, size, path, &pair, &masked->view);
}

nd_status nd_masked_open(nd_dataset *dataset, const char *path, const char *idx)
{
    bool there = false; /* a link to nowhere is no reason to count all tokens */
    ND_TRY(nd_fs_exists(path, &there));
    if (!there) {
        return ND_OK;
    }
    ND_TRY(ND_ALLOC(1, &dataset->masked));
    return read_mask(dataset, path, idx);
}

void nd_masked_close(nd_masked *masked)
{
    if (masked) {
        free(masked->data);
        free(masked);
    }
}

nd_span_list nd_masked_spans(const nd_dataset *dataset)
{
    const nd_loss_mask_view *view = &dataset->masked->view;
    return (nd_span_list){.pairs = view->pairs, .count = view->spans};
}

nd_status nd_masked_piece(const nd_dataset *dataset, const nd_piece *piece, int32_t *inputs,
                          int32_t *labels)
{
    ND_TRY(nd_flat_piece(dataset, piece, inputs, labels));
    if (!dataset->masked) {
        return ND_OK;
    }
    const nd_span_list spans = nd_masked_spans(dataset);
    return nd_spans_ignore(&spans, piece, labels);
}

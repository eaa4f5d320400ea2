// SPDX-License-Identifier: Apache-2.0
/* A manifest of a checkpoint, whose digest is made right here, in place of one that it has, so that
 * the fuzzer reaches what lies behind it: what the reader accepts can be written, read again, and
 * laid out. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/fuzz.h"
#include "trainer/checkpoint/manifest.h"

/* Every rectangle lies in its tensor. */
static void check_piece(const nd_piece *piece)
{
    const nd_span *r = &piece->span;
    ND_ASSERT(r->row >= 0 && r->col >= 0 && r->rows > 0 && r->cols > 0);
    ND_ASSERT(r->row + r->rows <= r->param->rows && r->col + r->cols <= r->param->cols);
}

static void check(const nd_manifest *m)
{
    nd_layout *layout = NULL;
    nd_manifest again = {0};
    char *text = NULL;
    size_t bytes = 0;
    ND_ASSERT(nd_manifest_format(m, &text, &bytes) == ND_OK);
    ND_ASSERT(nd_manifest_parse(text, bytes, "again", &again) == ND_OK);
    int rank = m->writer_count - 1;
    ND_ASSERT(nd_manifest_layout(&m->shape, m->layout, &m->mesh, nd_mesh_coord_of(&m->mesh, rank),
                                 &layout) == ND_OK);
    nd_holder holder = nd_holder_of(&m->mesh, rank);
    nd_piece *pieces = calloc(3 * (size_t)layout->param_count, sizeof *pieces);
    ND_ASSERT(pieces);
    const int count = nd_pieces_written(layout, &holder, pieces);
    for (int i = 0; i < count; i++) {
        check_piece(&pieces[i]);
    }
    free(pieces);
    nd_layout_destroy(layout);
    nd_manifest_fini(&again);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char text[1 << 17];
    char digest[ND_DIGEST_TEXT_MAX];
    nd_manifest manifest = {0};
    if (size > sizeof text - 256) {
        return 0;
    }
    const uint8_t *had =
        memmem(data, size, ND_MANIFEST_DIGEST_HEAD, strlen(ND_MANIFEST_DIGEST_HEAD));
    size = had ? (size_t)(had - data) : size;
    memcpy(text, data, size);
    bool sha = memmem(data, size, "\"sha256\"", 8) != NULL;
    ND_ASSERT(nd_digest_text(sha ? ND_CHECKSUM_SHA256 : ND_CHECKSUM_XXH3, text, size, digest) ==
              ND_OK);
    int tail =
        snprintf(text + size, 256, ND_MANIFEST_DIGEST_HEAD "%s" ND_MANIFEST_DIGEST_TAIL, digest);
    if (nd_manifest_parse(text, size + (size_t)tail, "input", &manifest) == ND_OK) {
        check(&manifest);
        nd_manifest_fini(&manifest);
    }
    return 0;
}

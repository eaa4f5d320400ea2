// SPDX-License-Identifier: Apache-2.0
/* Files that are no text and would train a model on their compressed bytes, told by how they
 * begin. */
#include <string.h>

#include "trainer/data/formats.h"

static const struct {
    const char *begin;
    size_t size;
    const char *kind, *mend;
} kinds[] = {
    {"\x1f\x8b", 2, "compressed with gzip", "unpack it with gunzip"},
    {"\x28\xb5\x2f\xfd", 4, "compressed with zstd", "unpack it with unzstd"},
    {"\xfd"
     "7zXZ",
     5, "compressed with xz", "unpack it with unxz"},
    {"BZh91AY&SY", 10, "compressed with bzip2", "unpack it with bunzip2"},
    {"PK\x03\x04", 4, "a zip archive", "unpack it with unzip"},
    {"PAR1", 4, "a Parquet file",
     "write its column of text as JSON lines of the form {\"text\": \"...\"}"},
    {"ARROW1", 6, "an Arrow file",
     "write its column of text as JSON lines of the form {\"text\": \"...\"}"},
    {"\x89PNG", 4, "a PNG image", "name a text"},
    {"%PDF-", 5, "a PDF document", "extract its text with pdftotext"},
    {"MMIDIDX", 7, "a Megatron index", "name the pair of .bin and .idx without the suffix"},
};

nd_status nd_text_check(const nd_dataset *dataset)
{
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (dataset->map.size >= kinds[i].size &&
            memcmp(dataset->map.data, kinds[i].begin, kinds[i].size) == 0) {
            return nd_fail(ND_ERR_DATA, "\"%s\" is %s, not text: %s", dataset->path, kinds[i].kind,
                           kinds[i].mend);
        }
    }
    return ND_OK;
}

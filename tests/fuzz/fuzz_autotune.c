// SPDX-License-Identifier: Apache-2.0
/* Any bytes as a run.json whose choices are replayed. */
#include "tests/fuzz/fuzz.h"
#include "trainer/tune/measure.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const nd_shape shape = {.vocab = 256,
                                   .hidden = 64,
                                   .ffn = 96,
                                   .layers = 3,
                                   .heads = 4,
                                   .kv_heads = 2,
                                   .head_dim = 16};
    nd_config config;
    nd_tuning *tuning = NULL;
    if (nd_config_init(&config) == ND_OK &&
        nd_record_read((const char *)data, size, "run.json", &config, &shape, &tuning) == ND_OK) {
        ND_ASSERT(nd_record_write(tuning, &config, &shape) == ND_OK);
    }
    nd_tuning_destroy(tuning);
    nd_config_fini(&config);
    return 0;
}

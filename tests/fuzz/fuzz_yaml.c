// SPDX-License-Identifier: Apache-2.0
/* Any bytes as a configuration file: parsed, mapped onto the fields, resolved. What passes must
 * read back the same when printed; what fails must have a message without control characters. */
#include <stdlib.h>
#include <string.h>

#include "runtime/base/log.h"
#include "runtime/base/printable.h"
#include "runtime/config/config.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    nd_config config, again;
    nd_log_init(ND_LOG_ERROR, NULL);
    ND_ASSERT(nd_config_init(&config) == ND_OK);
    ND_ASSERT(nd_config_init(&again) == ND_OK);
    if (nd_config_read_text(&config, (const char *)data, size, "fuzz.yaml") == ND_OK &&
        nd_config_resolve(&config) == ND_OK) {
        char *once = NULL, *twice = NULL;
        ND_ASSERT(nd_config_to_yaml(&config, false, &once) == ND_OK);
        ND_ASSERT(nd_config_read_text(&again, once, strlen(once), "printed.yaml") == ND_OK);
        ND_ASSERT(nd_config_resolve(&again) == ND_OK);
        ND_ASSERT(nd_config_to_yaml(&again, false, &twice) == ND_OK);
        ND_ASSERT(strcmp(once, twice) == 0);
        free(once);
        free(twice);
    }
    ND_ASSERT(nd_is_printable(nd_error_last()->message));
    nd_config_fini(&config);
    nd_config_fini(&again);
    return 0;
}

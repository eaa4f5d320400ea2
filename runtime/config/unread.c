// SPDX-License-Identifier: Apache-2.0
/* Settings that the run does not read. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/config/reader.h"

static bool is_delayed_key(int field)
{
    return field == ND_FIELD_fp8_format || field == ND_FIELD_fp8_amax_history_length ||
           field == ND_FIELD_fp8_amax_compute || field == ND_FIELD_fp8_margin;
}

/* "fp8.margin, fp8.format": keys of the section that differ from their defaults; NULL when there
 * are none. */
static nd_status changed_keys(const nd_config *config, bool delayed_only, char **out)
{
    nd_config usual;
    nd_text names = {0};
    nd_status status = nd_config_init(&usual);
    *out = NULL;
    for (int i = 0; i < ND_FIELD_COUNT && status == ND_OK; i++) {
        char *value = NULL, *initial = NULL;
        if (strcmp(nd_fields[i].section, "fp8") != 0 || (delayed_only && !is_delayed_key(i))) {
            continue;
        }
        status = nd_field_format(config, (nd_field_id)i, &value);
        status = status == ND_OK ? nd_field_format(&usual, (nd_field_id)i, &initial) : status;
        if (status == ND_OK && strcmp(value, initial) != 0) {
            nd_text_append(&names, "%sfp8.%s", names.used ? ", " : "", nd_fields[i].key);
        }
        free(value);
        free(initial);
    }
    nd_config_fini(&usual);
    if (status != ND_OK || names.used == 0) {
        free(names.data);
        return status;
    }
    return nd_text_finish(&names, out);
}

nd_status nd_config_each_warning(const nd_config *config,
                                 void (*line)(void *context, const char *text), void *context)
{
    bool fp8 = config->train.precision == ND_PRECISION_FP8;
    char *keys = NULL, text[400];
    if (!fp8 || config->fp8.recipe != ND_FP8_DELAYED) {
        ND_TRY(changed_keys(config, fp8, &keys));
    }
    if (keys) {
        snprintf(text, sizeof text,
                 fp8 ? "%s: without effect, because only fp8.recipe delayed reads them"
                     : "%s: without effect, because train.precision is not fp8",
                 keys);
        line(context, text);
        free(keys);
    }
    return ND_OK;
}

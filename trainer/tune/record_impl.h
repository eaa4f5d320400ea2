// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TUNE_RECORD_IMPL_H
#define ND_TUNE_RECORD_IMPL_H
/* What the writer and the reader of records share. */
#include <jansson.h>

#include "trainer/tune/record.h"

/* Keys of a product: its extents in memory's order. */
#define ND_RECORD_EXTENTS(X) X(m) X(n) X(k) X(lda) X(ldb) X(ldd)

extern const char *const nd_record_scaling[3]; /* by nd_lt_scaling */

/* What must be the same where a record is replayed: keys and values as text. A new reference. */
nd_status nd_record_settings(const nd_config *config, const nd_llama_shape *shape, json_t **out);

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TUNE_RECORD_H
#define ND_TUNE_RECORD_H
/* A tuning as JSON: the value of "autotune" in run.json, which other runs replay. docs/formats.md
 * lists its keys. */
#include "trainer/tune/tuning.h"

/* Fills tuning->json. */
nd_status nd_record_write(nd_tuning *tuning, const nd_config *config, const nd_llama_shape *shape);

/*
 * Reads {"autotune": {...}, ...}; other keys are not looked at. `name` stands for the text in
 * messages. ND_ERR_DATA: no JSON, no record, or one that is damaged. ND_ERR_CONFIG, with the key
 * and both values: a record for another model, mesh or precision. The caller destroys.
 */
nd_status nd_record_read(const char *text, size_t bytes, const char *name, const nd_config *config,
                         const nd_llama_shape *shape, nd_tuning **out);

#endif

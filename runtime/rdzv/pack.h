// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_PACK_H
#define ND_RDZV_PACK_H
/*
 * What an exchange gives to every rank, made small by zstd. Thousands of ranks send names of the
 * same hosts and digests of the same settings. The store packs the result once for all ranks.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime/base/status.h"

/* *out is new memory with *packed bytes. False: these would be more than 7/8 of `count`, or memory
 * ran out; the bytes are to be sent as they are. */
bool nd_pack(const uint8_t *bytes, size_t count, uint8_t **out, size_t *packed);

/* ND_ERR_IO unless the packed bytes are `count` bytes. Nothing is written beyond these. */
nd_status nd_unpack(const uint8_t *packed, size_t packed_bytes, void *out, size_t count);

#endif

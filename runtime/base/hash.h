// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_HASH_H
#define ND_BASE_HASH_H
/* SHA-256 (OpenSSL) in lower-case hexadecimal digits. */
#include <stddef.h>

#include "runtime/base/status.h"

nd_status nd_sha256(const void *data, size_t size, char hex[65]);
/* The same of a whole file, read from end to end. */
nd_status nd_sha256_file(const char *path, char hex[65]);

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_LIBRARY_H
#define ND_BASE_LIBRARY_H
/*
 * Opens shared libraries that read files of the working directory while they are loaded. Such a
 * file may come with data or a model that somebody else made, so it must not configure a library.
 */
#include "runtime/base/status.h"

/*
 * dlopen with the working directory "/", which is the process's own again afterwards: no other
 * thread may use a relative path meanwhile. ND_OK with *out NULL where dlopen fails, whose reason
 * dlerror has. ND_ERR_IO when the working directory cannot be left or entered again.
 */
nd_status nd_library_open(const char *name, int flags, void **out);

#endif

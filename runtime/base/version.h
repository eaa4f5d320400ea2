// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_VERSION_H
#define ND_BASE_VERSION_H
/*
 * The version that all programs of a job must share. `ndtrain check` and `--version` print "NAME
 * VERSION" first; members of a job say it in their hello. The build gives it (project version).
 */
#ifndef ND_VERSION
#error "the build defines ND_VERSION"
#endif

#endif

// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_SHM_FOLDER_H
#define ND_BASE_SHM_FOLDER_H
/*
 * A folder below /dev/shm for the shared memory of one process. Libraries that make such memory
 * remove its files again, but a process that is killed in between leaves them, and they occupy
 * memory until somebody removes them. The folder's name holds user, pid namespace, pid and start
 * time, so that any later process of the user can tell that the owner is dead.
 */
#include <stddef.h>

enum { ND_SHM_FOLDER_MAX = 160 };

/* Makes the folder of this process, or returns the one that it has. "" when it cannot be made: then
 * the library's own place has to do. */
void nd_shm_folder_make(char path[ND_SHM_FOLDER_MAX]);
/* Removes the folder of this process if it is empty, as libraries leave it at their end. */
void nd_shm_folder_remove(void);
/* Removes the folders of processes of this user and pid namespace that are dead. */
void nd_shm_folders_clean(void);

#endif

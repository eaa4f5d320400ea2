// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DEVICE_CUDA_PLACES_H
#define ND_DEVICE_CUDA_PLACES_H
/*
 * Folders in which a library of CUDA may lie beside those that the loader searches by itself: a
 * toolkit that is named, a Python environment of which this program is a part, and the toolkit that
 * built it. In every build; only the file system is asked.
 */
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

typedef struct nd_cuda_places {
    const char *home, *path; /* CUDA_HOME and CUDA_PATH; NULL or "": not set */
    const char *program;     /* the path of the running program; "": not known */
    const char *toolkit;     /* the root of the toolkit that built the program; "": none */
} nd_cuda_places;

/* Those of this process. `program` is the storage of that field. */
nd_cuda_places nd_cuda_places_here(char program[PATH_MAX]);

/*
 * The n-th existing file of this name, from 0, in this order: in the folders of the libraries of
 * CUDA_HOME and CUDA_PATH; in the NVIDIA packages of each Python environment above the program
 * (ENV/bin/ndtrain, ENV/lib/python3.11/site-packages/X/ndtrain); beside the toolkit. False: there
 * are not so many.
 */
bool nd_cuda_places_find(const nd_cuda_places *places, const char *name, int n,
                         char found[PATH_MAX]);

#endif

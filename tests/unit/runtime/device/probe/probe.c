// SPDX-License-Identifier: Apache-2.0
/* Stands in for a library of CUDA in tests of where it is found. */
int nd_probe(void);
int nd_probe(void)
{
    return 7;
}

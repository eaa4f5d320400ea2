// SPDX-License-Identifier: Apache-2.0
/*
 * A libcuda.so.1 that cuDNN can open to build plans without a GPU: loading code succeeds with
 * made-up handles, everything that would need a device says that there is none. Only the test of
 * plans finds it; it is never installed.
 */
#define NO_DEVICE 100 /* CUDA_ERROR_NO_DEVICE */

/* Makes a handle through its first argument. */
#define MAKES(name)                                                                                \
    int name(void **out);                                                                          \
    int name(void **out)                                                                           \
    {                                                                                              \
        *out = (void *)&name;                                                                      \
        return 0;                                                                                  \
    }
/* Writes a number through its first argument. */
#define READS(name, value)                                                                         \
    int name(int *out);                                                                            \
    int name(int *out)                                                                             \
    {                                                                                              \
        *out = value;                                                                              \
        return 0;                                                                                  \
    }
#define RETURNS(name, code)                                                                        \
    int name(void);                                                                                \
    int name(void)                                                                                 \
    {                                                                                              \
        return code;                                                                               \
    }

MAKES(cuLibraryLoadData)
MAKES(cuLibraryGetKernel)
MAKES(cuLibraryGetModule)
MAKES(cuKernelGetFunction)
MAKES(cuModuleLoadData)
MAKES(cuModuleLoadDataEx)
MAKES(cuModuleGetFunction)
READS(cuDriverGetVersion, 13000)
READS(cuFuncGetAttribute, 0)
READS(cuKernelGetAttribute, 0)
RETURNS(cuLibraryUnload, 0)
RETURNS(cuModuleUnload, 0)
RETURNS(cuFuncSetAttribute, 0)
RETURNS(cuKernelSetAttribute, 0)

RETURNS(cuInit, NO_DEVICE)
RETURNS(cuCtxGetCurrent, NO_DEVICE)
RETURNS(cuCtxGetDevice, NO_DEVICE)
RETURNS(cuCtxGetLimit, NO_DEVICE)
RETURNS(cuCtxPopCurrent, NO_DEVICE)
RETURNS(cuCtxPushCurrent, NO_DEVICE)
RETURNS(cuDeviceGet, NO_DEVICE)
RETURNS(cuDeviceGetAttribute, NO_DEVICE)
RETURNS(cuDeviceGetCount, NO_DEVICE)
RETURNS(cuDevicePrimaryCtxRelease, NO_DEVICE)
RETURNS(cuDevicePrimaryCtxReset, NO_DEVICE)
RETURNS(cuDevicePrimaryCtxRetain, NO_DEVICE)
RETURNS(cuGetErrorName, NO_DEVICE)
RETURNS(cuGetErrorString, NO_DEVICE)
RETURNS(cuLaunchCooperativeKernel, NO_DEVICE)
RETURNS(cuLaunchKernel, NO_DEVICE)
RETURNS(cuLaunchKernelEx, NO_DEVICE)
RETURNS(cuLibraryLoadFromFile, NO_DEVICE)
RETURNS(cuLinkAddData, NO_DEVICE)
RETURNS(cuLinkAddData_v2, NO_DEVICE)
RETURNS(cuLinkAddFile_v2, NO_DEVICE)
RETURNS(cuLinkComplete, NO_DEVICE)
RETURNS(cuLinkCreate, NO_DEVICE)
RETURNS(cuLinkCreate_v2, NO_DEVICE)
RETURNS(cuLinkDestroy, NO_DEVICE)
RETURNS(cuMemcpyDtoH_v2, NO_DEVICE)
RETURNS(cuModuleGetGlobal_v2, NO_DEVICE)
RETURNS(cuModuleLoadFatBinary, NO_DEVICE)
RETURNS(cuOccupancyMaxActiveBlocksPerMultiprocessor, NO_DEVICE)
RETURNS(cuOccupancyMaxPotentialClusterSize, NO_DEVICE)
RETURNS(cuStreamGetCtx, NO_DEVICE)
RETURNS(cuStreamSynchronize, NO_DEVICE)
RETURNS(cuTensorMapEncodeTiled, NO_DEVICE)

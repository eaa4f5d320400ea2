// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>
#include <string.h>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/ops.h"
#include "runtime/base/version.h"
#include "runtime/device/device.h"
#include "trainer/commands/command.h"
#include "trainer/commands/parts.h" /* made by meson.build: what this program was built with */
#include "trainer/run/run_folder.h"

static void print_part(const char *name, const char *version, const char *detail)
{
    bool built = version[0] && strcmp(version, "none") != 0;
    printf("  %-9s %s%s%s\n", name, built ? version : "not built in",
           built && detail[0] ? "; " : "", built ? detail : "");
}

/* The instruction set that the CPU ops use here, and what multiplies, or why there are none. */
static void print_cpu(void)
{
    nd_device *device = NULL;
    const nd_ops *ops = NULL;
    if (strcmp(nd_ops_library_version(), "none") == 0) {
        print_part("CPU", "", "");
    } else if (nd_device_open_cpu(1, &device) == ND_OK && nd_ops_cpu(device, &ops) == ND_OK) {
        print_part("CPU", nd_ops_machine(device), nd_ops_products(device));
    } else {
        print_part("CPU", nd_error_last()->message, "");
    }
    nd_device_close(device);
    nd_error_clear();
}

void nd_version_print(void)
{
    nd_run_text libraries[ND_LIBRARY_COUNT];
    int count = nd_library_versions(true, libraries);
    printf("ndtrain %s\n", ND_VERSION);
    for (int i = 0; i < count; i++) {
        print_part(libraries[i].key, libraries[i].value, "");
    }
    print_cpu();
    print_part("PMIx", ND_BUILT_PMIX, "");
    print_part("CUDA", ND_BUILT_CUDA, ND_BUILT_ARCHITECTURES);
    print_part("cuBLASLt", ND_BUILT_CUBLASLT, "");
    print_part("cuDNN", ND_BUILT_CUDNN,
               nd_ops_cuda_lacks_cudnn() ? "without cudnn-frontend, so device cuda is refused"
                                         : "");
    print_part("NCCL", ND_BUILT_NCCL, "");
}

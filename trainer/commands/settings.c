// SPDX-License-Identifier: Apache-2.0
/* The configuration of a worker: where it comes from, and what its job adds to it. */
#include "trainer/commands/command.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

/* The resolved configuration that ndlaunch hands down as an inherited memory file. */
static nd_status read_inherited(nd_config *config, int fd)
{
    struct stat st;
    if (fstat(fd, &st) != 0 || st.st_size <= 0) {
        return nd_fail(ND_ERR_INTERNAL,
                       "the inherited configuration (descriptor %d) cannot be read", fd);
    }
    char *text = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (text == MAP_FAILED) {
        return nd_fail_system(errno, "the map of the inherited configuration");
    }
    const char *name = getenv("ND_CONFIG_NAME"); /* the file that ndlaunch read */
    nd_status status = nd_config_read_text(config, text, (size_t)st.st_size,
                                           name && name[0] ? name : "configuration from ndlaunch");
    munmap(text, (size_t)st.st_size);
    if (status == ND_OK && !(name && name[0])) {
        config->source[0] = '\0'; /* ndlaunch read flags only */
    }
    return status;
}

/* The environment of ranks that no ndlaunch started says how many they are, and launch.* about
 * nodes does not apply to them. */
static nd_status adopt_world_size(nd_config *config, const nd_identity *id)
{
    if (id->source != ND_IDENTITY_PMIX && id->source != ND_IDENTITY_ENVIRONMENT) {
        return ND_OK;
    }
    if (config->launch.nnodes > 1 && config->launch.nnodes != id->nnodes) {
        return nd_fail(ND_ERR_CONFIG, "launch.nnodes is %lld, but this job has %d nodes (%s)",
                       (long long)config->launch.nnodes, id->nnodes,
                       nd_identity_source_name(id->source));
    }
    if (config->launch.workers == 0) {
        config->launch.workers = config->launch.nproc_per_node > 0
                                     ? config->launch.nproc_per_node * id->nnodes
                                     : id->world_size;
    }
    config->launch.nnodes = 1;
    config->launch.node_rank = 0;
    config->launch.nproc_per_node = 0;
    config->launch.spare_nodes = 0;
    return ND_OK;
}

nd_status nd_settings_read(nd_config *config, nd_cli *cli, const nd_identity *id, int argc,
                           char **argv)
{
    ND_TRY(nd_config_init(config));
    if (id->config_fd >= 0) {
        ND_TRY(read_inherited(config, id->config_fd));
    } else {
        ND_TRY(nd_config_parse(config, cli, argc, argv));
    }
    if (cli->help || cli->version) {
        return ND_OK;
    }
    if (cli->plan_rank >= 0 && strcmp(argv[0], "plan") != 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "--rank %d is for `ndtrain plan` alone, which prints that rank's groups; "
                       "leave it out: a worker's rank comes from ndlaunch, or from RANK in the "
                       "environment",
                       cli->plan_rank);
    }
    if (cli->plan_explains && strcmp(argv[0], "plan") != 0) {
        return nd_fail(ND_ERR_CONFIG, "--explain is for `ndtrain plan` alone; leave it out");
    }
    ND_TRY(adopt_world_size(config, id));
    return nd_config_resolve(config);
}

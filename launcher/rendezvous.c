// SPDX-License-Identifier: Apache-2.0
/* Where the members of a job meet: its key, its name, and on node 0 its store. */
#include <string.h>

#include "launcher/launcher.h"
#include "launcher/nodes.h"
#include "runtime/base/version.h"
#include "runtime/rdzv/key.h"

nd_status nd_rendezvous_key(const char *file, uint8_t key[ND_KEY_BYTES])
{
    if (strcmp(file, "-") == 0) {
        return nd_key_read_stdin(key);
    }
    return file[0] ? nd_key_read_file(file, key) : nd_key_random(key);
}

nd_status nd_rendezvous_name(char *name, size_t capacity)
{
    uint8_t bytes[ND_KEY_BYTES];
    ND_TRY(nd_key_random(bytes));
    snprintf(name, capacity, "nd-%02x%02x%02x%02x", bytes[0], bytes[1], bytes[2], bytes[3]);
    return ND_OK;
}

nd_status nd_rendezvous_open(const nd_rendezvous *meeting, const uint8_t key[ND_KEY_BYTES],
                             nd_store_server **out)
{
    const nd_config *config = meeting->config;
    nd_address addresses[ND_ADDRESS_MAX];
    int count = 0;
    nd_store_server_options options = {
        .loop = meeting->loop,
        .server = {.version = ND_VERSION,
                   .run_id = meeting->name,
                   .world_size = meeting->world_size,
                   .nnodes = nd_nodes_count(config)},
        .hooks = meeting->hooks,
    };
    char host[ND_HOST_MAX] = "127.0.0.1";
    int port = 0;
    if (config->launch.rdzv_endpoint[0]) {
        ND_TRY(nd_endpoint_parse(config->launch.rdzv_endpoint, host, &port));
    }
    ND_TRY(nd_address_resolve(host, port, addresses, &count));
    options.address = addresses[0];
    if (nd_address_is_loopback(&addresses[0])) {
        ND_TRY(nd_address_check_loopback());
    }
    if (!nd_address_is_loopback(&addresses[0]) && !config->launch.rdzv_key_file[0]) {
        return nd_fail(ND_ERR_CONFIG,
                       "launch.rdzv_endpoint %s is open to other hosts and needs a key; make one "
                       "with `ndlaunch --make-key FILE`, copy it to all nodes, and name it with "
                       "--rdzv-key-file",
                       config->launch.rdzv_endpoint);
    }
    memcpy(options.key, key, ND_KEY_BYTES);
    nd_status status = nd_store_server_open(&options, out);
    explicit_bzero(options.key, sizeof options.key);
    return status;
}

/*
 * The file of --mcp-config: which MCP servers there are and how they are reached. Its shape is that of
 * other programs' mcp.json: {"mcpServers": {NAME: {"command", "args", "env", "cwd"} or {"url",
 * "headers"}}}. Knows no protocol.
 */
#ifndef STEEL_SERVER_MCP_CONFIG_H
#define STEEL_SERVER_MCP_CONFIG_H

#include "base/error.h"

#include <stddef.h>

enum { MCP_MAX_SERVERS = 32, MCP_MAX_SERVER_NAME = 64 };

struct mcp_pair {
    char *name, *value; /* owned */
};

struct mcp_server_config {
    char *name;
    char *command; /* a program; NULL: the server has a URL */
    char **args;   /* (n_args) after the program's name */
    int n_args;
    char *cwd; /* NULL = Steel's own */
    char *url;
    struct mcp_pair *pairs; /* (n_pairs) environment variables of a program, headers of a URL */
    int n_pairs;
};

struct mcp_config {
    struct mcp_server_config *servers; /* (n) */
    int n;
};

/* False with an error that names the field. Clear the config in both cases. */
bool mcp_config_load(const char *path, struct mcp_config *out, struct error *err);
bool mcp_config_parse(const char *text, size_t n, struct mcp_config *out, struct error *err);
void mcp_config_clear(struct mcp_config *c);

#endif

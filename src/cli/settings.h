/* Checks the names in the config file and of STEEL_ variables against the options of all commands,
 * so that a misspelt name is not silently without effect. */
#ifndef STEEL_CLI_SETTINGS_H
#define STEEL_CLI_SETTINGS_H

#include <stdbool.h>

/* False after an error message: a line of the config file is no option of any command, or a section
 * is not a command. A variable that is neither an option nor known otherwise is only warned of, as
 * another program may use it. */
bool settings_check(const char *command);

#endif

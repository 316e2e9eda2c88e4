"""Every `sluice` command.

main                the entry point: finds the command and runs it
commands            the table of commands
foreign_flags       flags of other servers, and the flags to use instead
installation        checks the packages that a command needs
process_commands    `sluice serve`, `sluice worker`, `sluice frontend`
start_checks        what `sluice serve` checks before any process starts
chat, http_client   `sluice chat`, `sluice complete` and `sluice models`; their HTTP client
env_report          `sluice env`
fetch               `sluice fetch`
keygen              `sluice keygen`
probe               `sluice probe`: health checks
reload              `sluice reload`
verify              `sluice verify`
shell_completion    `sluice completion`
"""

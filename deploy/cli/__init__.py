"""Every `sluice` command.

main                the entry point: finds the command and runs it
commands            the table of commands
foreign_flags       what to use instead of well-known flags of other servers
installation        what a command needs of its installation
process_commands    serve, worker, frontend
chat, http_client   `sluice chat` and `sluice complete`; their HTTP client
env_report          `sluice env`
fetch               `sluice fetch`
keygen              `sluice keygen`
probe               `sluice probe`: health checks
reload              `sluice reload`
verify              `sluice verify`
shell_completion    `sluice completion`
"""

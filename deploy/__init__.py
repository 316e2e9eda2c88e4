"""The `sluice` command, the launcher, the demo model, and files for production.

cli/                every `sluice` command
supervisor/         starts the processes of a server and keeps them alive
reference/          tables in the documentation that are generated from the code
demo/               the demo model and its training
monitoring/         Prometheus rules and the Grafana dashboard
"""

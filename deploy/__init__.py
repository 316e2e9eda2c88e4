"""The `sluice` command, the launcher, the demo model, and files for production.

cli/                every `sluice` command
supervisor/         starts the processes of a server and keeps them alive
reference/          tables in the documentation that are generated from the code
replay/             `sluice replay`: the requests of a record, sent to another server
demo/               the demo model and its training
ray/                an application for Ray Serve
dynamo/             an engine for NVIDIA Dynamo
release/            the names of a release's images; the Kubernetes manifests, rendered from the Helm chart
monitoring/         Prometheus rules and the Grafana dashboard
"""

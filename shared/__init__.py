"""Code shared by frontends, workers and the launcher. It imports none of them.

messages/, codec    the messages on the wire; their encoding
sockets, curve, address     ZeroMQ sockets, their keys, worker addresses
config/             the settings
flags, settings_check   reading the settings; rules between them
arguments           types of command-line arguments that are not settings
default_sizes, machine      defaults that depend on the machine; facts about the machine
byte_level          the alphabet of byte-level vocabularies
task                what a checkpoint is for: text, embeddings or scores
fingerprint         a short hash of what decides the bytes of answers
hf_hub              checkpoints from the Hugging Face hub
weight_formats      which formats of weights file names show
heartbeat           a process's heartbeat file, read by the launcher
build               which version of Sluice this is
metrics_page        labels of all metrics, and which versions run
gguf/               GGUF files as checkpoints
record              the lines of a record of requests
line_writer         log lines that never block their writer
log_lines           log lines in JSON
"""

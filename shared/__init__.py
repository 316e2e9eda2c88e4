"""Code shared by frontends, workers and the launcher. It imports none of them.

messages/           the messages on the wire
models/             the table of many models, and the messages about it
pictures/           what frontends and workers must agree on about pictures
wire/               ZeroMQ sockets, their keys and addresses, and the encoding of messages
allocator           when freed memory returns to the system
private_files       who may read secrets, and who may write to the cache
signing             signatures of receipts
config/             the settings
flags               reads settings from the command line and the environment
settings_check      checks settings, and the rules between them
arguments           types of command-line arguments that are not settings
default_sizes       default sizes of steps, by device
machine             free memory, CPU cores and GPUs of this machine
byte_level          the alphabet of byte-level vocabularies
task                what a checkpoint is for: text, embeddings or scores
fingerprint         a short hash of what decides the bytes of answers
prefix_identity     what makes equal token ids the same prefix
hf_hub              checkpoints from the Hugging Face hub
processes/          child processes, signals and heartbeats
weight_formats      which formats of weights file names show
build               which version of Sluice this is
logs/               log lines, records of requests, and the page of metrics
gguf/               GGUF files as checkpoints
"""

"""`sluice replay`: sends the requests of a record to a server, and compares its answers with the recorded ones.

command             reads the arguments and runs the replay
record_file         reads a record
model_names         translates recorded names of models into the server's names
sending             sends the requests at their recorded times or one after another, and measures latencies
answers             the parts of an answer that are compared, and where two answers differ
report              the differences and the latencies, as text
plot                the latencies as a picture
"""

"""`sluice replay`: sends the requests of a record to a server, and compares its answers with the recorded ones.

command             the arguments, and what is done with them
record_file         reads a record
sending             sends requests at some pace, and measures
answers             what of an answer is compared, and where two differ
report              what differs, and the latencies, as text
plot                the latencies as a picture
"""

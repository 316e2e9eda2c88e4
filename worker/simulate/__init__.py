"""The scheduler and the page pool in virtual time: `sluice simulate`.

traffic                     who asks for what, and when
cost, calibrate             how long a step takes; measured on this machine
replay                      traffic through the scheduler
report                      what came of it
"""

"""The scheduler and the page pool in virtual time: `sluice simulate`.

command             the command
traffic             which requests arrive when
cost, calibrate     how long a step takes; measured on this machine
replay              traffic through the scheduler
report              the results
"""

"""Runs the scheduler and the page pool in virtual time: `sluice simulate`.

command             the command
traffic             which requests arrive when
cost                the cost model: how long a step takes
calibrate           measures step times on this machine, for the cost model
replay              runs traffic through the scheduler
fleet, fleet_routers    many workers and frontends, with the real routers
report              timelines, JSON and plots of the results
"""

"""Runs the scheduler and the page pool in virtual time: `sluice simulate`.

command             the command
traffic             which requests arrive when
cost                the cost model: how long a step takes
calibrate           measures step times on this machine, for the cost model
replay              runs traffic through the scheduler
fleet               many workers and frontends: the command and its table
fleet_workloads     their traffic, and which of them die when
fleet_run           one fleet in simulated time
fleet_workers, fleet_routers    its workers with real schedulers, its frontends with real routers
fleet_picker        a gateway's picker that follows K/V events, instead of the routers
fleet_sockets       what a frontend costs with the real sockets of many workers
fleet_picture       the table as charts
report              timelines, JSON and plots of the results
"""

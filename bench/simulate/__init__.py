"""Runs the scheduler and the page pool in virtual time: `sluice simulate`.

command             the command
traffic             which requests arrive when
cost                the cost model: how long a step takes
calibrate           measures step times on this machine, for the cost model
replay              runs traffic through the scheduler
fleet               many workers and frontends: the command and its table
fleet_workloads     the traffic of a fleet, and the deaths of its processes
fleet_run           one fleet in simulated time
fleet_workers, fleet_routers    a fleet's workers with real schedulers, its frontends with real routers
fleet_picker        a gateway's endpoint picker that follows K/V events, instead of the routers
fleet_sockets       a frontend's CPU time with the real sockets of many workers
fleet_picture       the fleet's table as charts
report              timelines, JSON and plots of the results
"""
